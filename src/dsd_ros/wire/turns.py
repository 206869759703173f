"""What waits for a worker: each owner's turns in order, and the owners one after another.

The counterpart of ``outbox`` for messages that come in. It knows neither models nor messages, so the verifier and
DRAGON's service take their turns from the same class.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Waiting(NamedTuple, Generic[T]):
    turn: T
    key: Hashable
    size: int


class TurnQueue(Generic[T]):
    """Turns of many owners for one worker, bounded and fair. Thread-safe.

    An owner's turns are taken in the order they came. Owners alternate: none waits for more than one turn of each
    other owner. Urgent turns overtake all others.
    """

    def __init__(self, per_owner: int, max_bytes: int = sys.maxsize) -> None:
        """``per_owner``: turns that one owner may have waiting. ``max_bytes``: of all waiting turns together."""
        self._per_owner, self._max_bytes = per_owner, max_bytes
        # Owner -> its waiting turns, never empty. The owner whose turn is next comes first.
        self._urgent: dict[Hashable, deque[_Waiting[T]]] = {}
        self._ordinary: dict[Hashable, deque[_Waiting[T]]] = {}
        self._keys: set[Hashable] = set()
        self._held: set[Hashable] = set()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def put(
        self,
        owner: Hashable,
        turn: T,
        *,
        key: Hashable = None,
        size: int = 0,
        urgent: bool = False,
        bounded: bool = True,
    ) -> bool:
        """Add a turn of ``size`` bytes; False when there is no room for it and it is not exempt (``bounded``).

        A turn is dropped silently when one with the same ``key`` waits already, or when the queue is closed.
        """
        with self._changed:
            if self._closed or (key is not None and key in self._keys):
                return True
            lanes = self._urgent if urgent else self._ordinary
            full = len(lanes.get(owner, ())) >= self._per_owner or self._bytes + size > self._max_bytes
            if full and bounded:
                return False
            lanes.setdefault(owner, deque()).append(_Waiting(turn, key, size))
            self._bytes += size
            if key is not None:
                self._keys.add(key)
            self._changed.notify()
            return True

    def ready(self, limit: int = 1, timeout: float | None = None) -> list[T]:
        """Take the next turn of up to ``limit`` owners, and wait for one if there is none.

        Empty after ``timeout`` seconds without one (None: no limit), or when the queue is closed.
        """
        with self._changed:
            next_turns = self._next(limit)
            while not (next_turns or self._closed):
                if not self._changed.wait(timeout):
                    return []
                next_turns = self._next(limit)
            return [] if self._closed else [self._take(*place) for place in next_turns]

    def hold(self, owner: Hashable) -> None:
        """Let an owner's turns wait until ``release``; those that come meanwhile, too."""
        with self._changed:
            self._held.add(owner)

    def release(self, owner: Hashable) -> None:
        """Let a held owner take its turns again."""
        with self._changed:
            self._held.discard(owner)
            self._changed.notify()

    def discard(self, owner: Hashable) -> None:
        """Drop all turns of an owner, and release it."""
        with self._changed:
            self._held.discard(owner)
            for lanes in (self._urgent, self._ordinary):
                for waiting in lanes.pop(owner, ()):
                    self._forget(waiting)

    def close(self) -> None:
        """Hand out no more turns, and wake the worker."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def bytes(self) -> int:
        """How many bytes the waiting turns hold."""
        return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return sum(len(lane) for lanes in (self._urgent, self._ordinary) for lane in lanes.values())

    # --------------------------------------------------------------------- under self._changed

    def _next(self, limit: int) -> list[tuple[dict[Hashable, deque[_Waiting[T]]], Hashable]]:
        found = [(lanes, o) for lanes in (self._urgent, self._ordinary) for o in lanes if o not in self._held]
        return found[:limit]

    def _take(self, lanes: dict[Hashable, deque[_Waiting[T]]], owner: Hashable) -> T:
        lane = lanes.pop(owner)
        waiting = lane.popleft()
        if lane:
            lanes[owner] = lane  # after the other owners
        self._forget(waiting)
        return waiting.turn

    def _forget(self, waiting: _Waiting[T]) -> None:
        self._bytes -= waiting.size
        self._keys.discard(waiting.key)
