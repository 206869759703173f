# SPDX-License-Identifier: Apache-2.0
"""A point of the picture: where it is, that the robot gets there by itself or by Nav2, and what the guard allows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from run_bench import SETTINGS, Bench, DelegatedBench

from dsd_ros.navigation.run.actions import PRESETS, Action, ActionKind
from dsd_ros.navigation.run.controller import MotionSettings, Pose, Velocity
from dsd_ros.navigation.run.points import STANDOFF_M, PointUnknown, goal_from, locate, moved
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.run.settings import PointSettings, RunOutcome
from dsd_ros.navigation.safety.causes import Motion, SafetyLimits
from dsd_ros.navigation.safety.depth import Intrinsics
from dsd_ros.navigation.safety.guard import ActionGuard

GRAMMAR = PRESETS["internvla-n1"]
CAMERA = Intrinsics(300.0, 300.0, 319.5, 239.5, 640, 480)
MOUNTED = PointSettings(camera_height=0.4, camera_pitch=0.3, camera_ahead=0.3)
PICTURE = (640, 480)
LIMITS = SafetyLimits(action_distance=3.0)


def pixel(ahead: float, left: float, up: float = 0.0) -> tuple[float, float, float]:
    """Where the camera shows a place of the robot's frame: column, row and depth, by the definition of a pinhole."""
    forward, down = ahead - MOUNTED.camera_ahead, MOUNTED.camera_height - up
    c, s = math.cos(MOUNTED.camera_pitch), math.sin(MOUNTED.camera_pitch)
    depth = c * forward + s * down
    return CAMERA.cx - CAMERA.fx * left / depth, CAMERA.cy + CAMERA.fy * (c * down - s * forward) / depth, depth


@given(st.floats(0.9, 3.0), st.floats(-0.5, 0.5))
def test_a_point_on_the_floor_is_found_by_the_ray_through_it(ahead, left):
    column, row, _ = pixel(ahead, left)
    distance, angle = locate((round(column), round(row)), PICTURE, CAMERA, MOUNTED)
    assert distance == pytest.approx(math.hypot(ahead, left), rel=0.05)
    assert angle == pytest.approx(math.atan2(left, ahead), abs=0.01)


def test_a_point_counts_in_the_grammars_picture_whatever_the_cameras():
    column, row, _ = pixel(1.5, 0.3)
    small = (round(column / 640 * 100), round(row / 480 * 100))
    assert locate(small, (100, 100), CAMERA, MOUNTED) == pytest.approx(
        (math.hypot(1.5, 0.3), math.atan2(0.3, 1.5)), 0.1
    )


def test_depth_comes_before_the_floor_and_the_floor_where_it_is_unknown():
    column, row, depth = pixel(2.0, 0.2, up=0.5)
    depths = np.full((120, 160), np.nan, np.float32)  # coarser than the picture
    point = (round(column), round(row))
    at = slice(int(row / 4) - 1, int(row / 4) + 2), slice(int(column / 4) - 1, int(column / 4) + 2)
    depths[at] = depth
    found = locate(point, PICTURE, CAMERA, MOUNTED, depths)
    # It is on a thing, before which the robot stops.
    assert found == pytest.approx((math.hypot(2.0, 0.2) - STANDOFF_M, math.atan2(0.2, 2.0)), abs=0.02)
    with pytest.raises(PointUnknown, match=r"on something 0\.5 m away, before which the robot stands\.$"):
        locate((320, 10), PICTURE, CAMERA, MOUNTED, np.full((120, 160), 0.2, np.float32))
    column, row, _ = pixel(1.5, -0.2)
    point = (round(column), round(row))
    assert locate(point, PICTURE, CAMERA, MOUNTED, depths) == locate(point, PICTURE, CAMERA, MOUNTED)


def test_a_point_whose_place_is_not_known_is_refused_by_a_sentence():
    nothing = np.zeros((480, 640), np.float32)
    with pytest.raises(PointUnknown, match=r"\(320, 10\) is above the horizon, and its depth is not known\.$"):
        locate((320, 10), PICTURE, CAMERA, MOUNTED, nothing)
    with pytest.raises(PointUnknown, match=r"is .* m away, and at most 5 m are possible\.$"):
        locate((320, 152), PICTURE, CAMERA, MOUNTED)
    with pytest.raises(PointUnknown, match="no focal length"):
        locate((320, 400), PICTURE, Intrinsics(0.0, 0.0, 0.0, 0.0, 0, 0), MOUNTED)


@given(st.floats(-2, 2), st.floats(-3, 3), st.floats(0.1, 3), st.floats(-3, 3))
def test_a_goal_is_seen_from_where_the_robot_is(x, yaw, distance, angle):
    pose = Pose(x, -x, yaw)
    assert goal_from(pose, moved(pose, (distance, angle))) == pytest.approx((distance, angle), abs=1e-6)


def with_goal(bench: Bench, goal: tuple[float, float] | str, executor=None) -> Bench:
    def found(point, picture, stamp):
        assert (point, picture) == ((320, 330), PICTURE)
        if isinstance(goal, str):
            raise PointUnknown(goal)
        return goal

    bench.run = NavigationRun(SETTINGS, MotionSettings(), bench.moment, executor, GRAMMAR, found)
    return bench


