# SPDX-License-Identifier: Apache-2.0
"""What waits for a worker: each owner's turns in order, and the owners by the time that they have used.

The counterpart of ``outbox`` for messages that come in. It knows neither models nor messages, so the verifier and
DRAGON's service take their turns from the same class.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")
Path = tuple[Hashable, ...]

_QUANTUM_S = 0.001  # used times that differ by less count as equal
_URGENT_IN_A_ROW = 8  # then an ordinary turn comes first
_DEBT_S = 0.02  # an account that has used so much more than another lets that one go first, see ``_courtesy``
_CREDIT_S = 0.2  # what an account may be behind when it begins to wait, after a moment without turns
_GRACE_S = 0.15  # how soon the other's next turn must come for that
_LONG_S, _LONGER = 0.02, 4  # by turns longer than this, and so many times as long as the other's
_PAUSES, _SLACK_S = (
    2,
    0.002,
)  # by turns longer than so many of the other's last pauses and this, which they wait at most
_ACCOUNTS = 4096  # idle ones are forgotten beyond this
_SHARE = 4  # one link's turns hold at most 1 / this of all bytes


@dataclass(eq=False)
class RobotLink:
    """One robot's connection, as the peer of an engine. This process and a DDS domain without names have no limits."""

    address: str
    max_sessions: int
    max_sessions_of_account: int
    robot: str = ""  # its name, where each robot has a token of its own

    @property
    def account(self) -> str:
        """What limits are counted for: the robot, or the address of those without a name."""
        return self.robot or self.address


def accounts_of(peer: Hashable) -> Path:
    """What the turns of ``peer`` are charged to: its robot or address, if it has one, and itself."""
    return (peer.account, peer) if isinstance(peer, RobotLink) else (peer,)


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


@dataclass(slots=True)
class _Account:
    """Time used by an owner, or by all owners of a link or an address."""

    used: float = 0.0  # s; lifted towards its parent's floor when it begins to wait
    ended: float = -math.inf  # when its last turn ended
    pause: float = 0.0  # from the end of its last turn to the next one's coming, s; 0: not known
    late: bool = False  # others waited for its next turn in vain, and it has not come in time since
    floor: float = 0.0  # the used time of its part that had the last turn
    costs: dict[str, float] = field(default_factory=dict)  # longest recent turn, s, by kind
    waiting: int = 0
    bytes: int = 0


