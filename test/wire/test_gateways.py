# SPDX-License-Identifier: Apache-2.0
"""What a proxy, a captive network or a wrong clock answers in a verifier's place, and what the robot makes of it."""

from __future__ import annotations

import ssl
import subprocess
import threading
import time
from contextlib import suppress

import pytest
from gateway import Gateway, response
from websockets.exceptions import ConnectionClosed

from dsd_ros.edge.client import LinkSettings, VerifierClient
from dsd_ros.wire.channel import Backoff, LinkClosed, LinkRefused
from dsd_ros.wire.client import DeadlineExceeded, Limits
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import SessionClose, SessionRequest
from dsd_ros.wire.websocket import MAX_RETRY_AFTER_S, WebsocketChannel

PASSING = ("200 OK", "302 Found", "404 Not Found", "429 Too Many Requests", "503 Service Unavailable")


def refusal(answer: bytes) -> LinkClosed | LinkRefused:
    with (
        Gateway(answer) as gateway,
        WebsocketChannel(f"ws://127.0.0.1:{gateway.port}", connect_timeout=2) as channel,
        pytest.raises((LinkClosed, LinkRefused)) as found,
    ):
        channel.reconnect()
    return found.value


@pytest.mark.parametrize("status", PASSING)
def test_a_passing_answer_is_dialled_again(status):
    error = refusal(response(status))
    assert isinstance(error, LinkClosed)
    assert f"HTTP {status[:3]}" in str(error)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_refused_token_is_final(status):
    error = refusal(response(status))
    assert isinstance(error, LinkRefused)
    assert "token" in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://login.example/?u=1\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://[broken\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: ws://a..b:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 429 X\r\nRetry-After: 1\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/2.0 200 OK\r\n\r\n",
        b"\x16\x03\x01\x00\x02\x02\x28",
        b"",
    ],
)
def test_nonsense_is_dialled_again(answer):
    assert isinstance(refusal(answer), LinkClosed)


def test_what_a_gateway_says_cannot_control_a_terminal():
    error = refusal(response("503 Busy", body=b"\x1b]0;owned\x07 \xc2\x9b31m\nbusy \xe2\x80\xae see http://u:pw@host/"))
    assert "busy" in str(error) and "\\x1b]0;owned\\x07" in str(error)
    assert str(error).isprintable() and "pw" not in str(error)


def pause_of(*headers: str, status: str = "429 Too Many Requests") -> float:
    error = refusal(response(status, *headers))
    assert isinstance(error, LinkClosed)
    return error.retry_after


def test_retry_after_is_heeded_within_bounds():
    assert pause_of() == 0.0
    assert pause_of("Retry-After: 2") == 2.0
    assert pause_of("Retry-After: 7", status="503 Busy") == 7.0
    assert pause_of("Retry-After: 99999999") == MAX_RETRY_AFTER_S
    assert pause_of("Retry-After: " + "9" * 400) == MAX_RETRY_AFTER_S
    for nonsense in ("-1", "soon", "", "1e9", "nan", "Thu, 99 Nov 2026 14:00:00 GMT"):
        assert pause_of(f"Retry-After: {nonsense}") == 0.0


def test_the_backoff_waits_at_least_as_long_as_it_was_asked_to():
    backoff = Backoff(0.01, 0.02)
    delays = [backoff.next_delay(LinkClosed("busy", retry_after=3.0)) for _ in range(50)]
    assert all(3.0 <= delay <= 3.75 for delay in delays)
    assert len({round(delay, 4) for delay in delays}) > 10, "robots that were sent away together return together"
    assert backoff.next_delay(LinkClosed("down")) <= 0.02


