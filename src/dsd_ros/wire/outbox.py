# SPDX-License-Identifier: Apache-2.0
"""The queue in front of a link (FSD, Algorithm 2, Sender): answers first, in order, then early outcomes by confidence.

Nothing overtakes what a transport has taken. So a sender takes early outcomes only while the link is free: it holds
less than ``UNSENT_BYTES`` that have not left, as far as the transport can tell.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import deque
from collections.abc import Callable

from dsd_ros.wire.messages import Message, Outcome

UNSENT_BYTES = 2048
UNSENT_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)
MAX_WAITING = 4096
MAX_EARLY = 256
_SESSIONS_REMEMBERED = 256


class Outbox:
    """One peer's queue. Any thread may put and get.

    Final outcomes and all other messages leave in the order they came, before any early outcome. A final outcome drops
    the early ones that wait for its round or an earlier one of its session, and later ones for these are not taken.
    """

    def __init__(
        self, limit: int = MAX_WAITING, early_limit: int = MAX_EARLY, on_ready: Callable[[], object] | None = None
    ) -> None:
        """At most ``limit`` messages wait, and ``early_limit`` early outcomes besides.

        ``on_ready`` is called after each put, in the putting thread, to wake a reader that cannot wait in ``get``.
        """
        self._limit = limit
        self._early_limit = early_limit
        self._on_ready = on_ready
        self._ordinary: deque[Message] = deque()
        self._early: list[Outcome] = []  # in the order they came
        self._finished: dict[int, tuple[int, int]] = {}  # session -> newest finished reply, round
        self._wake = threading.Condition()
        self._closed = False

    def put(self, message: Message) -> bool:
        """Queue a message; False when the outbox is closed or full.

        Early outcomes never fill it: the one that would leave last is dropped instead.
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

    def _order(self, place: int) -> tuple[float, ...]:
        """What decides when the early outcome at ``place`` leaves, the largest first: by confidence, then by depth."""
        outcome = self._early[place]
        return outcome.confidence, outcome.layer, -place

    def _put_early(self, outcome: Outcome) -> None:
        if (outcome.reply, outcome.round) <= self._finished.get(outcome.session, (-1, -1)):
            return
        self._early.append(outcome)
        if len(self._early) > self._early_limit:
            del self._early[min(range(len(self._early)), key=self._order)]

    def _finish(self, final: Outcome) -> None:
        newest = max((final.reply, final.round), self._finished.pop(final.session, (-1, -1)))
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
        return self._early.pop(max(range(len(self._early)), key=self._order))
