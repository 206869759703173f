# SPDX-License-Identifier: Apache-2.0
"""Addresses as people type them: of a verifier to dial, and of this machine to listen on.

Everything that takes an address (flags, parameters, launch arguments) checks it here, when it is given.
"""

from __future__ import annotations

import ipaddress
import re

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_PATH = re.compile(r"(/[\w.~%!$&'()*+,;=:@-]*)*", re.ASCII)
_PAGES = ("/healthz", "/metrics")  # what a verifier serves to browsers


def check_verifier_address(text: str) -> str:
    """``text`` if it is the address of a verifier, ws://HOST[:PORT][/PATH] or wss://; else ValueError, one sentence."""
    if wrong := _wrong_address(text):
        raise ValueError(f"{_named(text)!r} is not a verifier address: {wrong}; use ws://host:port or wss://host:port")
    return text


def check_host(text: str) -> str:
    """``text`` if a server can listen on it, a host name or an IP address; else ValueError, one sentence."""
    if wrong := _wrong_host(text):
        raise ValueError(
            f"{_named(text)!r} is not an address to listen on: {wrong}; use 127.0.0.1, or 0.0.0.0 for every interface"
        )
    return text


def _named(text: str) -> str:
    """``text`` for an error, without anything that may be a secret."""
    named = re.sub(r"(?s)^(\w*:/+)?.*@", lambda found: f"{found[1] or ''}***@", text[:500])
    return re.sub(r"(?s)([?#]).+", r"\1***", named)


def _wrong_address(text: str) -> str:
    """What is wrong with an address, as part of a sentence; "" for nothing."""
    scheme, separator, rest = text.partition("://")
    place, path = re.fullmatch(r"(?s)([^/?#]*)(.*)", rest).groups()  # type: ignore[union-attr]
    if not text:
        return "it is empty"
    if "@" in rest.partition("?")[0] or (not separator and "@" in text):
        return "it holds a user or a password, which belongs in the token file"
    if not text.isprintable() or any(char.isspace() for char in text):
        return "it holds a blank or a control character"
    if not separator:
        return "ws:// or wss:// is missing in front"
    if scheme.lower() not in ("ws", "wss"):
        return f"{scheme}:// is another protocol"
    if "?" in path or "#" in path:
        return "it has a query or a fragment"
    if path in _PAGES or not _PATH.fullmatch(path):
        return f"the path {path} does not lead to a verifier"
    return _wrong_place(place)


def _wrong_place(place: str) -> str:
    """What is wrong with HOST[:PORT]."""
    if place.startswith("["):
        host, closed, port = place[1:].partition("]")
        if not closed or (port and not port.startswith(":")):
            return "an IPv6 address ends with a bracket, as in ws://[::1]:8765"
        if ":" not in host:
            return f"[{host}] is not an IPv6 address"
    elif place.count(":") > 1:
        return "it has several colons, and an IPv6 address stands in brackets, as in ws://[::1]:8765"
    else:
        host, colon, port = place.partition(":")
        port = colon + port
    if port and not (re.fullmatch(r":[0-9]{1,5}", port) and 0 < int(port[1:]) < 65536):
        return f"the port is {port[1:] or 'missing'}, and ports are numbers from 1 to 65535"
    return _wrong_host(host)


def _wrong_host(host: str) -> str:
    """What is wrong with a host name or an IP address."""
    if not host:
        return "the host is missing"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return ""
    try:
        name = host.removesuffix(".").encode("idna").decode("ascii")
    except UnicodeError:
        name = ""
    labels = name.split(".")
    if labels[-1].isdigit():
        return f"{_named(host)} is not an IP address"
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return f"{_named(host)} cannot be a host name"
    return ""
