# SPDX-License-Identifier: Apache-2.0
"""Collect what the topics of the protocol say of each reply: its question and, of a stream, its token ids.

Works on rclpy messages and on those decoded from a bag alike, since only fields are read. Needs no ROS.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[int, int]  # session, reply


@dataclass
class Traffic:
    """The messages about one reply; after a reconnect they come from several sessions."""

    reply: int
    instruction: str
    picture: bytes
    encoding: str
    height: int
    width: int
    at: int  # receive time of its first observation, ns
    placed: dict[int, int] = field(default_factory=dict)  # position -> token

    def place(self, at: int, tokens: Iterable[int]) -> None:
        """Note tokens from position ``at`` on."""
        self.placed |= {at + number: int(token) for number, token in enumerate(tokens)}

    def tokens(self, count: int) -> list[int] | None:
        """The first ``count`` tokens of the reply; None when a message is missing, and of rounds, which name none."""
        placed = [self.placed.get(number, -1) for number in range(count)]
        return None if -1 in placed else placed


class TrafficLog:
    """Groups protocol messages by reply. ``replies`` are in the order of their first observations."""

    def __init__(self) -> None:
        self.replies: list[Traffic] = []
        self._by_key: dict[Key, Traffic] = {}
        self._waiting: dict[Key, list[Any]] = {}  # what arrived before its observation

    def observation(self, message: Any, at: int) -> None:
        """Add an Observation; for a known reply it may carry the verified prefix."""
        key = int(message.session), int(message.reply)
        picture = bytes(message.image)
        traffic = self._by_key.get(key)
        last = self.replies[-1] if self.replies else None
        if traffic is None and last is not None and last.reply == key[1] and last.picture == picture:
            traffic = last  # the same reply under a new session
        if traffic is None:
            size = int(message.height), int(message.width)
            traffic = Traffic(key[1], message.instruction, picture, message.encoding, *size, at)
            self.replies.append(traffic)
        self._by_key[key] = traffic
        traffic.place(0, message.verified)
        for waiting in self._waiting.pop(key, []):
            self.verified(waiting)

    def verified(self, message: Any) -> None:
        """Add a VerifiedTokens."""
        key = int(message.session), int(message.reply)
        traffic = self._by_key.get(key)
        if traffic is not None:
            traffic.place(int(message.at), message.tokens)
        elif len(self._waiting) < 64:
            self._waiting.setdefault(key, []).append(message)

    def before(self, at: int) -> Traffic | None:
        """The last reply that began by the time ``at``, ns."""
        begun = [traffic for traffic in self.replies if traffic.at <= at]
        return begun[-1] if begun else None
