# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import pytest

from dsd_ros.robot.sim.simulator import Simulator, check_arrival
from dsd_ros.robot.sim.world import Thing, World


@pytest.fixture
def simulator() -> Simulator:
    """A room with a red bottle 1.5 m ahead of the robot."""
    thing = Thing("bottle", "red", 1.5, 0.0, 0.0)
    world = replace(World.from_seed(1), things=(thing,), furniture=(), target_index=0, start=(0.0, 0.0, 0.0))
    return Simulator(world)


def test_near_and_at_rest_is_arrived(simulator: Simulator) -> None:
    assert not check_arrival(simulator, "find the red bottle").arrived
    simulator.pose = (0.6, 0.0, 0.0)
    found = check_arrival(simulator, "Go to the RED bottle, please")
    assert found.arrived and found.distance == pytest.approx(0.53)
    assert "0.53 m from the red bottle" in found.message


def test_a_moving_robot_has_not_arrived(simulator: Simulator) -> None:
    simulator.pose = (0.6, 0.0, 0.0)
    simulator.step(0.1, 0.3, 0.0, 0.0)
    found = check_arrival(simulator, "find the red bottle")
    assert not found.arrived and "still moves" in found.message


def test_a_collision_spoils_it(simulator: Simulator) -> None:
    for _ in range(400):
        simulator.step(0.02, 0.5, 0.0, 0.0)
    simulator.step(1.0, 0.0, 0.0, 0.0)
    found = check_arrival(simulator, "find the red bottle")
    assert not found.arrived and "run into" in found.message


@pytest.mark.parametrize(
    ("instruction", "sentence"),
    [
        ("find peace", "names no target"),
        ("", "names no target"),
        ("find the blue chair", "this world's target is the red bottle"),
    ],
)
def test_another_target_is_not_arrived(simulator: Simulator, instruction, sentence) -> None:
    simulator.pose = (0.6, 0.0, 0.0)
    found = check_arrival(simulator, instruction)
    assert not found.arrived and found.distance == -1.0 and sentence in found.message


def test_one_of_two_must_be_told_apart() -> None:
    things = (Thing("chair", "red", 1.5, 0.8, 0.0), Thing("chair", "red", 1.5, -0.8, 0.0))
    world = replace(
        World.from_seed(1), things=things, furniture=(), target_index=0, which="left", start=(0.0, 0.0, 0.0)
    )
    simulator = Simulator(world)
    simulator.pose = (0.7, 0.8, 0.0)
    found = check_arrival(simulator, "go to the red chair on the left")
    assert found.arrived and "from the left red chair" in found.message
    for instruction in ("find the right red chair", "find the red chair"):
        found = check_arrival(simulator, instruction)
        assert not found.arrived and "this world's target is the left red chair" in found.message


def test_the_left_one_of_one_is_that_one(simulator: Simulator) -> None:
    simulator.pose = (0.6, 0.0, 0.0)
    assert check_arrival(simulator, "find the nearer red bottle").arrived


def test_nowhere_is_the_arrival_at_what_is_absent() -> None:
    world = replace(World.from_seed(1), target_index=None, missing="red ball")
    simulator = Simulator(world)
    found = check_arrival(simulator, "find the red ball")
    assert not found.arrived and "no red ball is here" in found.message and found.distance == -1.0
    assert simulator.distance_to_target() == float("inf") and not simulator.reached()
