# SPDX-License-Identifier: Apache-2.0
"""Simulated replies for mode ``auto``: rounds that last as given times say, under any strategy. No clock, no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np

from dsd_ros.edge.proposer import Plan
from dsd_ros.edge.results import RoundRecord
from dsd_ros.edge.strategies import AHEAD, ALONE, BATCH, IN_FLIGHT, IN_TURN, TREE, Strategy
from dsd_ros.edge.tuner import Tuner

Choose = Callable[[int, int], Plan]  # (reply, round) -> what it drafts

CONSTANTS = (
    *(
        Plan(length, strategy=how)
        for how in (IN_TURN, AHEAD, BATCH, IN_FLIGHT)
        for length in (1, 2, 3, 5, 8, 12, 20, 32)
    ),
    *(Plan(levels, nodes, TREE) for levels, nodes in ((2, 4), (4, 8), (6, 16), (8, 32), (12, 32))),
    Plan(0, strategy=ALONE),
)


@dataclass(frozen=True)
class World:
    """What is true of both models and the link between them; seconds, one way for the delay.

    ranks: the probabilities that the target's token is the draft's likeliest, second, ... . ``busy``: how many times
    longer both models take while the robot drafts ahead. ``named``: how often a round's outcome is the first guess,
    and how often it is one of eight. ``noise``: of each time, the sigma of its logarithm.
    """

    draft: float
    target: float
    delay: float
    ranks: tuple[float, ...] = (0.85, 0.08, 0.03)
    per_token: float = 0.0  # in the target
    single: float = 1.0  # times a pass of the target, for a token without a draft
    per_node: float = 0.1  # of a level's time in the draft, for each further node
    busy: float = 1.0
    eight: float = 1.3  # times a pass, for eight drafts in one
    named: tuple[float, float] = (0.6, 0.95)
    prefills: tuple[float, float] = (10.0, 10.0)  # of both sides, passes
    noise: float = 0.1
    tokens: tuple[int, int] = (24, 48)  # of a reply


@cache
def _tree(ranks: tuple[float, ...], nodes: int, levels: int) -> tuple[frozenset[tuple[int, ...]], int]:
    """The best tree's paths of ranks, and its depth."""
    grown: set[tuple[int, ...]] = set()
    front = {(rank,): chance for rank, chance in enumerate(ranks)}
    while len(grown) < nodes and front:
        path = max(front, key=lambda path: front[path])
        chance = front.pop(path)
        grown.add(path)
        if len(path) < levels:
            front |= {(*path, rank): chance * share for rank, share in enumerate(ranks)}
    return frozenset(grown), max(map(len, grown))


