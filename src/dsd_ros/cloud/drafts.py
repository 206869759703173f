# SPDX-License-Identifier: Apache-2.0
"""What a robot's draft says comes next in a reply that the target decodes by itself (mode stream)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.wire.messages import DraftTokens

MOST_DRAFTED = 16  # drafted tokens of one reply in a step of mode stream: more of them rarely hold
MOST_AHEAD = 4 * MAX_DRAFT_LENGTH  # tokens kept beyond the verified ones


class StreamedDraft:
    """The drafted tokens of a session's newest reply, by position. Any thread may ``take``, one reads.

    Messages may come in any order, twice, or never. Nothing here decides a token: a wrong draft only gains nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reply = self._stream = -1
        self._void = False  # whether the stream has contradicted the reply
        self._tokens: dict[int, int] = {}
        self._verified = 0

    def take(self, message: DraftTokens) -> None:
        """Note what a message says, unless it belongs to an older reply or stream."""
        name = message.reply, message.stream
        with self._lock:
            if name > (self._reply, self._stream):
                if message.reply > self._reply:
                    self._verified = 0
                self._reply, self._stream = name
                self._tokens, self._void = {}, False
            if name < (self._reply, self._stream) or self._void:
                return
            for place, token in enumerate(message.tokens, message.start):
                if place < self._verified + MOST_AHEAD:
                    self._tokens[place] = token

    def after(self, reply: int, verified: Sequence[int], most: int, never: Collection[int], size: int) -> list[int]:
        """Up to ``most`` tokens that the draft has after the ``verified`` ones of ``reply``.

        :param never: end tokens. A drafted end needs no pass of its own: the target says it after the token before.
        :param size: of the target's vocabulary.
        """
        with self._lock:
            if reply != self._reply:
                if reply > self._reply:
                    self._tokens.clear()
                return []
            self._verified = len(verified)
            for place in [place for place in self._tokens if place < len(verified)]:
                self._void |= self._tokens.pop(place) != verified[place]
            if self._void:
                self._tokens.clear()
            found: list[int] = []
            for place in range(len(verified), len(verified) + max(0, most)):
                token = self._tokens.get(place)
                if token is None or token in never or token >= size:
                    break
                found.append(token)
            return found

    def waits(self) -> bool:
        """Whether it has tokens that are not verified yet."""
        return bool(self._tokens)
