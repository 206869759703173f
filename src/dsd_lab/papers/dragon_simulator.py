# SPDX-License-Identifier: Apache-2.0
"""Two sides that draft, exchange and aggregate tokens over a link, event by event: how long an answer takes.

After DRAGON, section 7.4: acceptances are replayed with given decoding delays over a link whose round trip varies. The
scheduler and its estimates are those of ``dsd_ros.dragon``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dsd_lab.papers.dragon_schedules import SCHEDULES, Schedule, latency
from dsd_lab.papers.theory import TheoryError, check_amounts, check_positive, check_shares
from dsd_ros.dragon.profiler import Profile
from dsd_ros.dragon.settings import SIDES

Link = Callable[[float], float]  # seconds of a round trip that begins at a time
JITTER_PERIOD = 20.0 * math.pi  # seconds
JITTER = 0.2  # of the extra latency


def steady_link(base: float, extra: float = 0.0, *, phase: float = 0.0) -> Link:
    """A round trip of ``base`` and an ``extra`` with a sinusoidal jitter, whose ``phase`` is in radians."""
    check_amounts(base=base, extra=extra)
    return lambda now: base + extra * (1.0 + JITTER * math.sin(2.0 * math.pi * now / JITTER_PERIOD + phase))


def sample_acceptances(count: int, device: float, cloud: float, seed: int) -> np.ndarray:
    """Whether the drafts of device and cloud are accepted, (count, 2) bool, at the rates given."""
    return np.random.default_rng([7, seed]).random((count, 2)) < [device, cloud]


@dataclass(frozen=True)
class SimulatedAnswer:
    """Seconds until the last token was decided, and until the device had it.

    ``decided``: when and on which side each token was decided, in order.
    """

    seconds: float
    delivered: float
    switches: int
    decided: list[tuple[float, str]] = field(repr=False)


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
        delays: tuple[float, float],
        link: Link,
        schedule: Schedule,
        window: int,
        first: int,
        learned: Profile,
    ) -> None:
        self.accepted, self.delays, self.link = accepted, delays, link
        self.schedule, self.window, self.aggregator, self.learned = schedule, window, first, learned
        self.sides = (_Side(), _Side())
        self.decided: list[tuple[float, str]] = []
        self.pending: list[tuple[float, int, Callable[[float], None]]] = []
        self.scheduled = self.switches = 0
        self.last_arrival = [0.0, 0.0]
        self.delivered = self.seconds = 0.0

    def run(self) -> SimulatedAnswer:
        for side in (0, 1):
            self._draft(side, 0.0)
        while self.pending:
            now, _, happen = heapq.heappop(self.pending)
            happen(now)
        assert all(side.position == len(self.accepted) for side in self.sides)
        return SimulatedAnswer(self.seconds, self.delivered, self.switches, self.decided)

    def _at(self, time: float, happen: Callable[[float], None]) -> int:
        self.scheduled += 1
        heapq.heappush(self.pending, (time, self.scheduled, happen))
        return self.scheduled

    def _draft(self, side: int, now: float) -> None:
        """Begin the next draft, unless one is under way or there are enough."""
        own = self.sides[side]
        if own.working is not None or own.made >= min(len(self.accepted), own.position + self.window):
            return
        position, rejections, delay = own.made, own.rejections[side], self.delays[side]

        def drafted(then: float) -> None:
            if own.working != number:
                return  # a rejection has interrupted it
            own.working = None
            own.made += 1
            self.learned.delays[SIDES[side]].observe(delay)
            self._send(1 - side, then, lambda later: self._draft_arrives(1 - side, position, rejections, later, then))
            self._draft(side, then)
            self._aggregate(side, then)

        number = own.working = self._at(now + delay, drafted)

    def _send(self, to: int, now: float, arrive: Callable[[float], None]) -> None:
        """Deliver half a round trip later, never before what was sent earlier."""
        self.last_arrival[to] = max(self.last_arrival[to], now + self.link(now) / 2.0)
        self._at(self.last_arrival[to], arrive)

    def _draft_arrives(self, side: int, position: int, rejections: int, now: float, sent: float) -> None:
        self.sides[side].arrived.add((position, rejections))
        # Both ways are alike here; a real side measures the round trip by echoed clocks.
        self.learned.link.observe(2.0 * (now - sent))
        self._aggregate(side, now)

    def _aggregate(self, side: int, now: float) -> None:
        """Decide as many tokens as both sides have drafted, if this side aggregates."""
        own, other = self.sides[side], 1 - side
        while (
            self.aggregator == side and own.made > own.position and (own.position, own.rejections[other]) in own.arrived
        ):
            position = own.position
            held = (bool(self.accepted[position, 0]), bool(self.accepted[position, 1]))
            for name, one in zip(SIDES, held, strict=True):
                self.learned.acceptance[name].observe(one)
            guess = self.learned.estimates()
            waiting = 0
            while (position + 1 + waiting, own.rejections[other]) in own.arrived:
                waiting += 1
            switch = self.schedule.switches(guess, SIDES[side], *held, own.made - position - 1, waiting)
            switch = switch and position + 1 < len(self.accepted)
            self.decided.append((now, SIDES[side]))
            if switch:
                self.aggregator = -1  # neither side, until the verdict arrives
                self.switches += 1
            self.seconds = now
            self._send(other, now, lambda later, p=position, s=switch: self._verdict_arrives(other, p, s, later))
            self._apply(side, position, now)

    def _verdict_arrives(self, side: int, position: int, switch: bool, now: float) -> None:
        if switch:
            self.aggregator = side
        self._apply(side, position, now)
        self._aggregate(side, now)

    def _apply(self, side: int, position: int, now: float) -> None:
        own = self.sides[side]
        assert position == own.position
        own.position += 1
        if side == 0:
            self.delivered = now
        for one in (0, 1):
            own.rejections[one] += not self.accepted[position, one]
        if not self.accepted[position, side]:
            own.working, own.made = None, own.position
        self._draft(side, now)


def simulate(
    accepted: Sequence[Sequence[bool]] | np.ndarray,
    device: float,
    cloud: float,
    link: Link,
    *,
    strategy: str = "auto",
    window: int = 32,
    seed: int = 0,
    learned: Profile | None = None,
) -> SimulatedAnswer:
    """One answer whose drafts are accepted as given, (tokens, 2): those of the device and of the cloud; ValueErrors.

    ``device``, ``cloud``: seconds of a decoding step. ``strategy``: of ``dragon_schedules``. ``window``: drafts ahead
    of the last known verdict; 1 is token-wise synchronisation. A transfer takes half a round trip. ``learned`` is from
    the answers before.
    """
    rows = np.asarray(accepted, bool)
    if rows.ndim != 2 or rows.shape[1] != 2 or not len(rows):
        raise TheoryError(f"acceptances of shape {rows.shape}; give (tokens, 2), 1 token or more")
    if window < 1:
        raise TheoryError(f"window is {window}; draft at least 1 token ahead")
    check_amounts(device=device, cloud=cloud)
    schedule = Schedule(strategy, seed)
    first = strategy if strategy in SIDES else "device"
    return _Simulation(rows, (device, cloud), link, schedule, window, SIDES.index(first), learned or Profile()).run()


def sequence_wise(count: int, device: float, cloud: float, link: Link) -> float:
    """Seconds of an answer whose ``count`` tokens both sides decode alone and compare once, at the end."""
    check_amounts(device=device, cloud=cloud)
    made = count * cloud
    return max(count * device, made + link(made) / 2.0)


STRATEGIES = SCHEDULES
TOKEN_WISE, SEQUENCE_WISE = "token-wise", "sequence-wise"


def speedup(c_device: float, c_cloud: float, rtt: float, a_cloud: float) -> float:
    """Over token-wise synchronisation, the device aggregating: equation 9, as the ratio of two latencies."""
    check_amounts(c_device=c_device, c_cloud=c_cloud, rtt=rtt)
    check_shares(a_cloud=a_cloud)
    check_positive(latency=max(c_device, c_cloud))
    return latency(c_device, c_cloud, rtt, 0.0) / latency(c_device, c_cloud, rtt, a_cloud)


@dataclass(frozen=True)
class Setting:
    """Seconds of a decoding step on either side and of the bare round trip, and how often drafts are accepted."""

    device: float
    cloud: float
    base: float
    acceptances: tuple[float, float]
    tokens: int = 100


@dataclass(frozen=True)
class Comparison:
    """Mean seconds of an answer by strategy, until the device has its last token, at one extra latency."""

    extra: float
    seconds: dict[str, float]

    def over_best_side(self, strategy: str = "auto") -> float:
        """The strategy's seconds over those of the better fixed side."""
        return self.seconds[strategy] / min(self.seconds["device"], self.seconds["cloud"])