class Replies:
    """Replies one after another, all times simulated; the same seed gives the same replies to any choice."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.number = 0
        self.records: list[RoundRecord] = []  # of the last reply

    def decode(self, world: World, choose: Choose, heed: Callable[[Plan, RoundRecord, list[int]], None]) -> float:
        """Seconds of the next reply, the prefill included; ``heed`` is called once the next round is sent."""
        self.number += 1
        chance = np.random.default_rng((self._seed, self.number))
        left = int(chance.integers(*world.tokens, endpoint=True))
        noise = np.random.default_rng((self._seed, self.number, 1))
        return _Reply(world, self.number, left, chance, noise).decode(choose, heed, self.records)


@dataclass
class _Reply:
    world: World
    number: int
    left: int  # tokens
    chance: np.random.Generator
    jitter: np.random.Generator

    def decode(
        self, choose: Choose, heed: Callable[[Plan, RoundRecord, list[int]], None], records: list[RoundRecord]
    ) -> float:
        world = self.world
        records.clear()
        plan = choose(self.number, 1)
        now = world.draft * world.prefills[0] if plan.strategy.drafts else 0.0
        ready = world.target * world.prefills[1]  # when the target has read the prompt
        noted: tuple[Plan, RoundRecord, list[int]] | None = None
        done, source, sent, front, number = 0.0, "", None, 0.0, 1
        before: Strategy | None = None
        asked = 0
        while True:
            how, busy = plan.strategy, world.busy if plan.strategy.ahead else 1.0
            levels, nodes, whole, accepted, ranks = self._verdict(plan)
            step = self._about(world.draft) * (1 + world.per_node * (nodes / levels - 1)) if levels else 0.0
            missing = max(0.0, levels - done)
            began, drafting = now, missing * step
            sent = now + drafting if sent is None else sent
            passing = world.target * (busy if how.drafts else world.single)
            verify = self._about(passing + world.per_token * nodes)
            alone = not how.drafts and how is before and asked != 1  # the target goes on by itself
            asked = plan.rounds
            delay = 0.0 if alone else 2 * self._about(world.delay)
            flight = source == "flight"
            arrival = max(sent + delay + verify, ready + verify + delay / 2, now + verify if flight else 0.0)
            verify, ready = verify + ready, 0.0  # a verifier counts the prefill as part of the first round
            if noted is not None:
                heed(*noted)
            following = choose(self.number, number + 1)
            wait = arrival - began - drafting
            record = RoundRecord(
                nodes, accepted, drafting, wait, verify, 40 + 3 * nodes, 30, levels * step, source=source,
                ready=bool(source) and not missing, depth=levels, length=plan.length, budget=plan.nodes,
                strategy=how.name, began_seconds=began,
            )  # fmt: skip
            records.append(record)
            noted = plan, record, ranks
            self.left -= accepted + 1
            if self.left <= 0:
                heed(*noted)
                return arrival
            done, source, sent, front = self._ahead(plan, following, record, began + drafting, arrival, front, whole)
            now, plan, number, before = arrival, following, number + 1, how

    def _verdict(self, plan: Plan) -> tuple[int, int, bool, int, list[int]]:
        """Levels and nodes drafted, whether all levels were accepted, tokens accepted, ranks of the target's tokens."""
        if not plan.strategy.drafts:
            return 0, 0, False, 0, []
        levels = min(plan.length, self.left)
        paths: frozenset[tuple[int, ...]] | None = None
        if plan.nodes:
            paths, levels = _tree(self.world.ranks, plan.nodes, levels)
        drawn: list[int] = np.searchsorted(np.cumsum(self.world.ranks), self.chance.random(levels + 1)).tolist()
        accepted = 0
        while accepted < levels and (
            tuple(drawn[: accepted + 1]) in paths if paths is not None else not drawn[accepted]
        ):
            accepted += 1
        nodes = len(paths) if paths is not None else levels
        return levels, nodes, accepted == levels, accepted, drawn[: accepted + 1]

    def _ahead(
        self, plan: Plan, following: Plan, record: RoundRecord, sent: float, arrival: float, front: float, whole: bool
    ) -> tuple[float, str, float | None, float]:
        """Levels of the next draft that are done when the outcome comes, their source, when they were sent ahead."""
        world, how = self.world, plan.strategy
        if not (how.ahead and following.strategy.drafts):
            return 0.0, "", None, 0.0
        luck = self.chance.random()
        step = world.draft * world.busy * (world.eight if how.batch > 1 else 1.0)
        complete = max(front, sent) + (following.length + 1) * step
        if how.in_flight > 1 and whole and luck < world.named[0] and complete < arrival:
            return float(following.length), "flight", complete, complete
        if luck > world.named[how.batch > 1]:
            return 0.0, "", None, 0.0
        done = int((arrival - sent) / step) - 1
        return (float(done), "guess", None, 0.0) if done > 0 else (0.0, "", None, 0.0)

    def _about(self, seconds: float) -> float:
        return seconds * float(np.exp(self.world.noise * self.jitter.standard_normal()))


def run(tuner: Tuner, worlds: Iterable[World], seed: int = 0, replies: Replies | None = None) -> list[float]:
    """Seconds of one reply in each world, by what ``tuner`` chooses."""
    made = replies or Replies(seed)
    seconds = []
    for world in worlds:
        tuner.begin_reply()
        seconds.append(made.decode(world, tuner.plan, tuner.learn))
    return seconds


def constant(plan: Plan, worlds: Iterable[World], seed: int = 0) -> list[float]:
    """The same with one choice."""
    made = Replies(seed)
    return [made.decode(world, lambda reply, number: plan, lambda *_: None) for world in worlds]


def best_constant(world: World, count: int = 60, seed: int = 0) -> tuple[float, Plan]:
    """Seconds per reply of the best of ``CONSTANTS``, and that one."""
    return min(((sum(constant(plan, [world] * count, seed)) / count, plan) for plan in CONSTANTS), key=lambda x: x[0])


class Probing(Tuner):
    """Lets the target decode some rounds alone again and again, and now and then the rest of a reply."""

    def _next_plan(self, reply: int) -> Plan:
        if not self._probe and self._planned % 3 == 0:
            self._probe = 1 + self._planned % 4
        if self._planned % 20 == 19:
            self._alone = reply
        return super()._next_plan(reply)

    def _weigh(self, done: Strategy, seconds: float, choice: Plan, trial: Strategy | None) -> tuple[Plan, None]:
        return next(iter(self._ways.values())).choice, None
