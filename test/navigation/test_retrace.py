# SPDX-License-Identifier: Apache-2.0
"""The way back ends where the run began, follows the path, and takes a bounded number of actions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings, strategies as st

from dsd_ros.navigation.run.actions import ActionKind, all_actions
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.retrace import AIMED, REACHED_M, Path, Retrace, straightened
from dsd_ros.navigation.safety.guard import Trail

MOVES = [action for action in all_actions() if action.kind is not ActionKind.STOP]


class Walker:
    """A robot that carries out actions with a random error, and remembers its path."""

    def __init__(self, seed: int, distance_error: float, angle_error: float) -> None:
        self.chance = random.Random(seed)
        self.errors = distance_error, angle_error
        self.pose = Pose(1.0, -2.0, 0.7)
        self.seen = [self.pose]

    def carry_out(self, action) -> None:
        distance_error, angle_error = self.errors
        pose, parts = self.pose, 15
        way = action.metres * self.chance.gauss(1.0, distance_error)
        turn = action.radians + self.chance.gauss(0.0, angle_error)
        for _ in range(parts):
            yaw = pose.yaw + turn / parts
            x = pose.x + way / parts * math.cos(yaw)
            pose = Pose(x, pose.y + way / parts * math.sin(yaw), yaw)
            self.seen.append(pose)
        self.pose = pose


def walk(actions, seed: int, distance_error: float, angle_error: float):
    """Out and back; returns the walker, the path's start and how far back the path was left."""
    walker = Walker(seed, distance_error, angle_error)
    for action in actions:
        walker.carry_out(action)
    path, trail = Path(), Trail()
    for pose in walker.seen:
        path.add(pose)
        trail.add(pose.x, pose.y)
    walker.seen.clear()
    retrace, count = Retrace(path.points), 0
    while (action := retrace.next_action(walker.pose)) is not None:
        walker.carry_out(action)
        count += 1
    assert not retrace.exhausted
    assert all(trail.near(pose.x, pose.y) for pose in walker.seen)
    return walker, path.points[0], count


@given(
    actions=st.lists(st.sampled_from(MOVES), max_size=25),
    seed=st.integers(0, 2**16),
    distance_error=st.floats(0.0, 0.04),
    angle_error=st.floats(0.0, math.radians(1.5)),
)
@settings(max_examples=60)
def test_ends_where_it_began(actions, seed, distance_error, angle_error):
    walker, start, count = walk(actions, seed, distance_error, angle_error)
    assert math.hypot(walker.pose.x - start.x, walker.pose.y - start.y) <= REACHED_M + 0.05
    turned = math.remainder(walker.pose.yaw - start.yaw, math.tau)
    assert abs(turned) <= AIMED
    assert count <= 5 * len(actions) + 12


def test_a_straight_way_takes_few_actions():
    forward = next(a for a in MOVES if a.metres == 0.75)
    walker, start, count = walk([forward] * 4, 0, 0.0, 0.0)
    assert count == 4 + 4 + 4  # turn round, drive, turn round
    assert math.hypot(walker.pose.x - start.x, walker.pose.y - start.y) < 0.01


def test_without_a_way_there_is_nothing_to_do():
    assert Retrace([]).next_action(Pose(0.0, 0.0, 0.0)) is None
    here = Pose(0.3, 0.4, 1.0)
    assert Retrace([here]).next_action(here) is None


def test_a_robot_that_does_not_obey_is_given_up():
    retrace = Retrace([Pose(0.0, 0.0, 0.0), Pose(1.0, 0.0, 0.0)])
    count = 0
    while retrace.next_action(Pose(1.0, 0.0, 0.0)) is not None:
        count += 1
    assert retrace.exhausted and count < 60


def test_what_is_left_of_the_path_leads_from_the_start_to_the_robot():
    forward = next(a for a in MOVES if a.metres == 0.75)
    left = next(a for a in MOVES if a.kind is ActionKind.TURN_LEFT and a.amount == 45)
    walker = Walker(3, 0.0, 0.0)
    path = Path()
    for action in [forward, left, left, forward]:
        walker.carry_out(action)
    for pose in walker.seen:
        path.add(pose)
    retrace = Retrace(path.points)
    for _ in range(5):  # turn round, then back along the second drive
        walker.carry_out(retrace.next_action(walker.pose))
    retrace.next_action(walker.pose)
    left_over = retrace.remaining_path(walker.pose)
    assert left_over[0] == path.points[0] and left_over[-1] == walker.pose
    assert len(left_over) <= 3


def test_long_paths_become_few_corners():
    ahead = [Pose(0.05 * i, 0.001 * (-1) ** i, 0.0) for i in range(2000)]
    up = [Pose(100.0, 0.05 * i, math.pi / 2) for i in range(2000)]
    corners = straightened([*ahead, *up])
    assert len(corners) == 3 and math.hypot(corners[1].x - 100.0, corners[1].y) < 0.1


@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_paths_stay_as_they_are(count):
    poses = [Pose(float(i), 0.0, 0.0) for i in range(count)]
    assert straightened(poses) == poses
