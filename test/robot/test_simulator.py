# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dsd_ros.robot.sim.simulator import VX_MAX, WZ_MAX, Simulator
from dsd_ros.robot.sim.world import Thing, World


def facing(kind: str = "bottle", colour: str = "red", distance: float = 1.5) -> World:
    """A room with one thing straight ahead of the robot."""
    world = World.from_seed(1)
    thing = Thing(kind, colour, distance, 0.0, 0.0)
    return replace(world, things=(thing,), furniture=(), target_index=0, start=(0.0, 0.0, 0.0))


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    with Simulator(facing()) as made:
        yield made


def run(simulator: Simulator, seconds: float, vx: float, vy: float, wz: float) -> None:
    for _ in range(round(seconds / 0.02)):
        simulator.step(0.02, vx, vy, wz)


def test_the_base_follows_commands_within_its_limits(simulator: Simulator) -> None:
    simulator.step(0.1, 0.5, 0.0, 0.0)
    assert 0.0 < simulator.velocity[0] <= 0.5
    run(simulator, 1.0, 0.0, 0.0, math.radians(90))
    _x, y, yaw = simulator.pose
    assert yaw == pytest.approx(math.radians(90), abs=0.2) and abs(y) < 0.1
    simulator.step(2.0, 0.0, 0.0, 100.0)
    assert simulator.velocity[2] == pytest.approx(WZ_MAX)
    with pytest.raises(ValueError, match="finite"):
        simulator.step(0.1, float("nan"), 0.0, 0.0)
    assert VX_MAX == 3.8


def test_a_collision_blocks_and_counts_once_per_contact(simulator: Simulator) -> None:
    run(simulator, 6.0, 0.5, 0.0, 0.0)
    assert simulator.collisions == 1
    assert 0.0 <= simulator.distance_to_target() < 0.05
    assert simulator.pose[0] < 1.5 - 0.07 - 0.3 + 0.01
    assert not simulator.reached()
    run(simulator, 1.0, -0.5, 0.0, 0.0)
    assert simulator.pose[0] < 0.9
    run(simulator, 3.0, 0.5, 0.0, 0.0)
    assert simulator.collisions == 2


def test_walls_block(simulator: Simulator) -> None:
    run(simulator, 20.0, -1.0, 0.0, 0.0)
    assert simulator.collisions == 1
    assert simulator.pose[0] >= -simulator.world.half_x + 0.3 - 1e-6


def test_stopping_near_the_target_is_reaching_it(simulator: Simulator) -> None:
    run(simulator, 1.8, 0.5, 0.0, 0.0)
    assert not simulator.reached()  # still moving
    run(simulator, 0.6, 0.0, 0.0, 0.0)
    assert simulator.distance_to_target() < 0.6 and simulator.reached()


def test_the_camera_shows_the_target_in_its_colour_where_it_stands() -> None:
    for colour, channel in (("red", 0), ("green", 1), ("blue", 2)):
        with Simulator(facing("ball", colour)) as simulator:
            image = simulator.render()
            assert image.shape == (224, 336, 3) and image.dtype == np.uint8
            middle = image[:, 160:176].astype(int)
            others = [c for c in range(3) if c != channel]
            strong = (middle[..., channel] > 2 * middle[..., others].max(-1)).sum()
            assert strong > 100
            pixels = simulator.visible_pixels()
            assert pixels[0] > 300
            simulator.pose = (0.0, 0.0, math.pi)
            assert simulator.visible_pixels() == {}


def test_the_same_commands_give_the_same_pictures() -> None:
    pictures = []
    for _ in range(2):
        with Simulator(World.from_seed(5)) as simulator:
            run(simulator, 0.5, 0.4, 0.1, 0.5)
            pictures.append((simulator.pose, simulator.render()))
    assert pictures[0][0] == pictures[1][0]
    assert np.array_equal(pictures[0][1], pictures[1][1])
