# SPDX-License-Identifier: Apache-2.0
"""A link whose verifier restarts at chosen messages; it can also break and duplicate."""

from __future__ import annotations

from collections.abc import Callable

from stepped import Unhurried

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.messages import Message

# Of a message boundary: what happens there.
EVENTS = ("restart", "cut", "restart and cut", "double")


class RestartingChannel(LocalChannel):
    """``happens(boundary, message)`` names the event, or "", at each message: those on their way up before
    they are sent, those on their way down (None as ``message``) before they are waited for."""

    def __init__(self, target: object, happens: Callable[[int, Message | None], str]) -> None:
        self._target = target
        self._happens = happens
        self.boundaries = 0
        self.restarts = 0
        super().__init__(VerifierEngine(Unhurried(target)))

    def restart(self) -> None:
        """End the verifier, with all it knew and all that waits in it, and start another."""
        self.restarts += 1
        assert self._engine.close(20)
        self._engine = VerifierEngine(Unhurried(self._target))

    def send(self, message: Message) -> None:
        if self._event(message) == "double":
            super().send(message)
        super().send(message)

    def receive(self, timeout: float) -> Message:
        if timeout > 0 or len(self._outbox):  # a look at what has come counts if something has
            self._event(None)
        return super().receive(timeout)

    def close(self) -> None:
        super().close()
        self._engine.close(20)

    def _event(self, message: Message | None) -> str:
        event = self._happens(self.boundaries, message)
        self.boundaries += 1
        if "restart" in event:
            self.restart()
        if "cut" in event:
            raise LinkClosed("the link broke off")
        return event
