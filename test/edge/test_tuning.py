# SPDX-License-Identifier: Apache-2.0
"""Automatic draft lengths, simulated with known probabilities and times, against the best constant length."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.draft_length import accepted_by_tree
from dsd_ros.edge.estimates import LineFit
from dsd_ros.edge.proposer import Plan
from dsd_ros.edge.results import RoundRecord
from dsd_ros.edge.strategies import AHEAD, ALONE, IN_TURN, TREE, Strategy
from dsd_ros.edge.tuner import Tuner


@dataclass(frozen=True)
class Setting:
    """What is true of both models and the link between them; rates in bits a second, delay one way."""

    alpha: float
    draft: float
    target: float
    delay: float
    rate: float = float("inf")
    token_bytes: float = 3.0
    per_token: float = 0.0  # seconds in the target
    jitter: float = 0.0
    hit: float = 0.0  # of drafts made ahead

    def seconds(self, gamma: int) -> float:
        """Of a round, expected."""
        wait = 2 * self.delay + self.target + self.per_token * gamma
        wait += 8 * (30 + self.token_bytes * gamma) / self.rate
        left = max(0.0, gamma * self.draft - wait)
        return wait + self.hit * left + (1 - self.hit) * gamma * self.draft

    def tokens_per_second(self, gamma: int) -> float:
        tokens = (1 - self.alpha ** (gamma + 1)) / (1 - self.alpha)
        return tokens / self.seconds(gamma)

    def best(self) -> float:
        return max(self.tokens_per_second(gamma) for gamma in range(1, MAX_DRAFT_LENGTH + 1))

    def record(self, gamma: int, chance: np.random.Generator) -> RoundRecord:
        """One round, as it may happen."""
        accepted = int(np.argmin(np.append(chance.random(gamma) < self.alpha, False)))
        up = int(30 + self.token_bytes * gamma)
        verify = self.target + self.per_token * gamma
        wait = verify + 2 * self.delay + 8 * up / self.rate + self.jitter * chance.random()
        model = gamma * self.draft * (1 + 0.1 * chance.random())
        hit = bool(chance.random() < self.hit)
        return RoundRecord(
            drafted=gamma,
            depth=gamma,
            accepted=accepted,
            draft_seconds=max(0.0, model - wait) if hit else model,
            wait_seconds=wait,
            verify_seconds=verify,
            bytes_up=up,
            bytes_down=30,
            model_seconds=model,
            source="guess" if hit else "",
            ready=hit and model < wait,
        )


FAST = Setting(alpha=0.8, draft=0.002, target=0.02, delay=0.001, rate=1e8)
SETTINGS = {
    "fast link": FAST,
    "slow link": Setting(alpha=0.85, draft=0.01, target=0.05, delay=0.3, jitter=0.02),
    "costly draft": Setting(alpha=0.7, draft=0.072, target=0.1, delay=0.01),
    "draft as good as none": Setting(alpha=0.2, draft=0.05, target=0.05, delay=0.005),
    "costly bytes": Setting(alpha=0.85, draft=0.005, target=0.05, delay=0.1, rate=3e6, token_bytes=8000, jitter=0.005),
    "costly bytes of a large vocabulary": Setting(
        alpha=0.8, draft=0.005, target=0.1, delay=0.02, rate=5e7, token_bytes=600_000
    ),
    "costly verification": Setting(alpha=0.9, draft=0.001, target=0.02, delay=0.005, per_token=0.006),
    "drafted ahead": Setting(alpha=0.85, draft=0.072, target=0.62, delay=0.12, hit=0.9),
    "sometimes drafted ahead": Setting(alpha=0.85, draft=0.072, target=0.2, delay=0.02, hit=0.5),
}


def run(tuner: Tuner, setting: Setting, rounds: int, chance: np.random.Generator) -> list[Plan]:
    """The plans of so many rounds, each asked for when the round in front of it begins."""
    plans = []
    reply = int(chance.integers(1 << 30))
    planned = tuner.plan(reply, 1)
    for number in range(1, rounds + 1):
        following = tuner.plan(reply, number + 1)
        tuner.learn(planned, setting.record(planned.length, chance))
        plans.append(planned)
        planned = following
    return plans


def regret(plans: list[Plan], setting: Setting) -> float:
    """How much slower than the best constant length."""
    tokens = sum(setting.tokens_per_second(p.length) * setting.seconds(p.length) for p in plans)
    seconds = sum(setting.seconds(plan.length) for plan in plans)
    return 1 - tokens / seconds / setting.best()


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_steady_choice_is_near_the_best_constant(name: str, seed: int) -> None:
    setting = SETTINGS[name]
    plans = run(Tuner([AHEAD if setting.hit > 0.0 else IN_TURN]), setting, 250, np.random.default_rng(seed))
    assert regret(plans[120:], setting) < 0.05
    assert regret(plans, setting) < 0.1  # the search for it is not dear either


@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_the_link_is_followed(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tuner = Tuner()
    near = run(tuner, FAST, 120, chance)
    far = replace(FAST, delay=0.3)
    gone = run(tuner, far, 120, chance)
    back = run(tuner, FAST, 120, chance)
    for plans, setting in ((near, FAST), (gone, far), (back, FAST)):
        assert regret(plans[60:], setting) < 0.05
    assert min(p.length for p in gone[60:]) > max(p.length for p in back[60:])


def test_a_change_of_the_rate_is_followed() -> None:
    chance = np.random.default_rng(0)
    wide = Setting(alpha=0.85, draft=0.01, target=0.1, delay=0.05, token_bytes=8000)
    narrow = replace(wide, rate=2e6)
    tuner = Tuner()
    assert regret(run(tuner, wide, 120, chance)[60:], wide) < 0.05
    assert regret(run(tuner, narrow, 200, chance)[100:], narrow) < 0.05


def test_the_choice_does_not_flap() -> None:
    tuner = Tuner()
    chance = np.random.default_rng(1)
    run(tuner, SETTINGS["slow link"], 100, chance)
    chosen = []
    for _ in range(100):
        run(tuner, SETTINGS["slow link"], 1, chance)
        chosen.append(tuner.choice)
    changes = sum(now != then for now, then in zip(chosen[1:], chosen, strict=False))
    assert changes <= 10


def test_the_same_records_give_the_same_plans() -> None:
    def plans() -> list[Plan]:
        return run(Tuner(), SETTINGS["costly bytes"], 80, np.random.default_rng(5))

    assert plans() == plans()
    assert len(set(plans())) > 2  # a little more and less is tried


def test_a_round_s_plan_stays_what_it_was() -> None:
    tuner = Tuner()
    chance = np.random.default_rng(2)
    first = tuner.plan(1, 1)
    third = tuner.plan(1, 3)
    for _ in range(20):
        record = SETTINGS["slow link"].record(first.length, chance)
        tuner.learn(first, record)
    assert tuner.choice != third
    assert tuner.plan(1, 3) == third
    assert first == Plan(4)


def test_what_no_message_holds_is_never_planned() -> None:
    setting = SETTINGS["slow link"]
    plans = run(Tuner(longest=5), setting, 100, np.random.default_rng(0))
    assert max(plan.length for plan in plans) == 5


# ------------------------------------------------------------------------------------------------- trees

RANKS = (0.6, 0.15, 0.08, 0.04, 0.02)


def grow(nodes: int, levels: int) -> dict[tuple[int, ...], float]:
    """The best tree by ``RANKS``, one node at a time: paths of ranks, and their chances."""
    tree: dict[tuple[int, ...], float] = {(): 1.0}
    open_ = {(rank,): chance for rank, chance in enumerate(RANKS)}
    while len(tree) <= nodes and open_:
        best = max(open_, key=open_.__getitem__)
        tree[best] = open_.pop(best)
        if len(best) < levels:
            open_ |= {(*best, rank): tree[best] * chance for rank, chance in enumerate(RANKS)}
    return tree


@pytest.mark.parametrize(("nodes", "levels"), [(1, 1), (7, 3), (16, 4), (40, 8), (64, 2)])
def test_expected_tokens_of_the_best_tree(nodes: int, levels: int) -> None:
    expected = sum(grow(nodes, levels).values()) - 1.0
    gains, depths = accepted_by_tree(RANKS, 64, 8)
    assert gains.shape == depths.shape == (8, 64)
    assert gains[levels - 1, nodes - 1] == pytest.approx(expected)
    assert depths[levels - 1, nodes - 1] == max(map(len, grow(nodes, levels)))
    assert accepted_by_tree(RANKS, nodes, levels)[0][-1, -1] == pytest.approx(expected)


def test_one_rank_makes_the_formula_of_a_sequence() -> None:
    gains, depths = accepted_by_tree([0.8], 9, 9)
    assert gains[-1, -1] == pytest.approx(sum(0.8**i for i in range(1, 10)))
    assert depths[-1].tolist() == list(range(1, 10))


@pytest.mark.parametrize(("draft", "per_node", "delay"), [(0.001, 0.0, 0.3), (0.01, 0.001, 0.01), (0.05, 0.0, 0.0)])
def test_trees_are_chosen_by_what_nodes_and_levels_cost(draft: float, per_node: float, delay: float) -> None:
    def seconds(plan: Plan) -> float:
        levels = depths[plan.length - 1, plan.nodes - 1]
        return levels * draft + 0.05 + per_node * plan.nodes + 2 * delay

    gains, depths = accepted_by_tree(RANKS, 64, 24)

    def rate(plan: Plan) -> float:
        return float(1 + gains[plan.length - 1, plan.nodes - 1]) / seconds(plan)

    chance = np.random.default_rng(0)
    tuner, late = Tuner([TREE]), []
    for number in range(1, 201):
        plan = tuner.plan(1, number)
        tree = grow(plan.nodes, plan.length)
        path: tuple[int, ...] = ()
        ranks = []
        while len(path) < plan.length:
            rank = int(chance.choice(len(RANKS) + 1, p=[*RANKS, 1 - sum(RANKS)]))
            ranks.append(rank if rank < len(RANKS) else 99)
            if (*path, rank) not in tree:
                break
            path = (*path, rank)
        wait = 0.05 + per_node * plan.nodes + 2 * delay
        record = RoundRecord(
            drafted=plan.nodes,
            depth=max(map(len, tree)),
            accepted=len(path),
            draft_seconds=draft * max(map(len, tree)),
            wait_seconds=wait,
            verify_seconds=wait - 2 * delay,
            bytes_up=30 + 3 * plan.nodes,
            bytes_down=30,
        )
        tuner.learn(plan, record, ranks)
        if number > 100:
            late.append(plan)
    best = max(rate(Plan(levels, nodes)) for levels in range(1, 25) for nodes in range(levels, 65))
    assert sum(map(rate, late)) / len(late) > 0.95 * best


# ------------------------------------------------------------------------------------------------- lines


def test_a_line_of_two_slopes_is_found_under_noise() -> None:
    chance = np.random.default_rng(0)
    line = LineFit()
    for _ in range(200):
        up, down = chance.integers(10, 5000, 2)
        line.add(0.1 + 2e-5 * up + 1e-5 * down + 0.003 * chance.random(), up, down)
    assert line.at(0, 0) == pytest.approx(0.1015, abs=0.003)
    assert line.at(1000, 4000) == pytest.approx(0.1615, abs=0.004)


def test_noise_is_not_taken_for_a_slope_nor_a_jump_of_the_level() -> None:
    chance = np.random.default_rng(0)
    line = LineFit()
    for number in range(60):
        line.add(0.1 + 0.02 * chance.random(), 40 + number % 3)
    assert line.at(64_000) == pytest.approx(0.11, abs=0.01)
    line = LineFit()
    for number in range(60):
        line.add(0.1 if number < 40 else 0.9, 40 if number < 40 else 400)
        line.add(0.1 if number < 40 else 0.9, 44 if number < 40 else 404)
    assert line.at(40) == pytest.approx(0.9)
    assert line.at(4000) == pytest.approx(0.9)


# --------------------------------------------------------------------------------------------- strategies


@dataclass(frozen=True)
class Machine:
    """What rounds take with a draft of so many seconds a token, by strategy; ``slower``: drafting ahead slows all."""

    draft: float
    target: float
    delay: float
    alpha: float = 0.85
    slower: float = 1.0

    def setting(self, strategy: Strategy) -> Setting:
        by = self.slower if strategy.ahead else 1.0
        hit = 0.9 if strategy.ahead else 0.0
        return Setting(self.alpha, by * self.draft, by * self.target, self.delay, hit=hit)

    def record(self, plan: Plan, chance: np.random.Generator) -> RoundRecord:
        if plan.strategy.drafts:
            return self.setting(plan.strategy).record(plan.length, chance)
        return RoundRecord(0, 0, 0.0, self.target, self.target, 30, 30)

    def rate(self, strategy: Strategy, length: int = 0) -> float:
        if not strategy.drafts:
            return 1 / self.target
        setting = self.setting(strategy)
        return setting.tokens_per_second(length) if length else setting.best()


MACHINES = {
    ALONE: Machine(draft=0.05, target=0.02, delay=0.001, alpha=0.3),
    IN_TURN: Machine(draft=0.001, target=0.004, delay=0.0005, slower=2.0),
    AHEAD: Machine(draft=0.07, target=0.6, delay=0.12),
}


def alternate(tuner: Tuner, machine: Machine, rounds: int, chance: np.random.Generator, replies: int = 0) -> float:
    """The share of the best strategy's tokens a second that is reached in so many rounds, eight a reply."""
    tokens = seconds = 0.0
    for number in range(rounds):
        reply, place = replies + number // 8, number % 8 + 1
        if place == 1:
            tuner.begin_reply()
        plan = tuner.plan(reply, place)
        tuner.learn(plan, machine.record(plan, chance))
        if plan.strategy.drafts:
            spent = machine.setting(plan.strategy).seconds(plan.length)
            seconds, tokens = seconds + spent, tokens + spent * machine.rate(plan.strategy, plan.length)
        else:
            seconds, tokens = seconds + machine.target, tokens + 1
    return tokens / seconds / max(map(machine.rate, MACHINES))


