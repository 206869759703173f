# SPDX-License-Identifier: Apache-2.0
"""The simulated robot's range finder and depth camera against the world's plan, and its faults by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from dsd_lab.robot.faults import FaultBoard
from dsd_ros.navigation.safety.causes import DepthView
from dsd_ros.navigation.safety.depth import DepthCorridor, Intrinsics
from dsd_ros.robot.sim.offscreen import Offscreen, import_mujoco
from dsd_ros.robot.sim.scene import CAMERA_AHEAD, build_mjcf
from dsd_ros.robot.sim.simulator import MAX_RANGE, RANGE_FIELD_OF_VIEW, Simulator
from dsd_ros.robot.sim.world import CAMERA_HEIGHT, CAMERA_PITCH, Furniture, Thing, World


def range_ahead(world: World, pose: tuple[float, float, float]) -> float:
    simulator = Simulator(world)
    simulator.pose = pose
    return simulator.range_ahead()


def room(*things: Thing, furniture: tuple[Furniture, ...] = ()) -> World:
    """A robot in the middle of a room, looking along x."""
    world = replace(World.from_seed(1), half_x=3.0, half_y=2.0, start=(0.0, 0.0, 0.0))
    return replace(world, things=things, furniture=furniture, target_index=0)


FAR = Thing("can", "red", -2.5, 1.5, 0.0)  # behind the robot


@pytest.fixture(scope="module")
def offscreen() -> Iterator[Offscreen]:
    """Making one takes far longer than drawing with it."""
    model = import_mujoco().MjModel.from_xml_string(build_mjcf(World.from_seed(0)))
    made = Offscreen(model)
    yield made
    made.close()


def corridor(simulator: Simulator) -> DepthCorridor:
    focal, width, height = simulator.focal_length, simulator.width, simulator.height
    camera = Intrinsics(focal, focal, width / 2, height / 2, width, height)
    return DepthCorridor(DepthView(), camera, 0.3)


def test_the_depth_view_is_that_of_the_simulated_camera():
    view = DepthView()
    assert view.camera_height == CAMERA_HEIGHT
    assert view.camera_pitch == pytest.approx(CAMERA_PITCH)


def test_the_range_finder_measures_the_plan():
    world = room(FAR)
    assert range_ahead(world, (0.0, 0.0, 0.0)) == pytest.approx(3.0 - CAMERA_AHEAD, rel=1e-3)
    assert range_ahead(world, (1.0, 0.0, math.pi / 2)) == pytest.approx(2.0 - CAMERA_AHEAD)
    assert range_ahead(world, (-2.9, 0.0, 0.0)) == math.inf and MAX_RANGE < 5.5
    assert range_ahead(world, (2.9, 0.0, 0.0)) == 0.0
    bottle = Thing("bottle", "red", 1.5, 0.0, 0.0)
    assert range_ahead(room(bottle), (0.0, 0.0, 0.0)) == pytest.approx(1.5 - 0.07 - CAMERA_AHEAD)
    aside = Thing("bottle", "red", 1.5, 1.5 * math.tan(RANGE_FIELD_OF_VIEW / 2) + 0.3, 0.0)
    assert range_ahead(room(aside), (0.0, 0.0, 0.0)) > 2.0
    cabinet = Furniture(1.5, 0.1, 0.2, 0.3, 1.0)
    assert range_ahead(room(FAR, furniture=(cabinet,)), (0.0, 0.0, 0.0)) == pytest.approx(1.3 - CAMERA_AHEAD)
    assert range_ahead(room(FAR, furniture=(cabinet,)), (0.0, 0.0, math.pi)) > 1.5


@pytest.mark.parametrize("kind", ["bottle", "can", "box", "ball", "chair"])
def test_the_depth_camera_sees_each_kind_of_thing_where_it_is(kind, offscreen):
    thing = Thing(kind, "red", 1.2, 0.0, 0.0)
    with Simulator(room(thing), offscreen=offscreen) as simulator:
        for x in (0.0, 0.3):
            simulator.pose = (x, 0.0, 0.0)
            _, depths = simulator.render_with_depth()
            truth = 1.2 - thing.radius - x - CAMERA_AHEAD
            found = corridor(simulator).nearest(depths)
            assert truth - 0.01 < found < truth + 0.13  # its surface is not everywhere on its circle


def test_the_depth_camera_sees_walls_and_no_floor(offscreen):
    with Simulator(room(FAR), offscreen=offscreen) as simulator:
        ways = []
        for x in (0.0, 1.0, 2.0, 2.55):
            simulator.pose = (x, 0.0, 0.0)
            picture, depths = simulator.render_with_depth()
            assert depths.dtype == np.float32 and np.array_equal(picture, simulator.render())
            ways.append(corridor(simulator).nearest(depths))
        assert ways == pytest.approx([3.0 - CAMERA_AHEAD - x for x in (0, 1, 2, 2.55)], abs=0.01)


def test_the_depth_camera_agrees_with_the_plan_in_seeded_worlds(offscreen):
    for seed in range(6):
        world = World.from_seed(seed)
        with Simulator(world, offscreen=offscreen) as simulator:
            _, depths = simulator.render_with_depth()
            found = corridor(simulator).nearest(depths)
            x, y, yaw = world.start
            assert found is not None
            # What is in the robot's way by the plan is seen, and what is seen is in its way.
            free = 0.0
            while free < 1.0 and world.clearance(x + free * math.cos(yaw), y + free * math.sin(yaw)) > 0.0:
                free += 0.01
            if free < 1.0:
                assert found < free + 0.25
            else:
                assert found > 0.9


def test_faults_by_name():
    board = FaultBoard({"camera": ("freeze",), "robot": ("freeze", "die")})
    assert board.set("camera freeze") == "" and board.set(" robot  die ") == ""
    assert (board.of("camera"), board.of("robot")) == ("freeze", "die")
    assert str(board) == "camera freeze, robot die"
    assert "say camera freeze|ok, robot freeze|die|ok or all ok" in board.set("camera die")
    for text in ("", "camera", "freeze", "all freeze", "x" * 500):
        complaint = board.set(text)
        assert "is no fault" in complaint and len(complaint) < 200
    assert board.set("camera ok") == "" and str(board) == "robot die"
    assert board.set("all ok") == "" and str(board) == ""
