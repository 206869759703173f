# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab plan`: how many verifiers a fleet of robots needs, by simulating every round of its replies.

A discrete-event simulation (simpy) of robots that draft, wait for their verifier, and walk between two replies. Robots
repeat replies that `dsd-lab bench fleet` recorded. Verifiers take turns from the engine's own ``TurnQueue``, on the
simulation's clock, and each pass lasts as the curve of its batch says. Each robot connects once and stays, so least
connections deal robots out evenly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec
import simpy

from dsd_lab.bench.profiles import Curve, Profile, at_batch
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.plotting import BLUE, GREEN, RED, YELLOW, new_figure, tidy
from dsd_lab.report import BenchError, check_range, header, table
from dsd_ros.wire.turns import TurnQueue

MAX_ROBOTS = 10_000
# Seconds between the end of a reply and the beginning of the next in the recorded run test/bags/straight: turns of 15
# degrees, and steps of 25 and 75 cm.
WALKS_S = (0.86, 2.10, 2.09, 0.87, 1.13)
SLOWER = (1.5, 2.0)  # times the 95th percentile of a robot that has a verifier to itself
WARM_UP = 2  # replies of each robot before those that count
_REPLIES = 400  # of one run at least, those that count
_WAITING = 20  # turns of one robot; see MAX_WAITING_PER_SESSION of the engine
_POLL_S = 0.01  # how soon a verifier looks again at turns that wait out of courtesy

Events = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class RecordedRound:
    """What one round asks of link and verifier."""

    think_s: float  # on the robot: from the outcome before, or the reply's beginning, to sending the draft
    bytes_up: int
    bytes_down: int
    tokens: int  # of the draft
    asked: bool = True  # False: the target goes on by itself, and nothing travels up


@dataclass(frozen=True)
class RecordedReply:
    """One reply, round by round."""

    tokens: int
    picture_bytes: int
    rounds: tuple[RecordedRound, ...]


@dataclass(frozen=True)
class Workload:
    """What robots do, and how long a verifier takes for it; seconds without any time scale."""

    replies: tuple[RecordedReply, ...]
    link: LinkProfile
    pass_s: Curve  # (sequences in a pass, seconds); a prompt is one
    prefill_s: float  # of one observation, alone in its pass; 0: there are none
    max_batch: int = 32
    max_batch_tokens: int = 2048
    spread_s: float = 0.0  # up to this much is added to a think time: real robots do not send at the same instant
    walks_s: tuple[float, ...] = (0.0,)  # drawn from after each reply


@dataclass
class _Turn:
    """What waits at a verifier: an observation, or a round whose ``done`` happens after its pass."""

    robot: int
    since: float
    done: simpy.Event | None = None
    free: bool = False  # the prefill has told its outcome: it needs no pass


@dataclass
class _Log:
    """What happens in a run, from ``began`` on."""

    replies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    tokens: int = 0
    busy_s: float = 0.0
    began: float = math.inf


class _Verifier:
    """One engine: a queue, and passes over what waits."""

    def __init__(self, env: simpy.Environment, workload: Workload, log: _Log) -> None:
        self._env, self._workload, self._log = env, workload, log
        self._pass_s = [0.0] + [at_batch(workload.pass_s, size) for size in range(1, 2 * workload.max_batch + 1)]
        self._longer_s = max(0.0, workload.prefill_s - self._pass_s[1])  # a prompt, than any other sequence
        self._queue: TurnQueue[_Turn] = TurnQueue(_WAITING, clock=lambda: env.now)
        self._wake: simpy.Event | None = None
        env.process(self._serve())

    def observe(self, robot: int) -> None:
        """An observation has arrived."""
        self._put(robot, _Turn(robot, self._env.now), "Observation", 1, "Draft")

    def verify(self, robot: int, round: RecordedRound, free: bool) -> simpy.Event:
        """A round has arrived; the event of its outcome."""
        done = self._env.event()
        self._put(robot, _Turn(robot, self._env.now, done, free), "Draft" if round.asked else "alone", round.tokens + 1)
        return done

    def _put(self, robot: int, turn: _Turn, kind: str, weight: int, joins: str = "") -> None:
        """As ``VerifierEngine`` queues it."""
        self._queue.put(robot, turn, kind=kind, weight=weight, joins=joins)
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def _serve(self) -> Events:
        env, log, workload = self._env, self._log, self._workload
        while True:
            turns = self._queue.ready(workload.max_batch, 0.0, workload.max_batch_tokens)
            if not turns:
                self._wake = env.event()
                yield self._wake | env.timeout(_POLL_S) if len(self._queue) else self._wake
                self._wake = None
                continue
            rounds = [turn.done for turn in turns if turn.done is not None]
            size, prompts = sum(not turn.free for turn in turns), len(turns) - len(rounds)
            alone = size == prompts == 1
            seconds = workload.prefill_s if alone else self._pass_s[size] + self._longer_s * prompts
            if env.now >= log.began:
                log.waits += [env.now - turn.since for turn in turns]
                log.busy_s += seconds
                if size:
                    log.batches.append(len({turn.robot for turn in turns}))  # a prompt and its own round count once
            if seconds:
                yield env.timeout(seconds)
            for done in rounds:
                done.succeed()