def compare(setting: Setting, extras: Sequence[float], sequences: int = 50, *, seed: int = 0) -> list[Comparison]:
    """Every strategy over the same ``sequences`` sampled answers, at each extra latency.

    Each answer begins in another phase of the link's jitter. What an answer teaches is known to the next.
    """
    check_shares(device=setting.acceptances[0], cloud=setting.acceptances[1])
    check_positive(tokens=setting.tokens, sequences=sequences)
    delays = setting.device, setting.cloud
    answers = [sample_acceptances(setting.tokens, *setting.acceptances, n) for n in range(seed, seed + sequences)]
    found = []
    for extra in extras:
        totals: dict[str, list[float]] = {name: [] for name in (*STRATEGIES, TOKEN_WISE, SEQUENCE_WISE)}
        learned = {strategy: Profile() for strategy in STRATEGIES}
        for number, rows in enumerate(answers):
            link = steady_link(setting.base, extra, phase=float(number))
            for strategy in STRATEGIES:
                run = simulate(rows, *delays, link, strategy=strategy, seed=number, learned=learned[strategy])
                totals[strategy].append(run.delivered)
            totals[TOKEN_WISE].append(simulate(rows, *delays, link, strategy="device", window=1).delivered)
            totals[SEQUENCE_WISE].append(sequence_wise(len(rows), *delays, link))
        found.append(Comparison(extra, {name: float(np.mean(values)) for name, values in totals.items()}))
    return found
