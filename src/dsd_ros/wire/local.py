"""A channel to a verifier engine in the same process. Every message passes the codec as on a real link."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Message
from dsd_ros.wire.outbox import Outbox


class Engine(Protocol):
    """What answers messages: ``cloud.engine.VerifierEngine``."""

    def submit(self, message: Message, reply: Callable[[Message], object], peer: Hashable) -> bool: ...

    def disconnect(self, peer: Hashable) -> None: ...


class LocalChannel:
    """See ``wire.channel.Channel``. The engine stays the caller's, unless ``on_close`` gives it back."""

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
        outbox.obey(message)
        if peer is None or not self._engine.submit(decode(data), outbox.put, peer):
            raise LinkClosed("the verifier in this process is closed")
        self.bytes_up += len(data)

    def receive(self, timeout: float) -> Message:
        outbox = self._outbox
        message = outbox.get(max(0.0, timeout)) if self._peer is not None else None
        if message is None:
            if self._peer is None or outbox.closed:
                raise LinkClosed("the verifier in this process is closed")
            raise LinkTimeout(f"the verifier said nothing for {timeout:.1f} s")
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

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
