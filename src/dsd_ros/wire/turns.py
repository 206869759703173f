# SPDX-License-Identifier: Apache-2.0
"""What waits for a worker: the turns of each owner in order, and one of every owner in each step.

The counterpart of ``outbox`` for messages that come in. It knows neither models nor messages, so the verifier and
DRAGON's service take their turns from the same class.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")
Lane = tuple[Hashable, Hashable]  # account, owner

_REMEMBERED = 4096  # of those that were served; idle ones are forgotten beyond this


@dataclass(eq=False)
class RobotLink:
    """One robot's connection, as the peer of an engine. This process and a DDS domain without names have no limits."""

    robot: str  # its name, where each robot has a token of its own
    max_sessions: int  # of that robot, over all its connections


def account_of(peer: Hashable) -> Hashable:
    """Whose share the turns of ``peer`` are: its robot's, if that has a name; else its own."""
    return peer.robot if isinstance(peer, RobotLink) and peer.robot else peer


@dataclass(slots=True)
class _Waiting(Generic[T]):
    turn: T
    key: Hashable
    size: int
    kind: str
    weight: int
    joins: str


class TurnQueue(Generic[T]):
    """Turns of many owners, bounded. Thread-safe.

    An owner's turns are taken in the order they came, and each step takes one of every owner. Where a step has no room
    for all, they take part by rotation: first one owner of each account, then a second one of each, and so on; those
    first that were served, or came, longest ago. So many sessions or links of a robot give no larger share, and a new
    link no earlier turn.
    """

    def __init__(self, per_owner: int, max_bytes: int = sys.maxsize) -> None:
        """``per_owner``: turns that one owner may have waiting. ``max_bytes``: of one account's turns together."""
        self._per_owner, self._max_bytes = per_owner, max_bytes
        self._lanes: dict[Lane, deque[_Waiting[T]]] = {}  # waiting turns, never empty
        self._served: dict[Lane | tuple[Hashable], int] = {}  # the last step for a lane or an account, or when it came
        self._step = 0
        self._keys: set[Hashable] = set()
        self._held: Counter[Hashable] = Counter()  # owners whose turns wait, and for how many releases
        self._bytes_of: Counter[Hashable] = Counter()  # by account
        self._changed = threading.Condition()
        self._closed = False

    def put(
        self,
        owner: Hashable,
        turn: T,
        *,
        of: Hashable = None,
        kind: str = "",
        key: Hashable = None,
        size: int = 0,
        weight: int = 1,
        joins: str = "",
        first: bool = False,
        bounded: bool = True,
    ) -> bool:
        """Add a turn of ``size`` bytes; False when there is no room for it and it is not exempt (``bounded``).

        A turn is dropped silently when one with the same ``key`` waits already, or when the queue is closed.

        :param of: the owner's account, see ``account_of``.
        :param weight: its part of the work of the turns taken with it.
        :param joins: of more turns than one, the owner's next is taken along if its ``kind`` is this.
        :param first: it goes before the owner's other turns.
        """
        path = of, owner
        with self._changed:
            if self._closed or (key is not None and key in self._keys):
                return True
            full = len(self._lanes.get(path, ())) >= self._per_owner
            full |= size > 0 and self._bytes_of[of] + size > self._max_bytes
            if full and bounded:
                return False
            for place in (path, path[:1]):
                self._served.setdefault(place, self._step)
            lane = self._lanes.setdefault(path, deque())
            (lane.appendleft if first else lane.append)(_Waiting(turn, key, size, kind, weight, joins))
            self._count(of, size)
            if key is not None:
                self._keys.add(key)
            self._changed.notify()
            return True

    def ready(
        self,
        limit: int = 1,
        timeout: float | None = None,
        max_weight: int = sys.maxsize,
        *,
        hold: bool = False,
        eager: Callable[[T], bool] = lambda _: False,
    ) -> list[T]:
        """Take the next turn of up to ``limit`` owners, and those that these join; wait for one if there is none.

        Together they weigh at most ``max_weight``; the first is taken even if it weighs more. Empty after ``timeout``
        seconds without one (None: no limit), or when the queue is closed. ``hold``: for several workers at once; the
        owners are held, and each one's ``release`` says that its turn has ended. ``eager``: of a turn that goes as if
        it had waited for a step longer than it did.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._takeable()), timeout)
            if self._closed:
                return []
            self._step += 1
            weight = 0
            turns: list[T] = []
            for owners, path in enumerate(self._rotation(self._takeable(), eager), 1):
                lane = self._lanes[path]
                joined = limit > 1 and lane[0].joins and len(lane) > 1 and lane[1].kind == lane[0].joins
                if turns and weight + lane[0].weight > max_weight:
                    break  # lighter ones behind it would keep it waiting
                weight += lane[0].weight
                turns.append(self._take(path, hold))
                if joined and weight + lane[0].weight <= max_weight:
                    weight += lane[0].weight
                    turns.append(self._take(path, hold))
                if owners == limit:
                    break
            return turns

    def hold(self, owner: Hashable) -> None:
        """Let an owner's turns wait until as many ``release``; those that come meanwhile, too."""
        with self._changed:
            self._held[owner] += 1

    def release(self, owner: Hashable) -> None:
        """Let a held owner take its turns again."""
        with self._changed:
            self._held[owner] -= 1
            if self._held[owner] <= 0:
                del self._held[owner]
            self._changed.notify()

    def discard(self, owner: Hashable) -> None:
        """Drop all turns of an owner, and release it."""
        with self._changed:
            self._held.pop(owner, None)
            for path in [path for path in self._lanes if path[1] == owner]:
                for waiting in self._lanes.pop(path):
                    self._forget(path, waiting)

    def close(self) -> None:
        """Drop all turns, hand out no more, and wake the workers."""
        with self._changed:
            self._closed = True
            for path, lane in self._lanes.items():
                for waiting in lane:
                    self._forget(path, waiting)
            self._lanes.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def taken(self) -> int:
        """How many turns of ``ready(hold=True)`` have not ended."""
        with self._changed:
            return self._held.total()

    @property
    def bytes(self) -> int:
        """How many bytes the waiting turns hold."""
        with self._changed:
            return self._bytes_of.total()

    def __contains__(self, key: Hashable) -> bool:
        """Whether a turn with this key waits."""
        with self._changed:
            return key in self._keys

    def __len__(self) -> int:
        with self._changed:
            return sum(len(lane) for lane in self._lanes.values())

    # --------------------------------------------------------------------- under self._changed

    def _takeable(self) -> list[Lane]:
        return [path for path in self._lanes if path[1] not in self._held]

    def _rotation(self, paths: list[Lane], eager: Callable[[T], bool]) -> list[Lane]:
        """These owners in the order in which they take part: by turns of the accounts, and in each of its owners."""
        accounts: dict[tuple[Hashable], list[Lane]] = {}
        for path in paths:
            accounts.setdefault(path[:1], []).append(path)

        def served(place: Lane | tuple[Hashable], lanes: list[Lane]) -> int:
            return self._served[place] - any(eager(self._lanes[path][0].turn) for path in lanes)

        for lanes in accounts.values():
            lanes.sort(key=lambda path: served(path, [path]))
        order = sorted(accounts, key=lambda account: served(account, accounts[account]))
        rows = zip_longest(*(accounts[account] for account in order))
        return [path for row in rows for path in row if path is not None]

    def _take(self, path: Lane, hold: bool) -> T:
        lane = self._lanes.pop(path)
        waiting = lane.popleft()
        if lane:
            self._lanes[path] = lane  # after the other owners
        self._served[path] = self._served[path[:1]] = self._step
        if len(self._served) > _REMEMBERED:
            kept = {place for path in self._lanes for place in (path, path[:1])}
            self._served = {place: step for place, step in self._served.items() if place in kept}
        self._forget(path, waiting)
        if hold:
            self._held[path[1]] += 1
        return waiting.turn

    def _forget(self, path: Lane, waiting: _Waiting[T]) -> None:
        self._keys.discard(waiting.key)
        self._count(path[0], -waiting.size)

    def _count(self, account: Hashable, size: int) -> None:
        self._bytes_of[account] += size
        if not self._bytes_of[account]:
            del self._bytes_of[account]
