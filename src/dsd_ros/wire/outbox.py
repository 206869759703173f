# SPDX-License-Identifier: Apache-2.0
"""The queue in front of a link (FSD, Algorithm 2, Sender): answers first, in order, then early outcomes by policy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dsd_ros.wire.messages import EXIT_POLICIES, Message, Outcome, SessionRequest

MAX_WAITING = 4096
MAX_EARLY = 256
_SESSIONS_REMEMBERED = 256


class Outbox:
    """One peer's queue. Any thread may put and get.

    Final outcomes and all other messages leave in the order they came, before any early outcome. A final outcome drops
    the early ones that wait for its round or an earlier one of its session, and later ones for these are not taken.
    ``policy`` orders the early ones: "priority" (highest confidence first) or "fifo".
    """

    def __init__(
        self,
        policy: str = "priority",
        limit: int = MAX_WAITING,
        early_limit: int = MAX_EARLY,
        on_ready: Callable[[], object] | None = None,
    ) -> None:
        """At most ``limit`` messages wait, and ``early_limit`` early outcomes besides.

        ``on_ready`` is called after each put, in the putting thread, to wake a reader that cannot wait in ``get``.
        ValueError for an unknown policy.
        """
        self._limit = limit
        self._early_limit = early_limit
        self._on_ready = on_ready
        self._ordinary: deque[Message] = deque()
        self._early: list[Outcome] = []  # in the order they came
        self._finished: dict[int, tuple[int, int]] = {}  # session -> newest finished reply, round
        self._wake = threading.Condition()
        self._closed = False
        self.policy = policy

    @property
    def policy(self) -> str:
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        if policy not in EXIT_POLICIES:
            raise ValueError(f"unknown exit policy {policy!r}; use one of {', '.join(EXIT_POLICIES)}")
        self._policy = policy

    def adopt_policy(self, message: Message) -> None:
        """Adopt the policy that a session request asks for; any other message changes nothing."""
        if isinstance(message, SessionRequest) and message.exit_policy in EXIT_POLICIES:
            self._policy = message.exit_policy

    def put(self, message: Message) -> bool:
        """Queue a message; False when the outbox is closed or full.

        Early outcomes never fill it: the least confident, or with "fifo" the newest, is dropped instead.
        """
        with self._wake:
            if self._closed:
                return False
            if isinstance(message, Outcome) and not message.is_final:
                self._put_early(message)
            else:
                if len(self._ordinary) >= self._limit:
                    return False
                if isinstance(message, Outcome):
                    self._finish(message)
                self._ordinary.append(message)
            self._wake.notify()
        if self._on_ready is not None:
            self._on_ready()
        return True

    def get(self, timeout: float | None = None) -> Message | None:
        """The next message; None after ``timeout`` seconds without one (None: no limit), or when closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._ordinary or self._early or self._closed, timeout)
            return self._pop(True)

    def get_nowait(self, early: bool = True) -> Message | None:
        """The next message, if one waits; without ``early`` no early outcome."""
        with self._wake:
            return self._pop(early)

    def close(self) -> None:
        """Drop everything, take nothing more and wake all waiting readers; any number of times."""
        with self._wake:
            self._closed = True
            self._ordinary.clear()
            self._early.clear()
            self._wake.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._early)

    # ------------------------------------------------------------------------- under self._wake

    def _put_early(self, outcome: Outcome) -> None:
        if (outcome.reply, outcome.round) <= self._finished.get(outcome.session, (-1, -1)):
            return
        self._early.append(outcome)
        if len(self._early) > self._early_limit:
            by_confidence = self._policy == "priority"
            self._early.remove(min(self._early, key=_rank) if by_confidence else self._early[-1])

    def _finish(self, final: Outcome) -> None:
        name = final.session, (final.reply, final.round)
        newest = max(name[1], self._finished.pop(final.session, (-1, -1)))
        self._finished[final.session] = newest  # inserted last, so that the first entry is the oldest
        if len(self._finished) > _SESSIONS_REMEMBERED:
            del self._finished[next(iter(self._finished))]
        self._early = [
            early for early in self._early if early.session != final.session or (early.reply, early.round) > newest
        ]

    def _pop(self, early: bool) -> Message | None:
        if self._ordinary:
            return self._ordinary.popleft()
        if not self._early or not early:
            return None
        if self._policy == "fifo":
            return self._early.pop(0)
        # Among equals: the deepest exit, then the oldest.
        best = max(range(len(self._early)), key=lambda i: (_rank(self._early[i]), -i))
        return self._early.pop(best)


def _rank(outcome: Outcome) -> tuple[float, int]:
    return outcome.confidence, outcome.layer
