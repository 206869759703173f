# SPDX-License-Identifier: Apache-2.0
"""Reconstruct the token ids of replies from the protocol's messages on the topics.

Works on rclpy messages and on those decoded from a bag alike, since only fields are read. Needs no ROS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dsd_ros.wire.messages import prefix_digest

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
    starts: dict[int, list[int]] = field(default_factory=lambda: {0: []})  # rounds -> tokens verified by then
    drafts: dict[int, list[Any]] = field(default_factory=dict)
    outcomes: dict[int, Any] = field(default_factory=dict)  # the final ones
    placed: dict[int, int] = field(default_factory=dict)  # modes stream and ar: position -> token

    def place(self, at: int, tokens: Iterable[int]) -> None:
        """Note tokens from position ``at`` on."""
        self.placed |= {at + number: int(token) for number, token in enumerate(tokens)}

    def tokens(self, count: int) -> list[int] | None:
        """The first ``count`` tokens of the reply; None when a message is missing."""
        if self.placed:
            placed = [self.placed.get(number, -1) for number in range(count)]
            return None if -1 in placed else placed
        done, found = 0, list[int]()
        while len(found) < count:
            outcome = self.outcomes.get(done + 1)
            if outcome is None:
                later = [rounds for rounds in self.starts if rounds > done]
                if not later:
                    return None
                done = min(later)
                found = list(self.starts[done])
                continue
            gained = self._gained(done + 1, outcome, found)
            if gained is None:
                return None
            found += gained
            done += 1
        return found[:count]  # a draft may run past the end of the reply

    def _gained(self, number: int, outcome: Any, before: list[int]) -> list[int] | None:
        draft = self._draft(number, before)
        if draft is None:
            held: list[int] | None = [] if not outcome.accepted else None
        else:
            held = _path(draft, int(outcome.accepted))
        if held is None:
            return None
        if len(outcome.distribution) == 0:
            return [*held, int(outcome.next_token)]
        # Split mode: the robot drew the recovered token and reports it with its next draft.
        for later in (*self.drafts.get(number + 1, ()), *self.drafts.get(number, ())):
            if len(later.resampled) and later is not draft:
                return [*held, *map(int, later.resampled)]
        return None

    def _draft(self, number: int, before: list[int]) -> Any:
        """The draft that this round's outcome verified; a draft on an assumed prefix only if the assumption held."""
        plain = None
        for draft in self.drafts.get(number, ()):
            if len(draft.assumed) == 0:
                if plain is None or len(draft.tokens):
                    plain = draft
            elif bytes(draft.assumed) == prefix_digest(before):
                return draft
        return plain


def _path(draft: Any, accepted: int) -> list[int] | None:
    """The accepted tokens; None when the draft has no such node."""
    tokens = [int(token) for token in draft.tokens]
    parents = [int(parent) for parent in draft.parents]
    if accepted > len(tokens) or (parents and len(parents) != len(tokens)):
        return None
    if not parents:
        return tokens[:accepted]
    path, node = [], accepted - 1
    while node >= 0:
        path.append(tokens[node])
        if parents[node] > node:  # parents come first; anything else would be a circle
            return None
        node = parents[node] - 1
    return path[::-1]


class TrafficLog:
    """Groups protocol messages by reply. ``replies`` are in the order of their first observations."""

    def __init__(self) -> None:
        self.replies: list[Traffic] = []
        self._by_key: dict[Key, Traffic] = {}
        # Messages that arrived before their observation, and what takes them.
        self._waiting: dict[Key, list[tuple[Callable[[Any], None], Any]]] = {}

    def observation(self, message: Any, at: int) -> None:
        """Add an Observation; for a known reply it may carry the verified prefix."""
        key = int(message.session), int(message.reply)
        picture = bytes(message.image)
        traffic = self._by_key.get(key)
        last = self.replies[-1] if self.replies else None
        if traffic is None and last is not None and last.reply == key[1] and last.picture == picture:
            traffic = last  # the same reply under a new session
        if traffic is None:
            traffic = Traffic(
                key[1], message.instruction, picture, message.encoding, int(message.height),
                int(message.width), at,
            )  # fmt: skip
            self.replies.append(traffic)
        self._by_key[key] = traffic
        if message.rounds:
            traffic.starts[int(message.rounds)] = [int(token) for token in message.verified]
        else:
            traffic.place(0, message.verified)
        for take, waiting in self._waiting.pop(key, []):
            take(waiting)

    def verified(self, message: Any) -> None:
        """Add a VerifiedTokens."""
        traffic = self._of(message, self.verified)
        if traffic is not None:
            traffic.place(int(message.at), message.tokens)

    def draft(self, message: Any) -> None:
        """Add a Draft."""
        traffic = self._of(message, self.draft)
        if traffic is not None:
            traffic.drafts.setdefault(int(message.round), []).append(message)

    def outcome(self, message: Any) -> None:
        """Add an Outcome; early exits are ignored, since they are not binding."""
        traffic = self._of(message, self.outcome)
        if traffic is not None and message.is_final:
            traffic.outcomes.setdefault(int(message.round), message)

    def before(self, at: int) -> Traffic | None:
        """The last reply that began by the time ``at``, ns."""
        begun = [traffic for traffic in self.replies if traffic.at <= at]
        return begun[-1] if begun else None

    def _of(self, message: Any, take: Callable[[Any], None]) -> Traffic | None:
        key = int(message.session), int(message.reply)
        traffic = self._by_key.get(key)
        if traffic is None and len(self._waiting) < 64:
            self._waiting.setdefault(key, []).append((take, message))
        return traffic
