# SPDX-License-Identifier: Apache-2.0
"""The queue in front of a link (FSD, Algorithm 2, Sender): answers first, in order, then early outcomes by policy.

Nothing overtakes what a transport has taken. So a sender takes early outcomes only while the link is free: it holds
less than ``UNSENT_BYTES`` that have not left, as far as the transport can tell.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from dsd_ros.wire.messages import EXIT_POLICIES, Message, Outcome, SessionReply, SessionRequest

UNSENT_BYTES = 2048
MAX_WAITING = 4096
MAX_EARLY = 256
_SESSIONS_REMEMBERED = 256


class Outbox:
    """One peer's queue. Any thread may put and get.

    Final outcomes and all other messages leave in the order they came, before any early outcome. A final outcome drops
    the early ones that wait for its round or an earlier one of its session, and later ones for these are not taken.
    Each session's policy orders its early ones: "priority" (highest confidence first) or "fifo". ``policy`` is that of
    sessions of which the outbox has not seen the request.
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
        self._asked: dict[int, str] = {}  # session request -> its policy
        self._policies: dict[int, str] = {}  # session -> its policy
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
        """Adopt the policy that a session request asks for; any other message changes nothing.

        The answer to the request, once it is put, says which session that is.
        """
        if isinstance(message, SessionRequest) and message.exit_policy in EXIT_POLICIES:
            with self._wake:
                self._policy = message.exit_policy
                _remember(self._asked, message.request, message.exit_policy)

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
                elif isinstance(message, SessionReply) and message.request in self._asked:
                    _remember(self._policies, message.session, self._asked[message.request])
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
            rivals = self._rivals() if self._policy_of(outcome) == "priority" else [len(self._early) - 1]
            del self._early[min(rivals, key=lambda i: _rank(self._early[i]))]

    def _finish(self, final: Outcome) -> None:
        name = final.session, (final.reply, final.round)
        newest = max(name[1], self._finished.get(final.session, (-1, -1)))
        _remember(self._finished, final.session, newest)
        self._early = [
            early for early in self._early if early.session != final.session or (early.reply, early.round) > newest
        ]

    def _pop(self, early: bool) -> Message | None:
        if self._ordinary:
            return self._ordinary.popleft()
        if not self._early or not early:
            return None
        if self._policy_of(self._early[0]) == "fifo":  # with both policies the oldest decides, so none waits for ever
            return self._early.pop(0)
        # Among equals: the deepest exit, then the oldest.
        return self._early.pop(max(self._rivals(), key=lambda i: (_rank(self._early[i]), -i)))

    def _policy_of(self, outcome: Outcome) -> str:
        return self._policies.get(outcome.session, self._policy)

    def _rivals(self) -> list[int]:
        """Where the early outcomes are that leave by confidence."""
        return [i for i, early in enumerate(self._early) if self._policy_of(early) == "priority"]


def _rank(outcome: Outcome) -> tuple[float, int]:
    return outcome.confidence, outcome.layer


def _remember(known: dict[int, Any], name: int, value: Any) -> None:
    """Note a value, and forget the one that was noted longest ago when there are too many."""
    known.pop(name, None)
    known[name] = value  # inserted last, so that the first entry is the oldest
    if len(known) > _SESSIONS_REMEMBERED:
        del known[next(iter(known))]
