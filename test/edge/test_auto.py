# SPDX-License-Identifier: Apache-2.0
"""Mode auto in simulated time: it finds the best choice at little cost, and finds another when the world changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from simulated_rounds import Replies, World, best_constant, constant, run

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.strategies import ALONE, strategies_of
from dsd_ros.edge.tuner import Tuner

NEAR = World(draft=0.005, target=0.05, delay=0.002, ranks=(0.9, 0.05, 0.02))
WORLDS = {
    "a robot and an A100 over Wi-Fi": World(0.072, 0.62, 0.12, (0.93, 0.04, 0.01), eight=1.15, prefills=(1, 1)),
    "two cores for both models": World(0.001, 0.004, 0.0007, (0.93, 0.04, 0.01), busy=2.5, per_node=0.3, noise=0.25),
    "a phone network": World(0.001, 0.004, 0.03, (0.93, 0.04, 0.01), busy=1.5, noise=0.2),
    "a target that is quickest at single tokens": World(
        0.001, 0.004, 0.005, (0.85, 0.08, 0.03), busy=1.5, noise=0.2, single=0.55
    ),
    "a satellite": World(0.001, 0.004, 0.3, (0.93, 0.04, 0.01), busy=1.5),
    "a draft as slow as the target": World(0.004, 0.004, 0.0007, (0.3, 0.2, 0.1), busy=2.0),
    "costly passes of a target that often disagrees": World(0.001, 0.02, 0.01, (0.6, 0.2, 0.1), busy=1.2),
}
CHANGES = {
    "the link gets long": replace(NEAR, delay=0.3),
    "the target gets slow": replace(NEAR, target=0.5),
    "the draft loses touch": replace(NEAR, ranks=(0.15, 0.1, 0.05)),
}
SEEDS = 3


def auto() -> Tuner:
    return Tuner(strategies_of(DecodeSettings(mode="auto")))


@pytest.mark.parametrize("name", WORLDS)
def test_from_the_third_reply_on_it_is_near_the_best_constant(name: str) -> None:
    world, spent, best = WORLDS[name], 0.0, 0.0
    plan = best_constant(world, 30)[1]
    for seed in range(SEEDS):
        spent += sum(run(auto(), [world] * 24, seed)[2:])
        best += sum(constant(plan, [world] * 24, seed)[2:])
    assert best / spent > 0.87


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_it_changes_its_mind_within_sixteen_replies(name: str, back: bool) -> None:
    before, after = (CHANGES[name], NEAR) if back else (NEAR, CHANGES[name])
    plan, spent, best = best_constant(after, 30)[1], 0.0, 0.0
    for seed in range(SEEDS):
        tuner, replies = auto(), Replies(seed)
        run(tuner, [before] * 20, replies=replies)
        spent += sum(run(tuner, [after] * 32, replies=replies)[16:])
        best += sum(constant(plan, [before] * 20 + [after] * 32, seed)[36:])
    assert best / spent > 0.92


def test_trials_lose_little_of_a_long_run() -> None:
    world = WORLDS["two cores for both models"]
    tuner = auto()
    run(tuner, [world] * 20)
    lost, seconds = tuner._lost, tuner._seconds
    run(tuner, [world] * 80, seed=1)
    assert tuner._lost - lost < 0.04 * (tuner._seconds - seconds)


def test_a_link_that_takes_long_is_not_crossed_for_trials() -> None:
    """A trial costs seconds there, not rounds."""
    world, tuner, replies, crossed = WORLDS["a satellite"], auto(), Replies(), 0
    run(tuner, [world] * 3, replies=replies)
    for _ in range(40):
        run(tuner, [world], replies=replies)
        crossed += any(record.drafted for record in replies.records)
    assert tuner.choice.strategy is ALONE and crossed <= 2


@pytest.mark.parametrize("name", WORLDS)
def test_a_second_start_is_near_the_best_constant_from_its_first_reply_on(name: str) -> None:
    world, spent, best = WORLDS[name], 0.0, 0.0
    plan = best_constant(world, 30)[1]
    for seed in range(SEEDS):
        tuner = auto()
        run(tuner, [world] * 40, seed)
        known = json.loads(json.dumps(tuner.state()))
        for start in range(100, 112):
            again = auto()
            again.restore(known)
            spent += sum(run(again, [world], start))
            best += sum(constant(plan, [world], start))
    assert best / spent > 0.88
