# SPDX-License-Identifier: Apache-2.0
"""What waits for a worker: the turns of each owner in order, and one of every owner in each step.

The counterpart of ``outbox`` for messages that come in. It knows neither models nor messages, so the verifier and
DRAGON's service take their turns from the same class.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")
Path = tuple[Hashable, ...]

_REMEMBERED = 4096  # of those that were served; idle ones are forgotten beyond this


@dataclass(eq=False)
class RobotLink:
    """One robot's connection, as the peer of an engine. This process and a DDS domain without names have no limits."""

    robot: str  # its name, where each robot has a token of its own
    max_sessions: int  # of that robot, over all its connections


def accounts_of(peer: Hashable) -> Path:
    """What the turns of ``peer`` are counted for: its robot, if that has a name, and itself."""
    return (peer.robot, peer) if isinstance(peer, RobotLink) and peer.robot else (peer,)


def _link(path: Path) -> Path:
    return path[:-1] or path


@dataclass(slots=True)
class _Waiting(Generic[T]):
    turn: T
    key: Hashable
    size: int
    kind: str
    weight: int
    joins: str
    raw: bool


class TurnQueue(Generic[T]):
    """Turns of many owners, bounded. Thread-safe.

    An owner's turns are taken in the order they came, and each step takes one of every owner. Where a step has no room
    for all, they take part by rotation: first one owner of each robot, then a second one of each, and so on; those
    first that were served longest ago. So many sessions or links give no larger share.
    What a turn needs beforehand is done by other workers (``preparing``), so that only its owner waits for it.
    """

    def __init__(self, per_owner: int, max_bytes: int = sys.maxsize) -> None:
        """``per_owner``: turns that one owner may have waiting. ``max_bytes``: of one link's waiting turns together."""
        self._per_owner, self._max_bytes = per_owner, max_bytes
        self._lanes: dict[Path, deque[_Waiting[T]]] = {}  # path of an owner -> its waiting turns, never empty
        self._served: dict[Path, int] = {}  # the last step that took a turn of a robot, a link or an owner
        self._step = 0
        self._keys: set[Hashable] = set()
        self._held: dict[Hashable, bool] = {}  # owners whose turns wait; whether a worker has one of them
        self._bytes_of: Counter[Path] = Counter()  # by link
        self._preparing: set[Path] = set()  # links whose turns are being prepared
        lock = threading.RLock()
        self._changed, self._raw = threading.Condition(lock), threading.Condition(lock)
        self._closed = False

    def put(
        self,
        owner: Hashable,
        turn: T,
        *,
        of: Path = (),
        kind: str = "",
        key: Hashable = None,
        size: int = 0,
        weight: int = 1,
        joins: str = "",
        first: bool = False,
        raw: bool = False,
        bounded: bool = True,
    ) -> bool:
        """Add a turn of ``size`` bytes; False when there is no room for it and it is not exempt (``bounded``).

        A turn is dropped silently when one with the same ``key`` waits already, or when the queue is closed.

        :param of: what the owner is a part of, the widest first: its robot and its link.
        :param weight: its part of the work of the turns taken with it.
        :param joins: of more turns than one, the owner's next is taken along if its ``kind`` is this.
        :param first: it goes before the owner's other turns.
        :param raw: it has to be prepared before it can be taken, see ``preparing``.
        """
        path = (*of, owner)
        with self._changed:
            if self._closed or (key is not None and key in self._keys):
                return True
            full = len(self._lanes.get(path, ())) >= self._per_owner
            full |= size > 0 and self._bytes_of[of] + size > self._max_bytes
            if full and bounded:
                return False
            lane = self._lanes.setdefault(path, deque())
            (lane.appendleft if first else lane.append)(_Waiting(turn, key, size, kind, weight, joins, raw))
            self._count(path, size)
            if key is not None:
                self._keys.add(key)
            (self._raw if lane[0].raw else self._changed).notify()
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

    @contextmanager
    def preparing(self, timeout: float | None = None) -> Iterator[T | None]:
        """The next turn to prepare, which may be taken once the block has ended.

        It is its owner's first, and one of a link at a time. None after ``timeout`` seconds without one, or when the
        queue is closed.
        """
        with self._changed:
            self._raw.wait_for(lambda: self._closed or bool(self._next_raw()), timeout)
            path = self._next_raw()
            waiting = self._lanes[path][0] if path else None
            if waiting is not None:
                self._preparing.add(_link(path))
        try:
            yield None if waiting is None else waiting.turn
        finally:
            with self._changed:
                if waiting is not None:
                    self._preparing.discard(_link(path))
                    waiting.raw = False
                    self._changed.notify()
                    self._raw.notify()

    def hold(self, owner: Hashable) -> None:
        """Let an owner's turns wait until ``release``; those that come meanwhile, too."""
        with self._changed:
            self._held[owner] = False

    def release(self, owner: Hashable) -> None:
        """Let a held owner take its turns again."""
        with self._changed:
            self._held.pop(owner, None)
            self._changed.notify()

    def discard(self, owner: Hashable) -> None:
        """Drop all turns of an owner, and release it."""
        with self._changed:
            self._held.pop(owner, None)
            for path in [path for path in self._lanes if path[-1] == owner]:
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
            self._raw.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def taken(self) -> int:
        """How many turns of ``ready(hold=True)`` have not ended."""
        with self._changed:
            return sum(self._held.values())

    @property
    def bytes(self) -> int:
        """How many bytes the waiting turns hold."""
        with self._changed:
            return self._bytes_of.total()

    def __len__(self) -> int:
        with self._changed:
            return sum(len(lane) for lane in self._lanes.values())

    # --------------------------------------------------------------------- under self._changed

    def _takeable(self) -> list[Path]:
        return [path for path, lane in self._lanes.items() if path[-1] not in self._held and not lane[0].raw]

    def _rotation(self, paths: list[Path], eager: Callable[[T], bool] = lambda _: False, depth: int = 0) -> list[Path]:
        """These owners in the order in which they take part: by turns of the robots, of their links, of sessions."""
        if len(paths) < 2:
            return paths
        groups: dict[Path, list[Path]] = {}
        for path in paths:
            groups.setdefault(path[: depth + 1], []).append(path)

        def served(place: Path) -> int:
            return self._served.get(place, 0) - any(eager(self._lanes[path][0].turn) for path in groups[place])

        parts = [self._rotation(groups[place], eager, depth + 1) for place in sorted(groups, key=served)]
        return [path for row in zip_longest(*parts) for path in row if path is not None]

    def _take(self, path: Path, hold: bool) -> T:
        lane = self._lanes.pop(path)
        waiting = lane.popleft()
        if lane:
            self._lanes[path] = lane  # after the other owners
            if lane[0].raw:
                self._raw.notify()
        for end in range(1, len(path) + 1):
            self._served[path[:end]] = self._step
        if len(self._served) > _REMEMBERED:
            kept = {path[:end] for path in self._lanes for end in range(1, len(path) + 1)}
            self._served = {place: step for place, step in self._served.items() if place in kept}
        self._forget(path, waiting)
        if hold:
            self._held[path[-1]] = True
        return waiting.turn

    def _next_raw(self) -> Path:
        """The owner whose turn is to be prepared next; empty: none."""
        free = [path for path, lane in self._lanes.items() if lane[0].raw and _link(path) not in self._preparing]
        return next(iter(self._rotation(free)), ())

    def _forget(self, path: Path, waiting: _Waiting[T]) -> None:
        self._keys.discard(waiting.key)
        self._count(path, -waiting.size)

    def _count(self, path: Path, size: int) -> None:
        self._bytes_of[path[:-1]] += size
        if not self._bytes_of[path[:-1]]:
            del self._bytes_of[path[:-1]]
