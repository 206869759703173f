# SPDX-License-Identifier: Apache-2.0
"""The link to the verifier as the robot's half sees it, and the one to a verifier in this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dsd_ros.paths import secret_path
from dsd_ros.shown import shown
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Message
from dsd_ros.wire.outbox import Outbox

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TOKEN_CHARS = 4096


class LinkError(Exception):
    """The link or the verifier failed; one sentence for people, without control characters or passwords."""

    def __init__(self, sentence: object = "") -> None:
        super().__init__(shown(sentence))


class LinkClosed(LinkError):
    """The link is down. ``reconnect`` may bring it back, but not before ``retry_after`` seconds."""

    def __init__(self, sentence: object = "", retry_after: float = 0.0) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class LinkTimeout(LinkError):
    """Nothing arrived in time. The link may still be up."""


class LinkRefused(LinkError):
    """The other side refuses us for good (token, certificate, release): reconnecting does not help.

    On a link that has worked before, a refusal may pass (a captive portal, a renewal), and is a ``LinkClosed``.
    """


class Channel(Protocol):
    """A bidirectional link that carries messages of ``wire.messages``.

    A new channel may be down; ``reconnect`` brings it up. One thread may send while another receives.
    ``bytes_up`` and ``bytes_down`` count the encoded messages, without the transport's own framing.
    Messages may be lost, duplicated or reordered where the transport does so; the protocol copes.
    """

    @property
    def bytes_up(self) -> int: ...

    @property
    def bytes_down(self) -> int: ...

    def send(self, message: Message) -> None:
        """Hand a message to the link; does not wait for the other side. Raises LinkClosed."""

    def receive(self, timeout: float) -> Message:
        """The next message; LinkTimeout after ``timeout`` seconds without one, LinkClosed when down."""

    def reconnect(self) -> None:
        """Try once to bring the link up, replacing a connection that may still seem to be up.

        Messages in flight are lost. Raises LinkClosed (a later attempt may work) or LinkRefused (none will).
        """

    def close(self) -> None:
        """Take the link down for good and release its threads and sockets; any number of times."""


class Engine(Protocol):
    """What answers messages: ``cloud.engine.VerifierEngine``."""

    def submit(self, message: Message, reply: Callable[[Message], object], peer: Hashable) -> bool: ...

    def disconnect(self, peer: Hashable) -> None: ...


class LocalChannel:
    """A ``Channel`` to an engine in this process. Every message passes the codec as on a real link.

    The caller owns the engine; ``on_close`` is called once when the channel closes.
    """

    def __init__(self, engine: Engine, on_close: Callable[[], object] | None = None) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._engine = engine
        self._on_close = on_close
        self._outbox = Outbox()
        self._peer: object | None = object()

    def send(self, message: Message) -> None:
        data = encode(message)
        peer, outbox = self._peer, self._outbox
        if peer is None or not self._engine.submit(decode(data), outbox.put, peer):
            raise LinkClosed("the verifier in this process is closed")
        self.bytes_up += len(data)

    def receive(self, timeout: float) -> Message:
        outbox = self._outbox
        message = outbox.get(max(0.0, timeout)) if self._peer is not None else None
        if message is None:
            if self._peer is None or outbox.closed:
                raise LinkClosed("the verifier in this process is closed")
            raise LinkTimeout(f"the verifier sent nothing for {timeout:.1f} s")
        data = encode(message)
        self.bytes_down += len(data)
        return decode(data)

    def reconnect(self) -> None:
        if self._peer is not None:
            self._engine.disconnect(self._peer)
        self._outbox.close()
        self._peer, self._outbox = object(), Outbox()

    def close(self) -> None:
        peer, self._peer = self._peer, None
        self._outbox.close()
        if peer is not None:
            self._engine.disconnect(peer)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backoff:
    """Waiting times between attempts to reconnect: doubling, bounded, and with jitter.

    Jitter (half to all of the nominal time) keeps robots that were cut off together from returning together.
    """

    def __init__(self, first: float = 0.05, longest: float = 5.0) -> None:
        self.first = first
        self.longest = longest
        self._failures = 0

    def reset(self) -> None:
        """The link is up: the next wait is short again."""
        self._failures = 0

    def next_delay(self, failure: Exception | None = None) -> float:
        """Seconds to wait before the next attempt, after ``failure`` if that asks for a pause.

        Robots that were sent away together come back within a quarter of that pause.
        """
        nominal = min(self.longest, self.first * 2.0**self._failures)
        self._failures = min(self._failures + 1, 32)
        asked = getattr(failure, "retry_after", 0.0)
        return max(nominal * random.uniform(0.5, 1.0), asked * random.uniform(1.0, 1.25))


TokenSource: TypeAlias = str | Callable[[], str | None] | None  # a token, or what reads it anew


def token_now(source: TokenSource) -> str | None:
    """The token that is to be shown now; ValueError where it cannot be read."""
    return source() if callable(source) else source


def read_token(path: str | Path) -> str:
    """The bearer token in a file, without surrounding white space; ValueError, one sentence, when there is none."""
    try:
        token = secret_path(path).read_text(encoding="utf-8-sig").strip()
    except OSError as error:
        make = f"; write one: openssl rand -hex 32 > {path}" if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"the token file {path} cannot be read: {error.strerror}{make}") from error
    except UnicodeDecodeError:
        token = ""
    try:
        return check_token(token)
    except ValueError as error:
        raise ValueError(f"the token file {path} holds no token; write {error}") from error


def check_token(token: str) -> str:
    """``token`` if it can be one; else ValueError, with what a token is."""
    if not token or len(token) > MAX_TOKEN_CHARS or not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("one line of printable ASCII without spaces, for example from `openssl rand -hex 32`")
    return token


def bearer(token: str) -> str:
    """The value of the Authorization header."""
    return f"Bearer {token}"