def test_a_session_waits_as_long_as_the_gateway_asks(caplog):
    """With a sentence, and not beyond its deadline."""

    def request(number: int, ticket: bytes) -> SessionRequest:
        raise AssertionError("no session can be asked for")

    with Gateway(response("429 Too Many Requests", "Retry-After: 1")) as gateway:
        channel = WebsocketChannel(f"ws://127.0.0.1:{gateway.port}")
        client = VerifierClient(channel, request, LinkSettings(attempts=2))
        began = time.monotonic()
        with pytest.raises(LinkClosed, match="HTTP 429"):
            client.open(Limits())
        assert time.monotonic() - began >= 1.0
        assert gateway.dialled == 2
        with pytest.raises(DeadlineExceeded):
            client.open(Limits(deadline=time.monotonic() + 0.2))
        channel.close()
    assert sum("the next attempt is in" in line for line in caplog.messages) == 1


def certificate(folder, *words: str):
    """A certificate of 127.0.0.1 signed by itself; ``words``: further options of `openssl ca`."""
    (folder / "index").touch()
    (folder / "ca.cnf").write_text(
        "[ca]\ndefault_ca=it\n[it]\ndatabase=index\nnew_certs_dir=.\nrand_serial=yes\ndefault_md=sha256\n"
        "default_days=2\npolicy=any\nx509_extensions=ext\n[any]\ncommonName=supplied\n"
        "[ext]\nsubjectAltName=IP:127.0.0.1\nbasicConstraints=CA:TRUE\n"
    )
    make = "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -keyout k -out r"
    sign = "openssl ca -batch -config ca.cnf -selfsign -keyfile k -in r -out c -notext"
    for command in (make.split(), [*sign.split(), *words]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "c", folder / "k")
    return context, folder / "c"


@pytest.mark.parametrize(
    ("words", "host", "trusted", "kind", "says"),
    [
        (("-startdate", "20990101000000Z", "-enddate", "21000101000000Z"), "127.0.0.1", True, LinkClosed, "set this"),
        (("-startdate", "20010101000000Z", "-enddate", "20020101000000Z"), "127.0.0.1", True, LinkClosed, "clock"),
        ((), "localhost", True, LinkRefused, "dial the host that the certificate names"),
        ((), "127.0.0.1", False, LinkRefused, "name the authority"),
    ],
)
def test_only_a_certificate_out_of_its_time_is_dialled_again(tmp_path, words, host, trusted, kind, says):
    context, file = certificate(tmp_path, *words)
    with (
        Gateway(b"", tls=context) as gateway,
        WebsocketChannel(f"wss://{host}:{gateway.port}", ca_file=file if trusted else None) as channel,
        pytest.raises(kind, match=says),
    ):
        channel.reconnect()


def test_a_link_that_worked_waits_for_a_certificate_that_is_trusted_again(tmp_path):
    """A captive portal, or a renewal that reaches the robot's CA file after the verifier's certificate."""
    from websockets.sync.server import serve

    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    (context, first), (_, second) = map(certificate, folders)
    trusted = tmp_path / "ca.pem"
    trusted.write_text(first.read_text())
    message = SessionClose(1)

    def greet(link) -> None:
        link.send(encode(message))
        with suppress(ConnectionClosed):
            link.recv()  # until the robot goes

    with serve(greet, "127.0.0.1", 0, ssl=context) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with WebsocketChannel(f"wss://127.0.0.1:{server.socket.getsockname()[1]}", ca_file=trusted) as channel:
            channel.reconnect()
            assert channel.receive(5) == message
            context.load_cert_chain(second, second.with_name("k"))
            with pytest.raises(LinkClosed, match="not trusted"):
                channel.reconnect()
            trusted.write_text(second.read_text())
            channel.reconnect()
            assert channel.receive(5) == message
        server.shutdown()
        thread.join(10)


def test_a_name_that_nobody_knows_yet_is_dialled_again():
    with (
        WebsocketChannel("ws://verifier.invalid:8765", connect_timeout=2) as channel,
        pytest.raises(LinkClosed, match="cannot be reached"),
    ):
        channel.reconnect()
