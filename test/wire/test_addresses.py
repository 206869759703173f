# SPDX-License-Identifier: Apache-2.0
"""Addresses are checked when they are given, and named without their passwords."""

from __future__ import annotations

import re

import pytest

from dsd_ros.addresses import check_host, check_verifier_address
from dsd_ros.shown import masked, shown

GOOD = (
    "ws://127.0.0.1:8765", "wss://cloud.example", "ws://[::1]:8765", "ws://[fe80::1%eth0]:1", "ws://h:8765/robots",
    "ws://verifier_1:65535", "WS://H:1", "ws://münchen.example:80", "ws://host.:1", "ws://10.0.0.7:1/a/b-c/",
)  # fmt: skip
BAD = {
    "": "does not begin", "h:8765": "does not begin", "//h:1": "does not begin", "https://h:1": "does not begin",
    "ws://": "and a host", "ws://:8765": "no valid host", "ws:/h:1": "does not begin", "wss:///path": "and a host",
    " ": "blank", "ws://h: 8765": "blank", "ws://h:1\n": "blank", "ws://h\x1b[31m:1": "control character",
    "ws://\u202eh:1": "control character", "ws://h\0:1": "control character",
    "ws://h:87x65": "port cannot", "ws://h:65536": "port cannot", "ws://h:\u0661": "port cannot",
    "ws://h:0": "1 to 65535", "ws://h:": "1 to 65535", "ws://[::1]8765": "1 to 65535|port cannot",  # by Python
    "ws://h:8765:8765": "port cannot", "ws://::1:8765": "port cannot", "ws://[::1": "port cannot",
    "ws://[1.2.3.4]:1": "port cannot",
    "ws://a..b:1": "no valid host", "ws://-a:1": "no valid host", "ws://*:1": "no valid host",
    "ws://" + "a" * 64: "no valid host", "ws://" + ".".join(["a" * 60] * 5): "no valid host",
    "ws://256.1.1.1:1": "no valid host", "ws://1.2.3:1": "no valid host", "ws://http://h:1": "1 to 65535",
    "ws://h/?x=1": "does not lead", "ws://h/#x": "does not lead", "ws://h:1/healthz": "does not lead",
    "ws://u:hunter2@h:1": "token file", "u:hunter2@h:1": "token file", "ws://u:a?hunter2@h:1": "port cannot",
    "ws://h/?token=hunter2": "does not lead", "ws://u:hunter2@ h": "token file", "ws://h/hunter2@": "token file",
}  # fmt: skip


@pytest.mark.parametrize("address", GOOD)
def test_an_address_is_taken_as_it_is(address):
    assert check_verifier_address(address) == address


@pytest.mark.parametrize("address", BAD)
def test_a_mistyped_address_is_named_with_its_mistake(address):
    with pytest.raises(ValueError, match="is not a verifier address: .*use ws://host:port or wss://host:port") as found:
        check_verifier_address(address)
    sentence = str(found.value)
    assert re.search(BAD[address], sentence)
    assert sentence.isprintable() and "hunter2" not in sentence


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "::1", "0.0.0.0", "localhost", "robot-7.example."])
def test_a_host_to_listen_on(host):
    assert check_host(host) == host


@pytest.mark.parametrize("host", ["", " ", "a..b", "0.0.0.0:80", "[::1]", "ws://h", "*", "999.1.1.1", "h\n", "u:pw@h"])
def test_no_host_to_listen_on(host):
    with pytest.raises(ValueError, match="is not an address to listen on") as found:
        check_host(host)
    assert "pw" not in str(found.value)


def test_text_from_outside_cannot_control_a_terminal():
    assert shown("a\x1b[31m\x07\x9b2J\r\u202e\u2028\udcff\x7f") == "a\\x1b[31m\\x07\\x9b2J\\r\\u202e\\u2028\\udcff\\x7f"
    assert shown("é 日本語\u3000x\nb", keep="\n") == "é 日本語\u3000x\nb"
    for code in range(0x250):
        assert shown(chr(code)).isprintable() or chr(code) == "\xa0"
    shown("".join(map(chr, range(0xD7F0, 0xE010)))).encode()


@pytest.mark.parametrize(
    "text",
    [
        "rtsp://user:hunter2@camera/1", "http://hunter2@h", "http://u:hunter2@x@h/", "x http://u:hunter2@h y",
        "http://u:hunter%40@h", "http://h/?token=hunter2", "http://h/?a=1&access_token=hunter2&b=2",
        "wss://h/x;password=hunter2", "socks5://u:hunter2@[::1]:1", "http://h/?X-Amz-Signature=hunter2#x",
        "{'url': 'ws://u:hunter2@h'}", "http://u:hunter2@h,http://v:hunter2@h",
    ],
)  # fmt: skip
def test_passwords_of_urls_are_left_out(text):
    assert "hunter" not in masked(text) and "***" in masked(text)


@pytest.mark.parametrize("text", ["ws://h:1/a@b", "me@home", "http://127.0.0.1:9090/?url=rerun", "a://b?monkey=1"])
def test_other_texts_stay(text):
    assert masked(text) == text
