# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from dsd_lab.train.data import SPLIT_SEEDS, apply_action, shared_offscreen
from dsd_lab.worlds.expert import DRAWS, doubts, misjudged, reply
from dsd_lab.worlds.guide import View, full_round, walk
from dsd_lab.worlds.situations import Situation, Split, world_of
from dsd_ros.robot.sim.offscreen import Offscreen
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import RADIUS, ROBOT_RADIUS, Thing, World

STEPS = 25


@pytest.fixture(scope="module")
def offscreen() -> Iterator[Offscreen]:
    made = shared_offscreen()
    yield made
    made.close()


def drive(simulator: Simulator, see: Callable[[Simulator], View], noisy: bool) -> tuple[bool, float]:
    """Whether the expert's replies, carried out, end as they should, and the metres gone."""
    world = simulator.world
    rng = np.random.default_rng([world.seed, 1]) if noisy else None
    actions: list[str] = []
    seen: list[bool] = []
    gone = 0.0
    for _ in range(STEPS):
        view = see(simulator)
        seen.append(view.index_of(world.goal) is not None)
        text = reply(view, world.goal, full_round(actions, seen))
        before = simulator.pose
        if not apply_action(simulator, text, rng):
            there = simulator.reached() if world.target_index is not None else text.startswith("No ")
            return there and simulator.collisions == 0, gone
        gone += math.dist(before[:2], simulator.pose[:2])
        actions.append(text.rsplit("Action: ", 1)[1])
    return False, gone


def geometry(simulator: Simulator) -> View:
    return View.at(simulator.world, simulator.pose)


def measured(situation: Situation, split: Split, count: int) -> dict[str, float]:
    """Shares of seeds reached and collided, and the mean of the metres gone over the guide's exact walk."""
    reached, collided, longer = [], [], []
    for seed in SPLIT_SEEDS[split][:count]:
        world = world_of(seed, situation, split)
        simulator = Simulator(world)
        ok, gone = drive(simulator, geometry, noisy=True)
        reached.append(ok)
        collided.append(simulator.collisions > 0)
        if world.target_index is not None:
            longer.append(gone / max(walk(world).length, 0.25))
    figures = {"reached": np.mean(reached), "collided": np.mean(collided), "times_the_walk": np.mean(longer or [1.0])}
    return {name: float(value) for name, value in figures.items()}


def test_the_expert_reaches_the_target_without_touching_anything(offscreen: Offscreen) -> None:
    for seed in range(6):
        instruction = "find the silver bottle" if seed == 0 else None
        with Simulator(World.from_seed(seed, instruction), offscreen=offscreen) as simulator:
            assert drive(simulator, View.of, noisy=False)[0], seed


@pytest.mark.parametrize("situation", Situation)
def test_the_expert_solves_each_situation_from_rendered_pictures(situation: Situation, offscreen: Offscreen) -> None:
    with Simulator(world_of(11, situation, Split.TEST), offscreen=offscreen) as simulator:
        assert drive(simulator, View.of, noisy=False)[0]


@pytest.mark.parametrize("situation", Situation)
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_the_expert_solves_nearly_all_seeds_with_a_real_robots_noise(situation: Situation, count: int) -> None:
    figures = measured(situation, Split.TEST, count)
    assert figures["reached"] >= 0.98 and figures["collided"] < 0.01
    assert figures["times_the_walk"] < 1.15


def room(*things: Thing) -> View:
    """A view along x from the middle of a big empty room with some things."""
    world = replace(World.from_seed(1), half_x=3.0, half_y=3.0, things=things, furniture=(), target_index=0)
    return View.at(world, (-2.0, 0.0, 0.0))


TWO = (Thing("chair", "red", 0.0, 0.6, 0.0), Thing("chair", "red", 1.2, -0.5, 0.0))


def test_one_of_two_is_told_by_its_place_in_the_picture() -> None:
    view = room(*TWO)
    said = {which: reply(view, f"{which} red chair") for which in ("left", "right", "nearer", "farther")}
    assert said["left"].startswith("The left red chair is a little left, 1.6 m away; not the red chair right")
    assert said["right"].startswith("The right red chair is straight ahead, 2.5 m away; not the red chair left")
    for one, same in (("nearer", "left"), ("farther", "right")):
        assert said[one].replace(one, same) == said[same]
    alone = room(TWO[0])
    whole = reply(alone, "red chair")
    for which in said:
        assert reply(alone, f"{which} red chair") == whole.replace("red chair", f"{which} red chair", 1)


