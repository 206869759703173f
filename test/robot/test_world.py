# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from dsd_ros.robot.sim.world import COLOURS, KINDS, ROBOT_RADIUS, Goal, World, named_goal


def test_the_same_seed_gives_the_same_world_and_another_seed_another() -> None:
    assert World.from_seed(7) == World.from_seed(7)
    assert World.from_seed(7) != World.from_seed(8)


def test_the_default_instruction_names_the_target() -> None:
    for seed in range(20):
        world = World.from_seed(seed)
        assert world.instruction == f"find the {world.target.name}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("colour", COLOURS)
def test_any_named_thing_can_be_the_target(kind: str, colour: str) -> None:
    world = World.from_seed(3, f"please walk to the {colour.upper()} {kind}, now")
    assert (world.target.kind, world.target.colour) == (kind, colour)
    assert world.instruction.startswith("please walk")


def test_an_instruction_that_names_nothing_is_refused_with_what_can_be_named() -> None:
    with pytest.raises(ValueError, match="purple cow.*silver.*bottle"):
        World.from_seed(0, "find the purple cow")
    with pytest.raises(ValueError, match="must not be negative"):
        World.from_seed(-1)
    assert named_goal("the silver  bottle") == Goal("bottle", "silver")


def test_worlds_have_look_alikes_one_target_and_a_free_way() -> None:
    alike_kind = alike_colour = 0
    for seed in range(60):
        world = World.from_seed(seed)
        names = [thing.name for thing in world.things]
        assert names.count(world.target.name) == 1
        assert len(set(names)) == len(names)
        others = [t for t in world.things if t != world.target]
        alike_kind += any(t.kind == world.target.kind for t in others)
        alike_colour += any(t.colour == world.target.colour for t in others)
        x, y, _ = world.start
        assert world.clearance(x, y) > 0
        distance = math.hypot(world.target.x - x, world.target.y - y)
        stop = distance - world.target.radius - ROBOT_RADIUS - 0.1
        for k in range(20):
            s = stop * k / 19 / distance
            on_x, on_y = x + s * (world.target.x - x), y + s * (world.target.y - y)
            assert world.clearance(on_x, on_y) > 0
    assert alike_kind > 40 and alike_colour > 40
