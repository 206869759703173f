# SPDX-License-Identifier: Apache-2.0
"""Mode stream as discrete events: what a reply takes on given machines, at a given acceptance. No model, no clock."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from dsd_ros.cloud.engine import MOST_DRAFTED
from dsd_ros.edge.drafters import LEAD
from dsd_ros.edge.results import DecodedReply

_REPLIES = 200


@dataclass(frozen=True)
class StreamTimes:
    """Seconds: a token of the draft, a pass of the target, the link one way; when both begin to decode."""

    draft: float
    target: float
    delay: float
    draft_begins: float = 0.0
    target_begins: float = 0.0


def acceptance(replies: Sequence[DecodedReply]) -> float:
    """The share of drafted tokens that the target judged and accepted: it judges up to the first rejection."""
    records = [record for reply in replies for record in reply.records if record.drafted]
    accepted, rejected = sum(r.accepted for r in records), sum(r.accepted < r.drafted for r in records)
    return accepted / max(1, accepted + rejected)


def mean_seconds(tokens: int, times: StreamTimes, accepted: float) -> float:
    """Seconds of a reply of so many tokens, the mean over many; each token is drafted right with this chance."""
    return statistics.fmean(_Reply(tokens, times, accepted, seed).run() for seed in range(_REPLIES))


class _Reply:
    """One reply: the robot drafts on the right or a wrong path, the target passes, messages take their time."""

    def __init__(self, tokens: int, times: StreamTimes, accepted: float, seed: int) -> None:
        chance = random.Random(seed)
        self._right = [chance.random() < accepted for _ in range(tokens + LEAD)]
        self._tokens, self._times = tokens, times
        self._events: list[tuple[float, int, str, int]] = []
        self._number = count()
        self._verified = 0  # at the target
        self._known = self._drafted = self._stream = 0  # at the robot: verified tokens, drafted ones, corrections
        self._wrong: int | None = None  # position of the first wrong token of the robot's draft
        self._drafting = False
        # What the target has of the newest stream: from where, up to where, its first wrong token.
        self._arrived: dict[int, tuple[int, int, int | None]] = {}
        self._sent: dict[int, tuple[int, int, int, int | None]] = {}  # messages up on their way

    def run(self) -> float:
        times = self._times
        self._at(times.draft_begins, "drafter begins")
        self._at(times.target_begins, "pass")
        while True:
            now, _, what, value = heapq.heappop(self._events)
            if what == "drafter begins":
                self._draft(now)
            elif what == "pass":
                self._begin_pass(now)
            elif what == "passed":
                self._verified = min(self._tokens, self._verified + value)
                self._at(now + times.delay, "verified", self._verified)
                if self._verified < self._tokens:
                    self._begin_pass(now)
            elif what == "drafted" and value == self._stream:
                self._send_token(now)
            elif what == "draft":
                stream, *arrived = self._sent.pop(value)
                self._arrived = {stream: tuple(arrived)}  # type: ignore[dict-item]
            elif what == "verified":
                if value >= self._tokens:
                    return now
                self._follow(value)
                self._draft(now)

    def _at(self, when: float, what: str, value: int = 0) -> None:
        heapq.heappush(self._events, (when, next(self._number), what, value))

    def _draft(self, now: float) -> None:
        if not self._drafting and self._drafted < min(self._tokens, self._known + LEAD):
            self._drafting = True
            self._at(now + self._times.draft, "drafted", self._stream)

    def _send_token(self, now: float) -> None:
        self._drafting = False
        if self._wrong is None and not self._right[self._drafted]:
            self._wrong = self._drafted
        self._drafted += 1
        name = next(self._number)
        self._sent[name] = self._stream, self._begun, self._drafted, self._wrong
        self._at(now + self._times.delay, "draft", name)
        self._draft(now)

    _begun = 0  # where the present stream begins

    def _follow(self, known: int) -> None:
        self._known = known
        if (self._wrong is not None and self._wrong < known) or known > self._drafted:
            self._stream += 1
            self._begun = self._drafted = known
            self._wrong, self._drafting = None, False

    def _begin_pass(self, now: float) -> None:
        accepted = 0
        for begun, end, wrong in self._arrived.values():
            if begun <= self._verified < end and (wrong is None or wrong >= self._verified):
                most = min(end - self._verified, MOST_DRAFTED)
                accepted = most if wrong is None else min(most, wrong - self._verified)
        self._at(now + self._times.target, "passed", accepted + 1)
