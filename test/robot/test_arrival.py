from __future__ import annotations

from dataclasses import replace

import pytest

from dsd_ros.robot.arrival import check_arrival
from dsd_ros.robot.simulator import Simulator
from dsd_ros.robot.world import Thing, World


@pytest.fixture
def simulator() -> Simulator:
    """A room with a red bottle 1.5 m ahead of the robot."""
    thing = Thing("bottle", "red", 1.5, 0.0, 0.0)
    world = replace(
        World.from_seed(1), things=(thing,), furniture=(), target_index=0, start=(0.0, 0.0, 0.0)
    )
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