class _Fleet:
    """Robots on verifiers; each decodes ``warm_up`` replies and then ``replies`` that count."""

    def __init__(self, workload: Workload, robots: int, verifiers: int, replies: int, warm_up: int, seed: int) -> None:
        self.env, self.log = simpy.Environment(), _Log()
        self._workload, self._replies, self._warm_up, self._seed = workload, replies, warm_up, seed
        self._cold = self._unfinished = robots
        self._ended = self.env.event()
        places = [_Verifier(self.env, workload, self.log) for _ in range(verifiers)]
        for number in range(robots):
            self.env.process(self._robot(number, places[number % verifiers]))
        if not warm_up:
            self.log.began = 0.0

    def run(self) -> float:
        """Seconds that were measured."""
        self.env.run(self._ended)
        return float(self.env.now) - self.log.began

    def _robot(self, number: int, verifier: _Verifier) -> Events:
        env, log, workload, rng = self.env, self.log, self._workload, random.Random(f"{self._seed}/{number}")
        if self._warm_up:
            yield env.timeout(rng.uniform(0.0, _alone_s(workload, 0) + max(workload.walks_s)))
        for place in count():
            # Before the warm-up is over and after a robot's own replies it goes on, as a load for the others.
            chosen = place if not self._warm_up else rng.randrange(len(workload.replies))
            reply = workload.replies[chosen % len(workload.replies)]
            began = env.now
            yield from self._decode(number, reply, verifier, rng)
            if env.now >= log.began:
                log.tokens += reply.tokens
            if self._warm_up <= place < self._warm_up + self._replies:
                log.replies.append(env.now - began)
            if place == self._warm_up - 1:
                self._cold -= 1
                if not self._cold:
                    log.began = env.now
            elif place == self._warm_up + self._replies - 1:
                self._unfinished -= 1
                if not self._unfinished:
                    self._ended.succeed()
                if not self._warm_up:
                    return
            yield env.timeout(rng.choice(workload.walks_s))

    def _decode(self, number: int, reply: RecordedReply, verifier: _Verifier, rng: random.Random) -> Events:
        """One reply: what is sent arrives in order, and what comes back delays what the robot does next."""
        env, link, seen, spread = self.env, self._workload.link, self._workload.prefill_s > 0, self._workload.spread_s
        arrival = env.now
        if seen:
            arrival += self._up_s(link, reply.picture_bytes, rng)
            env.timeout(arrival - env.now).callbacks.append(lambda _: verifier.observe(number))
        back = 0.0
        for place, round in enumerate(reply.rounds):
            if round.asked:
                arrival = max(
                    arrival,
                    env.now + back + round.think_s + rng.random() * spread + self._up_s(link, round.bytes_up, rng),
                )
                yield env.timeout(arrival - env.now)
            yield verifier.verify(number, round, free=seen and place == 0 and not round.tokens)
            back = link.delay_down_s + link.jitter_s * rng.random() + _carry_s(round.bytes_down, link.rate_down_bps)
        yield env.timeout(back)

    @staticmethod
    def _up_s(link: LinkProfile, size: int, rng: random.Random) -> float:
        return link.delay_up_s + link.jitter_s * rng.random() + _carry_s(size, link.rate_up_bps)


def _carry_s(size: int, rate_bps: float) -> float:
    return 8.0 * size / rate_bps if rate_bps else 0.0


def _alone_s(workload: Workload, place: int) -> float:
    """Seconds of a reply without jitter, on a verifier that serves nobody else; roughly, for the beginning."""
    reply, link = workload.replies[place], workload.link
    rounds = sum(round.think_s * round.asked + workload.pass_s[0][1] for round in reply.rounds)
    trips = 1 + sum(round.asked for round in reply.rounds[1:])
    return workload.prefill_s + rounds + trips * (link.delay_up_s + link.delay_down_s)


