"""Two sides that draft, exchange and aggregate tokens over a link, event by event: how long an answer takes.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 7.4: recorded acceptances are replayed with given decoding delays over a link whose round trip varies. The
scheduler and what it goes by are those that decode (``rag``); it sees what a side could measure, nothing more.
"""

from __future__ import annotations

import csv
import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsd_lab.papers.theory import TheoryError, check_amounts
from dsd_ros.dragon.profiler import Acceptance, DecodeDelay, LinkEstimate
from dsd_ros.dragon.scheduler import SIDES, Estimates, Scheduler, delta_z

Delay = Callable[[int], float]  # seconds of the draft at a position
Link = Callable[[float], float]  # seconds of a round trip that begins at a time
JITTER_PERIOD = 20.0 * math.pi  # seconds
JITTER = 0.2  # of the extra latency


def steady_link(base: float, extra: float = 0.0, *, jitter: float = JITTER, phase: float = 0.0) -> Link:
    """A round trip of ``base`` and an ``extra`` with a sinusoidal jitter, whose ``phase`` is in radians."""
    check_amounts(base=base, extra=extra, jitter=jitter)
    return lambda now: base + extra * (1.0 + jitter * math.sin(2.0 * math.pi * now / JITTER_PERIOD + phase))


def recorded_link(path: Path) -> Link:
    """Round trips from a CSV of lines ``seconds,rtt``; each holds until the next, and all begin anew at the end."""
    times, found = [], []
    with open(path, newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            try:
                time, rtt = map(float, row)
                check_amounts(time=time, rtt=rtt)
            except ValueError as error:
                if number == 1:  # a heading
                    continue
                raise TheoryError(f"{path}, line {number}: {row} is not seconds,rtt") from error
            if times and time <= times[-1]:
                raise TheoryError(f"{path}, line {number}: its time is not above that before")
            times.append(time)
            found.append(rtt)
    if len(times) < 2:
        raise TheoryError(f"{path} has {len(times)} round trips; give 2 or more")
    lasts = times[-1] - times[0] + (times[-1] - times[0]) / (len(times) - 1)
    return lambda now: found[max(0, bisect_right(times, times[0] + now % lasts) - 1)]


def sample_acceptances(count: int, device: float, cloud: float, seed: int, *, stretch: float = 1.0) -> np.ndarray:
    """Whether the drafts of device and cloud hold, (count, 2) bool, at the rates given.

    ``stretch``: mean length of easy and hard stretches, whose rates lie above and below; 1 is none.
    """
    generator = np.random.default_rng([7, seed])
    rates = np.broadcast_to([device, cloud], (count, 2)).astype(float)
    if stretch > 1.0:
        hard = np.cumsum(generator.random(count) < 1.0 / stretch) % 2
        spread = 0.8 * np.minimum(rates, 1.0 - rates)
        rates = rates + np.where(hard[:, None] == 0, spread, -spread)
    return generator.random((count, 2)) < rates


class Event(NamedTuple):
    """Something that happened: ``cause`` is the index of the event that it follows from, -1 at the start."""

    seconds: float
    kind: str  # "start", "drafted", "draft arrives", "aggregated", "verdict arrives"
    side: str  # where
    position: int
    cause: int
    begun: float  # when the decoding or the transfer that ends here began
    accepted: tuple[bool, bool] | None = None  # "aggregated": device's and cloud's
    switch: bool = False
    rtt: float = 0.0  # "aggregated": the link's then
    delta_z: float = 0.0  # "aggregated": equation 8 of the estimates then, device less cloud
    rates: tuple[float, float] = (0.0, 0.0)  # "aggregated": the acceptances estimated


@dataclass(frozen=True)
class Run:
    """One answer: seconds until the last token was decided, and until the device had it; the events in order."""

    seconds: float
    delivered: float
    switches: int
    events: list[Event] = field(repr=False)


@dataclass
class Learnt:
    """What answers have told of delays, link and acceptances, for those behind them, as ``rag.half.Profile``."""

    delays: tuple[DecodeDelay, DecodeDelay] = field(default_factory=lambda: (DecodeDelay(), DecodeDelay()))
    link: LinkEstimate = field(default_factory=LinkEstimate)
    shares: tuple[Acceptance, Acceptance] = field(default_factory=lambda: (Acceptance(), Acceptance()))

    def estimates(self, length: int) -> Estimates:
        """At a context of so many tokens."""
        return Estimates(
            self.delays[0].at(length),
            self.delays[1].at(length),
            self.link.round_trip(),
            self.shares[0].value,
            self.shares[1].value,
        )


class _Side:
    """What one side knows."""

    def __init__(self) -> None:
        self.position = 0  # tokens decided
        self.rejections = [0, 0]  # of device and cloud
        self.made = 0  # positions for which there is a decided token or an own draft
        self.working: int | None = None  # the number of the decoding step that is under way
        self.arrived: set[tuple[int, int]] = set()  # the other's drafts: position, its rejections


class _Simulation:
    def __init__(
        self,
        accepted: np.ndarray,
        delays: tuple[Delay, Delay],
        link: Link,
        scheduler: Scheduler,
        window: int,
        first: int,
        learnt: Learnt,
    ) -> None:
        self.accepted, self.delays, self.link = accepted, delays, link
        self.scheduler, self.window, self.aggregator = scheduler, window, first
        self.sides = (_Side(), _Side())
        self.events: list[Event] = []
        self.pending: list[tuple[float, int, Callable[[float], None]]] = []
        self.scheduled = 0
        self.last_arrival = [0.0, 0.0]
        self.learnt = learnt
        for one in learnt.delays:
            one.learn()
        self.switches = 0
        self.delivered = self.seconds = 0.0

    def run(self) -> Run:
        for side in (0, 1):
            self._note(Event(0.0, "start", SIDES[side], 0, -1, 0.0))
            self._draft(side, 0.0, side)
        while self.pending:
            now, _, happen = heapq.heappop(self.pending)
            happen(now)
        assert all(side.position == len(self.accepted) for side in self.sides)
        return Run(self.seconds, self.delivered, self.switches, self.events)

    def _note(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def _at(self, time: float, happen: Callable[[float], None]) -> int:
        self.scheduled += 1
        heapq.heappush(self.pending, (time, self.scheduled, happen))
        return self.scheduled

    def _draft(self, side: int, now: float, cause: int) -> None:
        """Begin the next draft, unless one is in work or there are enough."""
        own = self.sides[side]
        if own.working is not None or own.made >= min(len(self.accepted), own.position + self.window):
            return
        position, rejections = own.made, own.rejections[side]
        delay = self.delays[side](position)

        def drafted(then: float) -> None:
            if own.working != number:
                return  # a rejection has interrupted it
            own.working = None
            own.made += 1
            self.learnt.delays[side].observe(position + 1, delay)
            event = self._note(Event(then, "drafted", SIDES[side], position, cause, now))
            self._send(
                1 - side, then, lambda later: self._draft_arrives(1 - side, position, rejections, later, event, then)
            )
            self._draft(side, then, event)
            self._aggregate(side, then, event)

        number = own.working = self._at(now + delay, drafted)

    def _send(self, to: int, now: float, arrive: Callable[[float], None]) -> None:
        """Half a round trip later, never before what was sent earlier."""
        self.last_arrival[to] = max(self.last_arrival[to], now + self.link(now) / 2.0)
        self._at(self.last_arrival[to], arrive)

    def _draft_arrives(self, side: int, position: int, rejections: int, now: float, cause: int, sent: float) -> None:
        self.sides[side].arrived.add((position, rejections))
        event = self._note(Event(now, "draft arrives", SIDES[side], position, cause, sent))
        # Both ways are alike here; a real side measures the round trip by echoed clocks.
        self.learnt.link.observe_round_trip(2.0 * (now - sent))
        self._aggregate(side, now, event)

    def _aggregate(self, side: int, now: float, cause: int) -> None:
        """Decide as many tokens as both sides have drafted, if this side is to."""
        own, other = self.sides[side], 1 - side
        while (
            self.aggregator == side and own.made > own.position and (own.position, own.rejections[other]) in own.arrived
        ):
            position = own.position
            held = (bool(self.accepted[position, 0]), bool(self.accepted[position, 1]))
            for share, one in zip(self.learnt.shares, held, strict=True):
                share.observe(one)
            guess = self.learnt.estimates(position + 2)
            waiting = 0
            while (position + 1 + waiting, own.rejections[other]) in own.arrived:
                waiting += 1
            chosen = self.scheduler.side(guess, SIDES[side], *held, own.made - position - 1, waiting)
            switch = chosen != SIDES[side] and position + 1 < len(self.accepted)
            event = self._note(
                Event(
                    now,
                    "aggregated",
                    SIDES[side],
                    position,
                    cause,
                    now,
                    held,
                    switch,
                    self.link(now),
                    delta_z(
                        guess.device_delay,
                        guess.cloud_delay,
                        guess.round_trip,
                        guess.device_acceptance,
                        guess.cloud_acceptance,
                    ),
                    (guess.device_acceptance, guess.cloud_acceptance),
                )
            )
            if switch:
                self.aggregator = -1  # nobody, until the verdict is there
                self.switches += 1
            self.seconds = now
            self._send(
                other,
                now,
                lambda later, p=position, s=switch, e=event: self._verdict_arrives(other, p, s, later, e, now),
            )
            self._apply(side, position, now, event)

    def _verdict_arrives(self, side: int, position: int, switch: bool, now: float, cause: int, sent: float) -> None:
        event = self._note(Event(now, "verdict arrives", SIDES[side], position, cause, sent, switch=switch))
        if switch:
            self.aggregator = side
        self._apply(side, position, now, event)
        self._aggregate(side, now, event)

    def _apply(self, side: int, position: int, now: float, cause: int) -> None:
        own = self.sides[side]
        assert position == own.position
        own.position += 1
        if side == 0:
            self.delivered = now
        for one in (0, 1):
            own.rejections[one] += not self.accepted[position, one]
        if not self.accepted[position, side]:
            own.working, own.made = None, own.position
        self._draft(side, now, cause)


def simulate(
    accepted: Sequence[Sequence[bool]] | np.ndarray,
    device: float | Delay,
    cloud: float | Delay,
    link: Link,
    *,
    strategy: str = "auto",
    window: int = 32,
    first: str = "device",
    seed: int = 0,
    hysteresis: float | None = None,
    learnt: Learnt | None = None,
) -> Run:
    """One answer whose drafts are accepted as given, (tokens, 2): those of the device and of the cloud.

    ``device``, ``cloud``: seconds of a decoding step, by position or all alike. ``strategy``: a policy of
    ``rag.scheduler``. ``window``: drafts ahead of the last verdict that is known; 1 is token-wise synchronisation.
    Deciding a token takes no time, and what is sent is small: a transfer is half a round trip. ``learnt``: from the
    answers before, and by this one; with some, the side that begins is the one that it speaks for, not ``first``.
    """
    rows = np.asarray(accepted, bool)
    if rows.ndim != 2 or rows.shape[1] != 2 or not len(rows):
        raise TheoryError(f"acceptances of shape {rows.shape}; give (tokens, 2), 1 token or more")
    if window < 1:
        raise TheoryError(f"window is {window}; draft at least 1 token ahead")
    if first not in SIDES:
        raise TheoryError(f"first is {first}; give device or cloud")
    delays = []
    for name, delay in (("device", device), ("cloud", cloud)):
        if not callable(delay):
            check_amounts(**{name: delay})
        delays.append(delay if callable(delay) else lambda _, same=delay: same)
    if strategy in SIDES:
        first = strategy
    scheduler = Scheduler(strategy, seed=seed) if hysteresis is None else Scheduler(strategy, hysteresis, seed)
    if learnt is None:
        learnt = Learnt()
    elif learnt.link.latency > 0.0:  # it has seen an answer
        first = scheduler.begins(learnt.estimates(1))
    return _Simulation(rows, (delays[0], delays[1]), link, scheduler, window, SIDES.index(first), learnt).run()


def sequence_wise(count: int, device: float, cloud: float, link: Link) -> float:
    """Seconds of an answer whose ``count`` tokens both sides decode alone and compare once, at the end."""
    check_amounts(device=device, cloud=cloud)
    made = count * cloud
    return max(count * device, made + link(made) / 2.0)


def mean_seconds(runs: Iterable[Run]) -> float:
    """Mean of the seconds until the device has the whole answer."""
    return float(np.mean([run.delivered for run in runs]))