def test_what_is_not_in_view_is_looked_for_and_given_up_after_a_round() -> None:
    view = room(*TWO)
    assert reply(view, "left blue box") == (
        "No left blue box in view, only a red chair on the left, so I look around. Action: turn left 45 degrees"
    )
    assert reply(view, "blue box", searched=True) == ("No blue box anywhere here, so I stop. Action: stop")


def test_an_obstacle_is_gone_round_with_the_goal_still_in_the_picture() -> None:
    goal, obstacle = Thing("ball", "red", 0.6, 0.0, 0.0), Thing("box", "blue", -0.6, 0.1, 0.0)
    view = room(goal, obstacle)
    text = reply(view, "red ball")
    assert "the blue box is in the way, so I go round its right" in text
    assert text.endswith(("turn right 15 degrees", "turn right 30 degrees"))


def view_of(bearing: float, gap: float, pixels: int = 900) -> View:
    """A red chair alone in a large room, at a bearing in degrees and a gap in metres."""
    away = gap + RADIUS["chair"] + ROBOT_RADIUS
    angle = math.radians(bearing)
    chair = Thing("chair", "red", away * math.cos(angle), away * math.sin(angle), 0.0)
    world = World(0, 9.0, 9.0, (chair,), (), 0, (0.0, 0.0, 0.0), "find the red chair")
    return View.showing(world, (0.0, 0.0, 0.0), {0: pixels})


def actions_of(view: View, seed: int = 0) -> tuple[str, Counter[str]]:
    own = reply(view, "red chair")
    others = doubts(view, [("red chair", own)], np.random.default_rng(seed))[0]
    assert own not in [text for text, _ in others]
    assert 0 <= sum(n for _, n in others) <= DRAWS
    count: Counter[str] = Counter()
    for text, n in others:
        count[text.rsplit("Action: ", 1)[1]] += n
    return own.rsplit("Action: ", 1)[1], count


@pytest.mark.parametrize(
    ("view", "own", "other"),
    [
        (view_of(0.0, 0.401), "forward 25 cm", "stop"),
        (view_of(0.0, 0.399), "stop", "forward 25 cm"),
        (view_of(10.05, 0.55), "turn left 15 degrees", "forward 25 cm"),
        (view_of(-9.95, 1.9), "forward 75 cm", "turn right 15 degrees"),
        (view_of(0.0, 1.9, 61), "forward 75 cm", "turn left 45 degrees"),  # it may be out of sight
        (view_of(0.0, 1.9, 59), "turn left 45 degrees", "forward 75 cm"),  # or in sight after all
    ],
)
def test_near_an_edge_about_half_of_the_misjudged_replies_are_others(view: View, own: str, other: str) -> None:
    said, others = actions_of(view)
    assert said == own
    assert DRAWS / 5 < others[other] < DRAWS * 4 / 5


@pytest.mark.parametrize("view", [view_of(0.0, 1.9), view_of(14.0, 0.2), view_of(33.0, 0.5)])
def test_far_from_every_edge_no_reply_has_another_action(view: View) -> None:
    own, others = actions_of(view)
    assert set(others) <= {own}


def test_everything_is_misjudged_as_seen_from_the_robot() -> None:
    world = world_of(4, Situation.HIDDEN, Split.TRAINING)
    view = View.at(world, world.start)
    rng = np.random.default_rng(3)
    views = [misjudged(view, rng) for _ in range(800)]
    for index in range(len(world.things)):
        turned = [one.bearing(index) - view.bearing(index) for one in views]
        far = [
            math.log((one.gap(index) + r) / (view.gap(index) + r))
            for one in views
            for r in [world.things[index].radius + ROBOT_RADIUS]
        ]
        assert math.degrees(np.std(turned)) == pytest.approx(0.7, rel=0.15)
        assert np.std(far) == pytest.approx(0.03, rel=0.15)
        assert abs(np.mean(turned)) < 0.002 and abs(np.mean(far)) < 0.005
    assert all(one.pose == view.pose and len(one.world.things) == len(world.things) for one in views)
    assert np.std([one.world.half_x for one in views]) > 0.01
