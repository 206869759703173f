# SPDX-License-Identifier: Apache-2.0
"""The motion controller against a small planar robot with latency, limits and slip."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from dsd_ros.navigation.run.actions import Action, ActionKind, all_actions, format_action
from dsd_ros.navigation.run.controller import (
    AT_REST,
    STUCK_S,
    MotionController,
    MotionSettings,
    MotionStatus,
    Pose,
    Velocity,
    predict,
)

SETTINGS = MotionSettings()


class Rig:
    """A unicycle that follows commands ``latency`` samples late, scaled by ``slip``."""

    def __init__(self, pose: Pose, latency: int = 1, slip: float = 1.0, blocked: bool = False) -> None:
        self.pose = pose
        self.velocity = AT_REST
        self._queue = deque([AT_REST] * latency)
        self._slip = slip
        self._blocked = blocked

    def step(self, command: Velocity, dt: float) -> None:
        self._queue.append(command)
        applied = self._queue.popleft()
        gain = 0.0 if self._blocked else self._slip
        self.velocity = Velocity(applied.vx * gain, applied.wz * self._slip)
        x, y, yaw = self.pose.x, self.pose.y, self.pose.yaw
        x += self.velocity.vx * math.cos(yaw) * dt
        y += self.velocity.vx * math.sin(yaw) * dt
        yaw = math.remainder(yaw + self.velocity.wz * dt, math.tau)
        self.pose = Pose(x, y, yaw)


def drive(action: Action, rig: Rig, dt: float = 0.02, settings: MotionSettings = SETTINGS):
    """Run one action; returns the controller and the commands."""
    controller = MotionController(action, settings, rig.pose, 0.0)
    commands, now = [], 0.0
    while not controller.finished:
        now += dt
        command = controller.update(rig.pose, rig.velocity, now)
        commands.append(command)
        rig.step(command, dt)
        assert now < 30.0, "the action does not end"
    return controller, commands


@settings(max_examples=60)
@given(st.sampled_from(all_actions()), st.floats(-math.pi, math.pi), st.integers(0, 3), st.floats(0.8, 1.1))
def test_an_action_ends_where_it_should_and_at_rest(action, yaw, latency, slip):
    rig = Rig(Pose(1.0, -2.0, yaw), latency, slip)
    controller, commands = drive(action, rig)
    assert controller.status is MotionStatus.DONE
    assert rig.velocity == AT_REST and commands[-1] == AT_REST
    dx, dy = rig.pose.x - 1.0, rig.pose.y + 2.0
    assert math.hypot(dx, dy) == pytest.approx(action.metres, abs=0.03)
    turned = math.remainder(rig.pose.yaw - yaw, math.tau)
    assert turned == pytest.approx(action.radians, abs=math.radians(2.5))


@pytest.mark.parametrize("action", all_actions(), ids=format_action)
def test_speed_and_acceleration_keep_their_limits(action):
    _, commands = drive(action, Rig(Pose(0, 0, 0)))
    dt = 0.02
    turn_limit = SETTINGS.turn_rate
    before = AT_REST
    for command in commands:
        assert 0.0 <= command.vx <= SETTINGS.speed + 1e-9
        assert abs(command.wz) <= turn_limit + 1e-9
        assert command.vx - before.vx <= SETTINGS.acceleration * dt + 1e-9
        before = command
    if action.amount == 75:
        assert max(command.vx for command in commands) == pytest.approx(0.5)
    if action.kind is ActionKind.TURN_LEFT and action.amount == 45:
        assert max(command.wz for command in commands) == pytest.approx(turn_limit)


def test_a_blocked_drive_is_stuck_and_commands_zero():
    controller, commands = drive(Action(ActionKind.FORWARD, 50), Rig(Pose(0, 0, 0), blocked=True))
    assert controller.status is MotionStatus.STUCK
    assert commands[-1] == AT_REST
    assert len(commands) * 0.02 < STUCK_S + 1.0


def test_stop_waits_for_rest():
    controller = MotionController(Action(ActionKind.STOP), SETTINGS, Pose(0, 0, 0), 0.0)
    moving, now = Velocity(0.3, 0.0), 0.0
    for _ in range(20):
        now += 0.02
        assert controller.update(Pose(0, 0, 0), moving, now) == AT_REST
    assert not controller.finished
    for _ in range(8):
        now += 0.02
        controller.update(Pose(0, 0, 0), AT_REST, now)
    assert controller.status is MotionStatus.DONE


def test_a_robot_that_never_rests_is_stuck_not_done():
    controller = MotionController(Action(ActionKind.STOP), SETTINGS, Pose(0, 0, 0), 0.0)
    for tick in range(1, 300):
        controller.update(Pose(0, 0, 0), Velocity(0.3, 0.0), tick * 0.02)
    assert controller.status is MotionStatus.STUCK


def test_a_turn_across_the_seam_of_the_yaw_angle():
    rig = Rig(Pose(0, 0, math.pi - 0.1))
    drive(Action(ActionKind.TURN_LEFT, 45), rig)
    turned = math.remainder(rig.pose.yaw - (math.pi - 0.1), math.tau)
    assert turned == pytest.approx(math.radians(45), abs=math.radians(2))


def test_a_drive_holds_its_heading_against_a_push():
    rig = Rig(Pose(0, 0, 0))
    controller = MotionController(Action(ActionKind.FORWARD, 75), SETTINGS, rig.pose, 0.0)
    now, pushed = 0.0, False
    while not controller.finished:
        now += 0.02
        rig.step(controller.update(rig.pose, rig.velocity, now), 0.02)
        if not pushed and controller.progress > 0.2:
            rig.pose, pushed = Pose(rig.pose.x, rig.pose.y, 0.3), True
    assert abs(rig.pose.yaw) < 0.12


def test_time_that_stands_still_or_runs_back_does_not_speed_the_robot_up():
    controller = MotionController(Action(ActionKind.FORWARD, 75), SETTINGS, Pose(0, 0, 0), 10.0)
    first = controller.update(Pose(0, 0, 0), AT_REST, 10.02)
    for now in (10.02, 9.0, 10.0):
        assert controller.update(Pose(0, 0, 0), AT_REST, now).vx == pytest.approx(first.vx)


def test_prediction_follows_the_arc():
    quarter = predict(Pose(1.0, 1.0, 0.0), Velocity(math.pi / 2, math.pi / 2), 0.001)
    assert quarter.x == pytest.approx(1.0 + math.pi / 2 * 0.001, rel=1e-6)
    rig = Pose(0.0, 0.0, 0.0)
    for _ in range(1000):
        rig = predict(rig, Velocity(math.pi / 2, math.pi / 2), 0.001)
    assert (rig.x, rig.y, rig.yaw) == pytest.approx((1.0, 1.0, math.pi / 2), abs=1e-3)
    assert predict(rig, AT_REST, 5.0) == rig