def simulate(
    workload: Workload, robots: int, verifiers: int = 1, replies: int = 0, warm_up: int = WARM_UP, seed: int = 0
) -> dict[str, Any]:
    """What ``robots`` get from ``verifiers``: a row of figures.

    ``replies``: of each robot, 0: as many as a percentile needs. Without a warm-up all robots begin at once with the
    first recorded reply, and stop after their last, as `dsd-lab bench fleet` has it.
    """
    replies = replies or math.ceil(_REPLIES / robots)
    fleet = _Fleet(workload, robots, verifiers, replies, warm_up, seed)
    seconds, log = fleet.run(), fleet.log
    times, waits = sorted(log.replies), sorted(log.waits)
    return {
        "robots": robots,
        "verifiers": verifiers,
        "tokens_per_second": log.tokens / seconds,
        "reply_seconds_median": _quantile(times, 0.5),
        "reply_seconds_p95": _quantile(times, 0.95),
        "wait_seconds_mean": sum(waits) / len(waits),
        "wait_seconds_p95": _quantile(waits, 0.95),
        "mean_batch": sum(log.batches) / max(1, len(log.batches)),
        "busy": min(1.0, log.busy_s / (seconds * verifiers)),
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The value at ``share`` of an ascending list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def plan(
    workload: Workload,
    fleets: Sequence[int],
    limits: Sequence[float] = (),
    seed: int = 0,
    progress: Callable[[float, str], None] = lambda done, text: None,
) -> dict[str, Any]:
    """The fewest verifiers for which 95 of 100 replies of each fleet take no longer than each limit, in seconds.

    Verifiers share nothing but robots, so what one of them serves is found first; then the whole fleet is simulated,
    with more verifiers until the limit holds. Without ``limits``: multiples (SLOWER) of a robot alone. BenchError.
    """
    for size in fleets:
        check_range("robots", size, 1, MAX_ROBOTS)
    check_range("max-batch", workload.max_batch, 1, 4096)
    loads: dict[int, dict[str, Any]] = {}

    def on_one(robots: int) -> dict[str, Any]:
        if robots not in loads:
            loads[robots] = simulate(workload, robots, seed=seed)
            progress(0.0, f"{robots} robots on one verifier: {loads[robots]['reply_seconds_p95']:.1f} s")
        return loads[robots]

    alone = on_one(1)["reply_seconds_p95"]
    limits = list(limits) or [round(times * alone, 1) for times in SLOWER]
    for limit in limits:
        if not alone <= limit <= 1e6:
            raise BenchError(
                f"95 of 100 replies take a robot alone {alone:.2f} s, so {limit:g} s cannot be; ask for more"
            )
    for robots in (2, 4, 8, 16, 32, 64):
        if robots <= max(fleets):
            on_one(robots)
    rows = []
    for number, limit in enumerate(limits):
        most = _most(on_one, limit, max(fleets))
        for place, size in enumerate(fleets):
            rows.append({"limit_s": limit} | _fewest(workload, size, limit, most, seed))
            done = (number * len(fleets) + place + 1) / (len(limits) * len(fleets))
            progress(done, f"{size} robots within {limit:g} s: {rows[-1]['verifiers']} verifiers")
    return {
        **header("plan", ("dsd_lab/bench/plan.py",)),
        "seed": seed,
        "alone_s": alone,
        "workload": msgspec.to_builtins(replace(workload, replies=())) | {"replies": len(workload.replies)},
        "one_verifier": [loads[robots] for robots in sorted(loads)],
        "rows": rows,
    }


def _most(on_one: Callable[[int], dict[str, Any]], limit: float, top: int) -> int:
    """The most robots, up to ``top``, that one verifier serves within ``limit``."""
    low, high = 1, 2
    while high <= top and on_one(high)["reply_seconds_p95"] <= limit:
        low, high = high, 2 * high
    high = min(high, top + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if on_one(middle)["reply_seconds_p95"] <= limit else (low, middle)
    return low


def _fewest(workload: Workload, robots: int, limit: float, most: int, seed: int) -> dict[str, Any]:
    """The row of the fewest verifiers, to 2 percent; ``most``: the robots that one of them serves."""
    verifiers = math.ceil(robots / most)
    while True:
        row = simulate(workload, robots, verifiers, seed=seed)
        if row["reply_seconds_p95"] <= limit or verifiers == robots:
            return row
        verifiers = min(robots, verifiers + math.ceil(verifiers / 50))


def with_times_of(profile: Profile, workload: Workload) -> Workload:
    """The same robots before the profile's target; BenchError."""
    if profile.times is None:
        raise BenchError(f"profile {profile.name} gives no times of a target; name one with target_ms")
    drafted = [round.tokens for reply in workload.replies for round in reply.rounds]
    curve, prompt = profile.times.passes(1 + sum(drafted) / len(drafted))
    return replace(workload, pass_s=curve, prefill_s=prompt if workload.prefill_s else 0.0)


def read_workload(path: Path) -> Workload:
    """The workload in a report of `dsd-lab bench fleet`; BenchError, OSError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        found = msgspec.convert(report.get("workload"), Workload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BenchError(
            f"{path.name} has no workload ({error}); write one with dsd-lab bench fleet --json FILE"
        ) from error
    rounds = [round for reply in found.replies for round in reply.rounds]
    times = [found.prefill_s, *found.walks_s, *(round.think_s for round in rounds)]
    passes = [seconds for _, seconds in found.pass_s]
    if not rounds or not passes or min(times) < 0 or min(passes) <= 0:
        raise BenchError(
            f"{path.name} has an empty or negative workload; write one with dsd-lab bench fleet --json FILE"
        )
    return found


def walks_of(bag: Path) -> tuple[float, ...]:
    """Seconds between each reply's end and the next one's beginning in a recorded run; BenchError, BagError."""
    from dsd_ros.observe.bag.reader import open_bag
    from dsd_ros.observe.bag.run import read_run

    steps = read_run(open_bag(bag)).steps
    gaps = [(after.at - before.at) * 1e-9 - after.stats["seconds"] for before, after in pairwise(steps)]
    if not gaps:
        raise BenchError(f"{bag} has fewer than two replies, so nothing between them; name a bag of a longer run")
    return tuple(max(0.0, gap) for gap in gaps)


def render(report: dict[str, Any]) -> str:
    """What one verifier serves, and what each fleet needs, as tables."""
    one = [["robots on one verifier", "tokens/s", "s/reply", "p95", "wait p95", "mean batch", "busy %"]]
    one += [[str(row["robots"]), *_cells(row)] for row in report["one_verifier"]]
    needs = [["robots", "p95 at most", "verifiers", "tokens/s", "s/reply", "p95", "wait p95", "mean batch", "busy %"]]
    for row in report["rows"]:
        needs += [[str(row["robots"]), f"{row['limit_s']:g}", str(row["verifiers"]), *_cells(row)]]
    walks = report["workload"]["walks_s"]
    title = f"simulated; a robot walks {sum(walks) / len(walks):.1f} s between replies"
    return "\n".join([title, *table(one, left=0), "", *table(needs, left=0)])


def _cells(row: dict[str, Any]) -> list[str]:
    times = (f"{row[name]:.2f}" for name in ("reply_seconds_median", "reply_seconds_p95", "wait_seconds_p95"))
    return [f"{row['tokens_per_second']:.1f}", *times, f"{row['mean_batch']:.1f}", f"{100 * row['busy']:.0f}"]


def draw(report: dict[str, Any], path: Path) -> None:
    """Seconds a reply over the robots on one verifier, and the verifiers that fleets need."""
    figure = new_figure(path, 9, 4)
    left, right = figure.subplots(1, 2)
    counts = [row["robots"] for row in report["one_verifier"]]
    for name, text, colour in (("median", "median", GREEN), ("p95", "95th percentile", BLUE)):
        values = [row[f"reply_seconds_{name}"] for row in report["one_verifier"]]
        left.plot(counts, values, "o-", color=colour, label=text, markersize=4)
    limits = sorted({row["limit_s"] for row in report["rows"]})
    for number, limit in enumerate(limits):
        colour = (RED, YELLOW, GREEN, BLUE)[number % 4]
        left.axhline(limit, color=colour, linewidth=0.9, linestyle="--")
        rows = [row for row in report["rows"] if row["limit_s"] == limit]
        label = f"95 of 100 replies within {limit:g} s"
        right.plot([row["robots"] for row in rows], [row["verifiers"] for row in rows], "o-", color=colour, label=label)
    left.set(xlabel="robots on one verifier", ylabel="seconds a reply", xscale="log", ylim=(0, 2 * limits[-1]))
    right.set(xlabel="robots", ylabel="verifiers", xscale="log", yscale="log")
    left.legend()
    right.legend()
    tidy(left, right)
    figure.savefig(path)
