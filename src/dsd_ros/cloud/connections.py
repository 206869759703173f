# SPDX-License-Identifier: Apache-2.0
"""A robot's websocket as the server sees it: whose it is, and whether its robot is in the middle of a reply."""

from __future__ import annotations

import time
from collections.abc import Container, Hashable
from typing import Any

from websockets.asyncio.server import ServerConnection

from dsd_ros.cloud.credentials import TokenHolder
from dsd_ros.wire.authentication import name_of
from dsd_ros.wire.messages import (
    Draft,
    Message,
    Observation,
    Outcome,
    Question,
    QuestionEnd,
    SessionClose,
    VerifiedTokens,
)


class RobotConnection(ServerConnection):
    """A connection that can be closed without harm ``between_replies``: its robot then dials again, and a balancer may
    choose another verifier.
    """

    holder: TokenHolder | None = None  # whose token it shows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replies: set[Hashable] = set()  # sessions and questions in the middle of a reply
        self._active = time.monotonic()  # when the last message came or went

    @property
    def robot(self) -> str:
        """The robot's name, where each has a token of its own."""
        return self.holder.name if self.holder is not None else ""

    @property
    def origin(self) -> str:
        """Address and port that it comes from: a robot's, or those of a proxy in front."""
        host, port = self.remote_address[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def fields(self) -> dict[str, str]:
        """Its robot's name for a line in the log, if it has one."""
        return {"robot": self.robot} if self.robot else {}

    def carried(self, message: Message, ends: Container[int]) -> None:
        """Note a message that came or goes; ``ends``: the tokens that end a reply."""
        self._active = time.monotonic()
        match message:
            case Observation() | Draft() | Question():
                self._replies.add(name_of(message))
            case Outcome() if message.is_final and not message.distribution and message.next_token in ends:
                self._replies.discard(name_of(message))
            case VerifiedTokens() if not message.ended:  # of a reply that began over another link, too
                self._replies.add(name_of(message))
            case VerifiedTokens() | SessionClose() | QuestionEnd():
                self._replies.discard(name_of(message))

    def between_replies(self, quiet_s: float) -> bool:
        """Whether every robot of this connection is between two replies, as far as messages tell.

        A reply that the robot cuts off at its length looks like one that goes on, until ``quiet_s`` without a message:
        a robot that waits for an answer sends again before that.
        """
        return not self._replies or time.monotonic() - self._active > quiet_s
