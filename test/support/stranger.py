# SPDX-License-Identifier: Apache-2.0
"""A link on which somebody else listens and talks."""

from __future__ import annotations

from collections.abc import Callable

from dsd_ros.wire.channel import Channel
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Message


class Stranger:
    """Stands on the link as on a DDS topic: hears everything, and adds what it likes; a ``Channel``."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.up: list[Message] = []
        self.down: list[Message] = []
        self.waiting: list[Message] = []  # to be delivered before what the verifier sends
        self.injected = 0
        self.on_up: Callable[[Message], None] = lambda _: None
        self.close, self.reconnect = inner.close, inner.reconnect

    @property
    def bytes_up(self) -> int:
        return self._inner.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._inner.bytes_down

    def send(self, message: Message) -> None:
        self.up.append(message)
        self.on_up(message)
        self._inner.send(message)

    def receive(self, timeout: float) -> Message:
        if self.waiting:
            self.injected += 1
            return decode(encode(self.waiting.pop(0)))
        message = self._inner.receive(timeout)
        self.down.append(message)
        return message