@pytest.mark.parametrize("best", MACHINES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_strategy_is_found_and_kept(best: Strategy, seed: int) -> None:
    chance, tuner, machine = np.random.default_rng(seed), Tuner([IN_TURN, ALONE, AHEAD]), MACHINES[best]
    assert max(MACHINES, key=machine.rate) is best
    alternate(tuner, machine, 200, chance)
    assert alternate(tuner, machine, 400, chance, replies=25) > 0.92
    assert tuner.choice.strategy is best and tuner.explain().startswith(best.name)


def test_another_strategy_is_found_when_the_link_changes() -> None:
    chance, tuner = np.random.default_rng(0), Tuner([IN_TURN, ALONE, AHEAD])
    replies = 0
    for best in (IN_TURN, AHEAD, IN_TURN):
        alternate(tuner, MACHINES[best], 160, chance, replies)
        assert alternate(tuner, MACHINES[best], 160, chance, replies + 20) > 0.85, best.name
        replies += 40


def test_a_reply_that_the_target_decodes_alone_stays_so() -> None:
    tuner = Tuner([IN_TURN, ALONE])
    tuner._choice = tuner._ways[ALONE].choice
    assert not tuner.plan(1, 1).strategy.drafts
    tuner._choice = tuner._ways[IN_TURN].choice
    assert not tuner.plan(1, 2).strategy.drafts and tuner.plan(2, 1).strategy.drafts