@pytest.mark.parametrize("angle", [0.0, 0.4, -0.7])
def test_the_robot_turns_to_a_point_and_drives_there(angle):
    bench = with_goal(Bench(lag=0.5), (1.2, angle))
    bench.answer("320 330")
    action = bench.announcements[-1].action
    assert (action.kind, action.metres, action.radians) == (ActionKind.GO_TO, 1.2, angle)
    guard = ActionGuard(LIMITS, "stop")
    guard.announce(action, True, 1050.0, 1050.0, 50.0)

    def watched():
        guard.pose(bench.pose)
        guard.judge(Motion(bench.command.vx, 0.0, bench.command.wz), 55.0)
        assert guard.refusal is None, guard.refusal
        return len(bench.asked) > 1

    bench.until(watched)
    assert (bench.pose.x, bench.pose.y) == pytest.approx((1.2 * math.cos(angle), 1.2 * math.sin(angle)), abs=0.04)
    bench.answer("STOP")
    assert bench.finish() is RunOutcome.ARRIVED and bench.run.distance == pytest.approx(1.2, abs=0.05)


def test_a_point_after_other_actions_stays_where_the_picture_showed_it():
    bench = with_goal(Bench(), (1.2, 0.0))
    bench.answer("↑→320 330")
    bench.until(lambda: len(bench.announcements) == 3)
    action = bench.announcements[-1].action
    assert action.metres == pytest.approx(0.95, abs=0.03) and action.radians == pytest.approx(
        math.radians(15), abs=0.04
    )
    bench.answer("STOP")
    assert bench.finish() is RunOutcome.ARRIVED and bench.pose.x == pytest.approx(1.2, abs=0.04)


def test_a_point_that_is_nowhere_ends_the_run_before_anything_moves():
    bench = with_goal(Bench(), "the point (320, 330) is above the horizon, and its depth is not known.")
    bench.answer("↑320 330")
    assert bench.run.outcome is RunOutcome.UNPARSABLE_REPLY and not bench.announcements
    assert bench.run.sentence.startswith("The robot stays where it is: the point (320, 330) is above the horizon")
    bench = Bench(grammar=GRAMMAR)
    bench.answer("320 330")
    assert bench.run.outcome is RunOutcome.UNPARSABLE_REPLY


class Nav2Bench(DelegatedBench):
    """A navigator that drives straight to a goal's place, as navigate_to_pose may."""

    def __init__(self, goal: tuple[float, float]) -> None:
        super().__init__()
        with_goal(self, goal, self.executor)

    def drive(self, speed):
        target, here = self.goals[-1].target, self.pose
        heading = math.atan2(target.y - here.y, target.x - here.x)
        self.pose = Pose(here.x, here.y, heading)
        self.command, self.blocked = Velocity(abs(speed), 0.0), False
        Bench._move(self)


def test_a_point_becomes_a_goal_of_navigate_to_pose():
    bench = Nav2Bench((1.2, 0.5))
    bench.answer("320 330")
    bench.answer("STOP")
    assert bench.finish() is RunOutcome.ARRIVED
    (goal,) = bench.goals
    assert goal.server("drive_on_heading") == "navigate_to_pose"
    place = (1.2 * math.cos(0.5), 1.2 * math.sin(0.5), 0.5)
    assert (goal.target.x, goal.target.y, goal.target.yaw) == pytest.approx(place)
    assert (bench.pose.x, bench.pose.y) == pytest.approx(place[:2], abs=0.02)


def test_the_guard_bounds_a_motion_by_the_goal():
    goal = Action(ActionKind.GO_TO, grammar=GRAMMAR, goal=(1.0, 0.5))

    def judged(pose: Pose, motion: Motion, action: Action = goal) -> str:
        guard = ActionGuard(LIMITS, "stop")
        guard.pose(Pose(0.0, 0.0, 0.0))
        guard.announce(action, True, 1050.0, 1050.0, 50.0)
        guard.pose(pose)
        guard.judge(motion, 51.0)
        return "" if guard.refusal is None else guard.refusal[1]

    there = moved(Pose(0.0, 0.0, 0.0), (1.0, 0.5))
    for pose in (Pose(0.0, 0.0, 0.5), Pose(there.x / 2, there.y / 2, 0.5), there, Pose(0.6, 0.0, 0.9)):
        assert not judged(pose, Motion(0.4, 0.0, 0.3))
    assert "does not allow this motion: the robot has got 1.50 m away" in judged(Pose(1.5, 0.0, 0.0), Motion(0.4))
    assert "from its goal, further than before" in judged(Pose(-0.5, 0.0, 0.0), Motion(0.4))
    assert "backwards" in judged(Pose(0.0, 0.0, 0.0), Motion(-0.2))
    assert "sideways" in judged(Pose(0.0, 0.0, 0.0), Motion(0.0, 0.2))
    too_far = Action(ActionKind.GO_TO, grammar=GRAMMAR, goal=(3.5, 0.0))
    assert "limit.action_distance" in judged(Pose(0.0, 0.0, 0.0), Motion(0.4), too_far)
    too_wide = Action(ActionKind.GO_TO, grammar=GRAMMAR, goal=(1.0, 1.2))
    assert "limit.action_angle" in judged(Pose(0.0, 0.0, 0.0), Motion(0.4), too_wide)


def test_an_obstacle_holds_the_way_to_a_point_but_not_the_turn():
    guard = ActionGuard(LIMITS, "stop")
    guard.announce(Action(ActionKind.GO_TO, grammar=GRAMMAR, goal=(1.0, 0.5)), True, 1050.0, 1050.0, 50.0)
    guard.commanded(Motion(wz=0.4), False, 50.1)
    assert not guard.drives_ahead
    guard.commanded(Motion(0.4), False, 50.2)
    guard.commanded(Motion(), True, 50.3)
    assert guard.drives_ahead
    guard.announce(Action(ActionKind.GO_TO, grammar=GRAMMAR, goal=(1.0, 0.5)), True, 1051.0, 1051.0, 51.0)
    assert not guard.drives_ahead and guard.refusal is None