class TurnQueue(Generic[T]):
    """Turns of many owners for one worker, bounded and fair by time. Thread-safe.

    An owner's turns are taken in the order they came. The next turn is that of the owner that has used the least time:
    first of the address with the least, in it of the link with the least, in that of the session with the least. So
    many sessions, links or long turns give no larger share. A pause gains no credit. A robot that waits for each result
    before its next turn keeps a little. Urgent turns come first. The turns of one ``ready`` take until the next.
    What a turn needs beforehand is done by other workers (``preparing``), so that only its owner waits for it.
    Source: start-time fair queueing (Goyal, Vin, Cheng 1996), and anticipation (Iyer, Druschel 2001) in ``_courtesy``.
    """

    def __init__(
        self, per_owner: int, max_bytes: int = sys.maxsize, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """``per_owner``: turns that one owner may have waiting. ``max_bytes``: of all waiting turns together."""
        self._per_owner, self._max_bytes, self._clock = per_owner, max_bytes, clock
        # Path of an owner -> its waiting turns, never empty. Among equals the first one's turn is next.
        self._urgent: dict[Path, deque[_Waiting[T]]] = {}
        self._ordinary: dict[Path, deque[_Waiting[T]]] = {}
        self._accounts: dict[Path, _Account] = {(): _Account()}
        self._chains: dict[Path, tuple[_Account, ...]] = {}  # an owner's accounts, the root's first
        self._running: list[tuple[Path, str, int]] = []  # the turns that ``ready`` gave last: owner, kind, weight
        self._since = 0.0
        self._recent: dict[Path, float] = {}  # when an owner's last turn ended
        self._awaited: set[Path] = set()  # the accounts that waiting turns let go first, since ``_idle_since``
        self._were_awaited: set[Path] = set()  # before
        self._idle_since = 0.0
        self._urgent_in_a_row = 0
        self._keys: set[Hashable] = set()
        # Owners whose turns wait until ``release``, with their turn of ``ready(hold=True)``: path, kind, when it began.
        self._held: dict[Hashable, tuple[Path, str, float] | None] = {}
        self._bytes = 0
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
        urgent: bool = False,
        bounded: bool = True,
    ) -> bool:
        """Add a turn of ``size`` bytes; False when there is no room for it and it is not exempt (``bounded``).

        A turn is dropped silently when one with the same ``key`` waits already, or when the queue is closed.

        :param of: what the owner is a part of, the widest first: its address and its link.
        :param kind: turns of one kind take similarly long.
        :param weight: its part of the work of the turns taken with it.
        :param joins: of more turns than one, the owner's next is taken along if it is of this kind.
        :param first: it goes before the owner's other turns.
        :param raw: it has to be prepared before it can be taken, see ``preparing``.
        """
        path = (*of, owner)
        with self._changed:
            if self._closed or (key is not None and key in self._keys):
                return True
            lanes = self._urgent if urgent else self._ordinary
            link = self._accounts.get(of) if of else None
            full = (
                len(lanes.get(path, ())) >= self._per_owner
                or self._bytes + size > self._max_bytes
                or (link is not None and size > 0 and link.bytes + size > self._max_bytes // _SHARE)
            )
            if full and bounded:
                return False
            lane = lanes.setdefault(path, deque())
            (lane.appendleft if first else lane.append)(_Waiting(turn, key, size, kind, weight, joins, raw))
            self._enter(path, size)
            if key is not None:
                self._keys.add(key)
            (self._raw if lane[0].raw else self._changed).notify()
            return True

    def ready(
        self, limit: int = 1, timeout: float | None = None, max_weight: int = sys.maxsize, *, hold: bool = False
    ) -> list[T]:
        """Take the next turn of up to ``limit`` owners, and those that these join; wait for one if there is none.

        Together they weigh at most ``max_weight``; the first is taken even if it weighs more. Empty after ``timeout``
        seconds without one (None: no limit), or when the queue is closed. ``hold``: for several workers at once; the
        owners are held, and each one's ``release`` says that its turn has ended.
        """
        with self._changed:
            self._charge()
            until = None if timeout is None else self._clock() + timeout
            while not self._closed:
                self._charge_idle_time()
                wait, places = self._next(limit, max_weight, courteous=not hold)
                if places:
                    turns = [self._take(*place, hold) for place in places]
                    self._awaited.clear()
                    self._since = self._clock()
                    return turns
                if until is not None:
                    wait = min(wait, until - self._clock())
                    if wait <= 0:
                        return []
                self._changed.wait(None if math.isinf(wait) else wait)
            return []

    @contextmanager
    def preparing(self, timeout: float | None = None) -> Iterator[T | None]:
        """The next turn to prepare, which may be taken once the block has ended.

        It is its owner's first, one of a link at a time, and is charged the time that it takes. None after ``timeout``
        seconds without one, or when the queue is closed.
        """
        with self._changed:
            self._raw.wait_for(lambda: self._closed or bool(self._next_raw()), timeout)
            path = self._next_raw()
            waiting = self._ordinary[path][0] if path else None
            if waiting is not None:
                self._preparing.add(_link(path))
            began = self._clock()
        try:
            yield None if waiting is None else waiting.turn
        finally:
            with self._changed:
                if waiting is not None:
                    self._end_preparing(path, waiting, self._clock() - began)

    def weigh(self, place: int, weight: int) -> None:
        """Correct the weight of turn ``place`` of those that ``ready`` gave last, once it is known."""
        path, kind, _ = self._running[place]
        self._running[place] = path, kind, weight

    def waits(self, owner: Hashable, of: Path = ()) -> bool:
        """Whether turns of this owner wait."""
        with self._changed:
            account = self._accounts.get((*of, owner))
            return account is not None and account.waiting > 0

    def hold(self, owner: Hashable) -> None:
        """Let an owner's turns wait until ``release``; those that come meanwhile, too."""
        with self._changed:
            self._held[owner] = None

    def release(self, owner: Hashable) -> None:
        """Let a held owner take its turns again; a turn of ``ready(hold=True)`` is charged the time that it took."""
        with self._changed:
            together = sum(turn is not None for turn in self._held.values())
            if (turn := self._held.pop(owner, None)) is not None:
                path, kind, began = turn
                self._charge_turn(path, kind, (self._clock() - began) / together)
            self._changed.notify()

    def discard(self, owner: Hashable) -> None:
        """Drop all turns of an owner, and release it."""
        with self._changed:
            self._held.pop(owner, None)
            for lanes in (self._urgent, self._ordinary):
                for path in [path for path in lanes if path[-1] == owner]:
                    for waiting in lanes.pop(path):
                        self._forget(path, waiting)

    def close(self) -> None:
        """Drop all turns, hand out no more, and wake the workers."""
        with self._changed:
            self._closed = True
            for lanes in (self._urgent, self._ordinary):
                for path, lane in lanes.items():
                    for waiting in lane:
                        self._forget(path, waiting)
                lanes.clear()
            self._changed.notify_all()
            self._raw.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def taken(self) -> int:
        """How many turns of ``ready(hold=True)`` have not ended."""
        with self._changed:
            return sum(turn is not None for turn in self._held.values())

    @property
    def bytes(self) -> int:
        """How many bytes the waiting turns hold."""
        return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return sum(len(lane) for lanes in (self._urgent, self._ordinary) for lane in lanes.values())

    # --------------------------------------------------------------------- under self._changed

    def _next(
        self, limit: int, max_weight: int, courteous: bool
    ) -> tuple[float, list[tuple[dict[Path, deque[_Waiting[T]]], Path]]]:
        """The next turns; if there are none, how long the first of those that wait does so out of courtesy, s."""
        ordinary_first = self._urgent_in_a_row >= _URGENT_IN_A_ROW
        order = (self._ordinary, self._urgent) if ordinary_first else (self._urgent, self._ordinary)
        shortest, longest, weight, owners = math.inf, 0.0, 0, 0
        found: list[tuple[dict[Path, deque[_Waiting[T]]], Path]] = []
        self._were_awaited, self._awaited = self._awaited, set()
        for lanes in order:
            free = [path for path, lane in lanes.items() if path[-1] not in self._held and not lane[0].raw]
            for path in sorted(free, key=self._used) if len(free) > 1 else free:
                lane = lanes[path]
                cost = self._chains[path][1].costs.get(lane[0].kind, 0.0)  # the widest account has the longest costs
                # A turn hardly longer than one that is taken anyway shares the worker with it.
                if courteous and cost > 2 * longest and (wait := self._courtesy(path, lane[0].kind, cost)) > 0.0:
                    shortest = min(shortest, wait)
                    continue
                joined = limit > 1 and lane[0].joins and len(lane) > 1 and lane[1].kind == lane[0].joins
                if found and weight + lane[0].weight > max_weight:
                    continue
                for turn in (lane[0], lane[1]) if joined else (lane[0],):
                    if turn is lane[0] or weight + turn.weight <= max_weight:
                        weight += turn.weight
                        found.append((lanes, path))
                owners, longest = owners + 1, max(longest, cost)
                if owners == limit:
                    return 0.0, found
        return shortest, found

    def _used(self, path: Path) -> list[int]:
        """What decides the order: the used time of the address, the link and the session."""
        return [int(account.used / _QUANTUM_S) for account in self._chains[path][1:]]

    def _enter(self, path: Path, size: int) -> None:
        self._bytes += size
        chain = self._chains.get(path)
        if chain is None:
            if len(self._accounts) > _ACCOUNTS:
                self._prune()
            places = (path[:end] for end in range(len(path) + 1))
            chain = self._chains[path] = tuple(self._accounts.setdefault(place, _Account()) for place in places)
        parent, now = chain[0], self._clock()
        running = any(path == other for other, *_ in self._running)
        for account in chain[1:]:
            if not account.waiting:
                pause = now - account.ended
                credit = 0.0 if pause >= _GRACE_S else _CREDIT_S
                account.pause = 0.0 if running or math.isinf(pause) else pause
                if account.pause < _GRACE_S:
                    account.late = False
                account.used = max(account.used, parent.floor - credit)
            account.waiting += 1
            account.bytes += size
            parent = account

    def _take(self, lanes: dict[Path, deque[_Waiting[T]]], path: Path, hold: bool) -> T:
        lane = lanes.pop(path)
        waiting = lane.popleft()
        if lane:
            lanes[path] = lane  # after the other owners
            if lane[0].raw:
                self._raw.notify()
        self._urgent_in_a_row = self._urgent_in_a_row + 1 if lanes is self._urgent else 0
        chain = self._chains[path]
        for parent, account in pairwise(chain):
            parent.floor = max(parent.floor, account.used)
        self._forget(path, waiting)
        if hold:
            self._held[path[-1]] = (path, waiting.kind, self._clock())
        else:
            self._running.append((path, waiting.kind, waiting.weight))
        return waiting.turn

    def _next_raw(self) -> Path:
        """The owner whose turn is to be prepared next; empty: none."""
        free = [path for path, lane in self._ordinary.items() if lane[0].raw and _link(path) not in self._preparing]
        return min(free, key=self._used, default=())

    def _end_preparing(self, path: Path, waiting: _Waiting[T], seconds: float) -> None:
        self._preparing.discard(_link(path))
        for account in self._chains.get(path, ())[1:]:
            account.used += seconds
        waiting.raw = False
        self._changed.notify()
        self._raw.notify()

    def _forget(self, path: Path, waiting: _Waiting[T]) -> None:
        self._bytes -= waiting.size
        self._keys.discard(waiting.key)
        for account in self._chains[path][1:]:
            account.waiting -= 1
            account.bytes -= waiting.size

    def _charge(self) -> None:
        """Charge the time since the last turns were given to their owners, by their weights."""
        if not self._running:
            return
        unit = (self._clock() - self._since) / sum(weight for _, _, weight in self._running)
        for path, kind, weight in self._running:
            self._charge_turn(path, kind, unit * weight)
        self._running.clear()

    def _charge_turn(self, path: Path, kind: str, seconds: float) -> None:
        now = self._clock()
        if seconds >= _QUANTUM_S:  # a duplicate announces no next turn
            self._recent[path] = now
        for account in self._chains[path][1:]:
            account.used += seconds
            account.ended = now
            account.costs[kind] = max(seconds, 0.9 * account.costs.get(kind, 0.0))

    def _courtesy(self, path: Path, kind: str, longest: float) -> float:
        """How long a turn waits although the worker is free, s.

        A turn cannot be interrupted. So one that is known to be long lets those go first that are behind in time used
        and paused briefly before their last turn: their next turn is on its way. Otherwise each of their turns would
        wait for a long one. They are charged the time that it waits, see ``_charge_idle_time``.
        """
        if longest <= _SLACK_S:
            return 0.0
        now, wait = self._clock(), 0.0
        for other, ended in list(self._recent.items()):
            if other == path:
                continue
            end = next(end for end, names in enumerate(zip_longest(path, other), 1) if names[0] != names[1])
            mine, theirs = self._accounts.get(path[:end]), self._accounts.get(other[:end])
            if mine is not None and theirs is not None and mine is not theirs:
                cost, patience = mine.costs.get(kind, 0.0), _PAUSES * theirs.pause + _SLACK_S
                if cost > max(_LONG_S, _LONGER * min(theirs.costs.values(), default=0.0)):
                    patience = _GRACE_S
                elif not theirs.pause or cost < patience:
                    patience = 0.0
                if ended + patience <= now:
                    theirs.late |= other[:end] in self._were_awaited
                elif not theirs.late and mine.used - theirs.used >= _DEBT_S:
                    wait = max(wait, ended + patience - now)
                    self._awaited.add(other[:end])
            if now - ended >= _GRACE_S:
                del self._recent[other]
        return wait

    def _charge_idle_time(self) -> None:
        """Charge the time that the worker idled to those that turns waited for out of courtesy.

        Otherwise one that keeps sending turns of no length would never catch up, and the others would wait for ever.
        """
        now = self._clock()
        for place in self._awaited:
            if (account := self._accounts.get(place)) is not None:
                account.used += now - self._idle_since
        self._idle_since = now

    def _prune(self) -> None:
        """Forget accounts that are idle and owe nothing, or are simply the oldest idle ones."""
        active = {path for path, *_ in self._running} | {turn[0] for turn in self._held.values() if turn is not None}
        active |= self._recent.keys()
        keep = {path[:end] for path in active for end in range(len(path) + 1)} | {()}
        for path in [path for path, account in self._accounts.items() if not account.waiting and path not in keep]:
            del self._accounts[path]
        self._chains = {path: chain for path, chain in self._chains.items() if path in self._accounts}
