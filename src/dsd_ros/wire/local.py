"""A channel to a verifier engine in the same process. Every message passes the codec as on a real link."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Message


class Engine(Protocol):
    """What answers messages: ``cloud.engine.VerifierEngine``."""

    def submit(
        self, message: Message, reply: Callable[[Message], None], peer: Hashable
    ) -> bool: ...

    def disconnect(self, peer: Hashable) -> None: ...


class LocalChannel:
    """See ``wire.channel.Channel``. The engine stays the caller's, unless ``on_close`` gives it back."""

    def __init__(self, engine: Engine, on_close: Callable[[], object] | None = None) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._engine = engine
        self._on_close = on_close
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._peer: object | None = object()

    def send(self, message: Message) -> None:
        data = encode(message)
        peer, inbox = self._peer, self._inbox
        if peer is None or not self._engine.submit(
            decode(data), lambda answer: inbox.put(encode(answer)), peer
        ):
            raise LinkClosed("the verifier in this process is closed")
        self.bytes_up += len(data)

    def receive(self, timeout: float) -> Message:
        if self._peer is None:
            raise LinkClosed("the verifier in this process is closed")
        try:
            data = self._inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise LinkTimeout(f"the verifier said nothing for {timeout:.1f} s") from None
        self.bytes_down += len(data)
        return decode(data)

    def reconnect(self) -> None:
        if self._peer is not None:
            self._engine.disconnect(self._peer)
        self._peer, self._inbox = object(), queue.SimpleQueue()

    def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            self._engine.disconnect(peer)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
