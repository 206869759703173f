# SPDX-License-Identifier: Apache-2.0
"""Addresses as people type them: of a verifier or a draft engine to dial, and of this machine to listen on.

Everything that takes an address (flags, parameters, launch arguments) checks it here, when it is given.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

_HOST = re.compile(r"(?=.{1,253}$)(?!-)[\w-]{1,63}(\.(?!-)[\w-]{1,63})*\.?")
_PATH = re.compile(r"[\w.~%!$&'()*+,;=:@/-]*", re.ASCII)
_PAGES = ("/healthz", "/metrics")  # what a verifier serves to browsers


def check_verifier_address(text: str) -> str:
    """``text`` if it is the address of a verifier, ws://HOST[:PORT][/PATH] or wss://; else ValueError, one sentence."""
    if wrong := _wrong_address(text, ("ws", "wss"), "a verifier"):
        raise ValueError(f"{_named(text)!r} is not a verifier address: {wrong}; use ws://host:port or wss://host:port")
    return text


def check_engine_address(text: str) -> str:
    """``text`` if it is the address of a draft engine, http://HOST[:PORT][/PATH]; else ValueError, one sentence."""
    if wrong := _wrong_address(text, ("http",), "an engine"):
        raise ValueError(
            f"{_named(text)!r} is not an engine's address: {wrong}; use http://host:port for llama-server, or "
            "http://host:port/v1 for an OpenAI API"
        )
    return text


def check_host(text: str) -> str:
    """``text`` if a server can listen on it, a host name or an IP address; else ValueError, one sentence."""
    if not _is_host(text):
        raise ValueError(
            f"{_named(text)!r} is not an address to listen on; use 127.0.0.1, or 0.0.0.0 for every interface"
        )
    return text


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _named(text: str) -> str:
    """``text`` for an error, without anything that may be a secret."""
    named = re.sub(r"(?s)^(\w*:/+)?.*@", lambda found: f"{found[1] or ''}***@", text[:500])
    return re.sub(r"(?s)([?#]).+", r"\1***", named)


def _wrong_address(text: str, schemes: tuple[str, ...], what: str) -> str:
    """What is wrong with the address of ``what``, as part of a sentence; "" for nothing."""
    begins = " or ".join(f"{scheme}://" for scheme in schemes)
    if "@" in text.partition("?")[0]:
        return "it holds a user or a password, which belongs in the token file"
    if not text.isprintable() or any(map(str.isspace, text)):
        return "it holds a blank or a control character"
    try:
        parts, port = urlsplit(text), urlsplit(text).port
    except ValueError:
        return "its host or its port cannot be read"
    if parts.scheme not in schemes or not parts.netloc:
        return f"it does not begin with {begins} and a host"
    if port == 0 or re.search(r":$|\][^:]", parts.netloc):
        return "ports are numbers from 1 to 65535"
    if "?" in text or "#" in text or parts.path in _PAGES or not _PATH.fullmatch(parts.path):
        return f"what follows the host does not lead to {what}"
    if not _is_host(parts.hostname or ""):
        return f"it names no valid host; an IPv6 address stands in brackets, as in {schemes[0]}://[::1]:8765"
    return ""


def _is_host(text: str) -> bool:
    """Whether this is an IP address or can be a host name."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return bool(_HOST.fullmatch(text)) and not text.rstrip(".").rpartition(".")[2].isdigit()
