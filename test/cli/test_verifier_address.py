# SPDX-License-Identifier: Apache-2.0
"""The address that `dsd verifier` prints."""

from __future__ import annotations

import pytest

from dsd_ros.cli.demo_run import address_in


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[INFO] listening on ws://127.0.0.1:43211 (v1)", ("ws", "127.0.0.1", 43211)),
        ("listening on wss://cloud-7.example.org:8443", ("wss", "cloud-7.example.org", 8443)),
        ("listening on ws://[::1]:8443", ("ws", "::1", 8443)),
        ("loading the target", None),
    ],
)
def test_the_address_is_found_and_written_again(line, found):
    address = address_in(line)
    assert (address and (address.scheme, address.hostname, address.port)) == found
    if address is not None:
        assert address.geturl() in line
