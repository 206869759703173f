# SPDX-License-Identifier: Apache-2.0
"""A link that loses, duplicates, delays and reorders messages and breaks, by a seed."""

from __future__ import annotations

import random
import time

from dsd_ros.wire.channel import Channel, LinkClosed, LinkTimeout
from dsd_ros.wire.messages import Message


class LossyChannel:
    """Wraps a channel; each message suffers one of the misfortunes with the given probability."""

    def __init__(
        self, inner: Channel, seed: int, loss: float = 0.0, doubled: float = 0.0, delayed: float = 0.0, cut: float = 0.0
    ) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._loss, self._doubled, self._delayed, self._cut = loss, doubled, delayed, cut
        self._up: list[Message] = []  # held back on their way
        self._down: list[Message] = []
        self.misfortunes = 0

    @property
    def bytes_up(self) -> int:
        return self._inner.bytes_up

    @property
    def bytes_down(self) -> int:
        return self._inner.bytes_down

    def send(self, message: Message) -> None:
        self._maybe_cut()
        for item in self._suffer(message, self._up):
            self._inner.send(item)

    def receive(self, timeout: float) -> Message:
        until = time.monotonic() + timeout
        while True:
            self._maybe_cut()
            if self._down and self._random.random() < 0.5:
                return self._down.pop(self._random.randrange(len(self._down)))
            message = self._inner.receive(max(0.0, until - time.monotonic()))
            arrived = self._suffer(message, self._down)
            if arrived:
                self._down.extend(arrived[1:])
                return arrived[0]
            if time.monotonic() >= until:
                raise LinkTimeout("nothing arrived")

    def reconnect(self) -> None:
        self._up.clear()
        self._down.clear()
        self._inner.reconnect()

    def close(self) -> None:
        self._inner.close()

    def _suffer(self, message: Message, held: list[Message]) -> list[Message]:
        chance = self._random.random
        if chance() < self._loss:
            self.misfortunes += 1
            return []
        out = [message]
        if chance() < self._doubled:
            self.misfortunes += 1
            out.append(message)
        if chance() < self._delayed:
            self.misfortunes += 1
            held.append(out.pop())
        while held and chance() < 0.5:
            out.insert(self._random.randrange(len(out) + 1), held.pop(0))
        return out

    def _maybe_cut(self) -> None:
        if self._random.random() < self._cut:
            self.misfortunes += 1
            raise LinkClosed("the link broke off")
