# SPDX-License-Identifier: Apache-2.0
"""The supervisor's decisions: every cause, arbitration, and what holds for any sequence of events."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields

import pytest
from announced import announced
from hypothesis import settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsd_ros.navigation.run.actions import ActionKind
from dsd_ros.navigation.run.controller import MotionSettings, Pose
from dsd_ros.navigation.safety.causes import (
    BINDS_OPERATOR,
    STILL,
    Cause,
    Motion,
    Requirements,
    SafetyLimits,
    Source,
    Timeouts,
    approach_speed,
    nearest_ahead,
    range_reading,
    tilt_of,
)
from dsd_ros.navigation.safety.supervisor import SafetyDecision, Supervisor
from dsd_ros.paths import share_directory

REQUIRED = Requirements(deadman=True, obstacle="range", heartbeats="draft_node", link="draft_node")
AHEAD, LEFT = Motion(0.4), Motion(wz=0.4)
STEP = 0.02
CLOCK = 1000.0  # the stamps' clock is this far ahead of the steady one


class World:
    """Everything that speaks to a supervisor, each part of which can be silenced."""

    def __init__(self, required: Requirements = REQUIRED, timeouts: Timeouts | None = None) -> None:
        self.supervisor = Supervisor(timeouts or Timeouts(), SafetyLimits(), required)
        self.supervisor.on_report("draft_node", "")
        self.now = 50.0
        self.pose = Pose(0.0, 0.0, 0.0)
        self.tilt: float | None = 0.0
        self.distance: float | None = math.inf
        self.command: Motion | None = None
        self.joystick: Motion | None = None
        self.held: bool | None = True
        self.silent: set[str] = set()
        self.decision = self.supervisor.decide(self.now)
        self.step(2)

    @property
    def causes(self) -> list[Cause]:
        return [cause for cause, _ in self.decision.causes]

    def act(
        self, kind: ActionKind | None = ActionKind.FORWARD, amount: int = 50, verified: bool = True, age: float = 0.2
    ) -> None:
        stamp = self.now + CLOCK
        self.supervisor.on_action(announced(kind, amount), verified, stamp - age, stamp, self.now)
        self.step()

    def step(self, times: int = 1) -> SafetyDecision:
        for _ in range(times):
            self.now += STEP
            self._speak()
            self.decision = self.supervisor.decide(self.now)
        return self.decision

    def _speak(self) -> None:
        supervisor, now, stamp = self.supervisor, self.now, self.now + CLOCK
        if "odometry" not in self.silent:
            supervisor.on_odometry(self.pose, stamp, now)
        if "imu" not in self.silent:
            supervisor.on_tilt(self.tilt, stamp, now)
        if "camera" not in self.silent:
            supervisor.on_picture(stamp, now)
        if "range" not in self.silent:
            supervisor.on_distance(self.distance, now)
        if "heartbeat" not in self.silent:
            supervisor.on_heartbeat("draft_node", now)
        if self.held is not None:
            supervisor.on_deadman(self.held, now)
        if self.command is not None:
            supervisor.on_navigation(self.command, now)
        if self.joystick is not None:
            supervisor.on_operator(self.joystick, now)

    def driving(self) -> World:
        self.command = AHEAD
        self.act()
        assert self.step().motion == AHEAD and not self.causes
        return self


def test_a_robot_may_be_trusted_for_longer_between_two_reports_of_its_state():
    world = World(timeouts=Timeouts(state_s=1.0)).driving()
    world.silent = {"odometry", "imu"}
    world.step(round(0.9 / STEP))
    assert world.decision.motion == AHEAD and not world.causes
    world.step(round(0.2 / STEP))
    assert world.decision.motion == STILL and {Cause.ODOMETRY_STALE, Cause.STATE_STALE} <= set(world.causes)


def test_nothing_moves_before_everything_has_been_heard():
    supervisor = Supervisor(required=REQUIRED)
    supervisor.on_navigation(AHEAD, 1.0)
    decision = supervisor.decide(1.0)
    assert decision.motion == STILL and decision.stopped
    assert {cause for cause, _ in decision.causes} == {
        Cause.DEADMAN, Cause.ODOMETRY_STALE, Cause.STATE_STALE, Cause.CAMERA_STALE,
        Cause.OBSTACLE_SENSOR_STALE, Cause.NODE_SILENT, Cause.LINK_LOST, Cause.NO_ACTION,
    }  # fmt: skip


def test_a_verified_action_moves_the_robot_and_is_over_with_it():
    world = World().driving()
    assert world.decision.source is Source.NAVIGATION and not world.decision.stopped
    world.command = STILL
    world.step(130)  # as long as a busy navigation node may take to notice that nothing holds it
    world.command = AHEAD
    assert world.step().motion == AHEAD
    world.command = STILL
    world.step(160)
    world.command = AHEAD
    assert world.step().motion == STILL
    assert world.causes == [Cause.NO_ACTION]
    world.act()
    assert world.step().motion == AHEAD


def silence(what: str) -> Callable[[World], None]:
    return lambda world: world.silent.add(what)


def setting(**values: object) -> Callable[[World], None]:
    return lambda world: [setattr(world, name, value) for name, value in values.items()] and None


# What goes wrong, the cause it must give, and what puts it right (None: another action does).
TROUBLES: dict[str, tuple[Callable[[World], object], Cause, Callable[[World], object] | None]] = {
    "odometry": (silence("odometry"), Cause.ODOMETRY_STALE, lambda w: w.silent.clear()),
    "imu": (silence("imu"), Cause.STATE_STALE, lambda w: w.silent.clear()),
    "camera": (silence("camera"), Cause.CAMERA_STALE, lambda w: w.silent.clear()),
    "range": (silence("range"), Cause.OBSTACLE_SENSOR_STALE, lambda w: w.silent.clear()),
    "blind range": (setting(distance=None), Cause.OBSTACLE_SENSOR_STALE, setting(distance=2.0)),
    "heartbeat": (silence("heartbeat"), Cause.NODE_SILENT, lambda w: w.silent.clear()),
    "pose not a number": (
        setting(pose=Pose(math.nan, 0, 0)), Cause.ODOMETRY_STALE, setting(pose=Pose(0, 0, 0))
    ),
    "imu that does not know": (setting(tilt=None), Cause.STATE_STALE, setting(tilt=0.0)),
    "tilt": (setting(tilt=0.6), Cause.TILT, setting(tilt=0.1)),
    "obstacle": (setting(distance=0.1), Cause.OBSTACLE, setting(distance=1.0)),
    "deadman": (setting(held=False), Cause.DEADMAN, setting(held=True)),
    "deadman gone": (setting(held=None), Cause.DEADMAN, setting(held=True)),
    "battery": (
        lambda w: w.supervisor.on_battery(0.1), Cause.LOW_BATTERY,
        lambda w: w.supervisor.on_battery(0.9),
    ),
    "link": (
        lambda w: w.supervisor.on_report("draft_node", "link lost"), Cause.LINK_LOST,
        lambda w: w.supervisor.on_report("draft_node", ""),
    ),
    "robot": (
        lambda w: w.supervisor.on_report("go2_node", "it has fallen."), Cause.ROBOT_FAULT,
        lambda w: w.supervisor.on_report("go2_node", ""),
    ),
    "command": (setting(command=None), Cause.COMMAND_STALE, setting(command=AHEAD)),
    "command not a number": (
        setting(command=Motion(math.nan)), Cause.COMMAND_STALE, setting(command=AHEAD)
    ),
    "unverified": (lambda w: w.act(verified=False), Cause.UNVERIFIED_ACTION, None),
    "unknown kind": (lambda w: w.act(kind=None), Cause.UNPARSABLE_ACTION, None),
    "unknown amount": (lambda w: w.act(amount=60), Cause.UNPARSABLE_ACTION, None),
    "old picture": (lambda w: w.act(age=6.0), Cause.STALE_REPLY, None),
    "picture of the future": (lambda w: w.act(age=-2.0), Cause.STALE_REPLY, None),
    "picture acted upon before": (lambda w: w.act(age=0.5), Cause.STALE_REPLY, None),
    "too fast": (setting(command=Motion(0.6)), Cause.MOTION_REFUSED, None),
    "turning too fast": (setting(command=Motion(0.3, 0, 0.7)), Cause.MOTION_REFUSED, None),
    "sideways": (setting(command=Motion(0.3, 0.2)), Cause.MOTION_REFUSED, None),
    "backwards": (setting(command=Motion(-0.3)), Cause.MOTION_REFUSED, None),
    "beyond the action": (setting(pose=Pose(0.9, 0.0, 0.0)), Cause.MOTION_REFUSED, None),
    "turned away": (setting(pose=Pose(0.1, 0.0, 0.5)), Cause.MOTION_REFUSED, None),
    "stop": (lambda w: w.act(ActionKind.STOP, 0), Cause.MOTION_REFUSED, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_stops_within_half_a_second_by_its_name(name):
    break_it, cause, mend = TROUBLES[name]
    world = World().driving()
    began = world.now
    break_it(world)
    while cause not in world.causes:
        world.step()
        assert world.now - began < 0.5
    assert world.decision.motion == STILL
    assert all(sentence.endswith(".") for _, sentence in world.decision.causes)
    if mend is not None:
        mend(world)
        world.step(2)
    else:
        world.pose = Pose(0.0, 0.0, 0.0)
        world.step()
        world.command = AHEAD
        world.act(age=0.0)
        world.step()
    assert world.causes == [] and world.decision.motion == AHEAD


@pytest.mark.parametrize(
    ("kind", "motion", "pose"),
    [
        (ActionKind.TURN_LEFT, Motion(wz=-0.3), None),
        (ActionKind.TURN_RIGHT, Motion(wz=0.3), None),
        (ActionKind.TURN_LEFT, Motion(0.3, 0.0, 0.3), None),
        (ActionKind.TURN_LEFT, LEFT, Pose(0.0, 0.0, math.radians(51))),
        (ActionKind.TURN_LEFT, LEFT, Pose(0.4, 0.0, 0.0)),
    ],
)
def test_a_turn_allows_only_its_own_motion(kind, motion, pose):
    world = World()
    world.act(kind, 30)
    world.command = Motion(wz=math.copysign(0.4, 1 if kind is ActionKind.TURN_LEFT else -1))
    assert world.step().motion.moving
    world.command = motion
    world.pose = pose or world.pose
    world.step(2)
    assert world.causes == [Cause.MOTION_REFUSED] and world.decision.motion == STILL


def test_an_obstacle_does_not_keep_the_robot_from_turning_away():
    world = World()
    world.distance = 0.1
    world.command = LEFT
    world.act(ActionKind.TURN_LEFT, 30)
    assert world.step().motion == LEFT and world.causes == []


def test_towards_an_obstacle_the_robot_slows_down():
    limits = SafetyLimits()
    world = World()
    x = 0.9  # of a wall; the robot obeys 0.2 s late
    world.act(amount=75)
    commands: list[float] = []
    for _ in range(400):
        world.command = AHEAD
        world.distance = x - world.pose.x
        world.step()
        commands.append(world.decision.motion.vx)
        late = commands[-10] if len(commands) >= 10 else 0.0
        world.pose = Pose(world.pose.x + late * STEP, 0.0, 0.0)
    assert commands[5] == AHEAD.vx
    assert 0.05 in commands and commands[-1] == 0.0 and Cause.OBSTACLE in world.causes
    assert limits.obstacle_distance - 0.02 < x - world.pose.x < limits.obstacle_distance
    slowing = [speed for speed in commands if speed]
    assert slowing == sorted(slowing, reverse=True)


@pytest.mark.parametrize("speed", [0.05, 0.2, 0.5, 1.0])
def test_approaching_leaves_room_to_react_and_to_brake(speed):
    limits = SafetyLimits()
    needed = limits.obstacle_distance + 0.2 * speed + speed**2 / (2 * 0.8)
    assert approach_speed(needed, limits) == pytest.approx(speed)
    assert approach_speed(0.0, limits) == approach_speed(-math.inf, limits) == 0.05
    assert approach_speed(math.inf, limits) == math.inf


def test_frozen_stamps_are_no_news():
    world = World().driving()
    stamp = world.now + CLOCK
    world.silent = {"odometry", "camera", "imu"}
    for _ in range(25):
        world.step()
        world.supervisor.on_odometry(Pose(0, 0, 0), stamp, world.now)
        world.supervisor.on_picture(stamp, world.now)
        world.supervisor.on_tilt(0.0, stamp, world.now)
    assert {Cause.ODOMETRY_STALE, Cause.CAMERA_STALE, Cause.STATE_STALE} <= set(world.causes)


def test_what_queued_up_while_the_supervisor_was_frozen_is_not_fresh():
    world = World().driving()
    world.now += 3.0
    supervisor = world.supervisor
    supervisor.on_navigation(AHEAD, world.now)  # sent seconds ago
    assert supervisor.decide(world.now).motion == STILL
    assert Cause.COMMAND_STALE in [cause for cause, _ in supervisor.decide(world.now).causes]
    world.step(10)
    assert world.decision.motion == AHEAD


def test_the_operator_wins_and_the_action_is_over_after_it():
    world = World().driving()
    world.joystick = Motion(-0.2, 0.1, 0.3)
    assert world.step().motion == world.joystick and world.decision.source is Source.OPERATOR
    assert world.causes == [Cause.OPERATOR] and not world.decision.stopped
    world.joystick = STILL  # holding still is a command, too
    assert world.step().motion == STILL and world.decision.source is Source.OPERATOR
    world.silent = {"camera", "odometry", "heartbeat"}
    world.joystick = Motion(9.0, 0.0, -9.0)
    world.step(30)
    assert world.decision.motion.vx == pytest.approx(1.0)
    assert world.decision.motion.wz == pytest.approx(-math.radians(60))
    world.silent, world.joystick = set(), None
    world.step(30)
    assert world.decision.source is Source.NAVIGATION
    assert world.causes == [Cause.NO_ACTION] and world.decision.motion == STILL


def test_a_resting_joystick_gives_the_robot_back_where_that_is_set():
    world = World(timeouts=Timeouts(release_s=1.0))
    world.joystick = STILL  # it repeats zero from the start
    world.driving()
    world.joystick = Motion(0.2)
    assert world.step().source is Source.OPERATOR
    world.joystick = STILL
    world.step(40)
    assert world.decision.source is Source.OPERATOR and world.decision.motion == STILL
    world.step(40)
    assert world.decision.source is Source.NAVIGATION and world.causes == [Cause.NO_ACTION]


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (lambda w: w.supervisor.on_emergency_stop("a test", w.now), Cause.EMERGENCY_STOP),
        (setting(held=False), Cause.DEADMAN),
        (setting(tilt=1.0), Cause.TILT),
    ],
)
def test_some_causes_stop_the_operator_too(trouble, cause):
    world = World()
    world.joystick = AHEAD
    assert world.step().motion == AHEAD
    trouble(world)
    world.step()
    assert world.decision.motion == STILL and world.decision.stopped and cause in world.causes


def test_an_emergency_stop_stays_until_it_is_reset():
    world = World().driving()
    world.supervisor.on_emergency_stop("the button", world.now)
    world.step(200)
    assert world.causes[0] is Cause.EMERGENCY_STOP and world.decision.speaking
    assert "the button" in world.decision.causes[0][1]
    assert world.supervisor.reset() and not world.supervisor.reset()
    world.step()
    assert world.decision.motion == STILL  # lifting it does not set the robot going
    world.act(age=0.0)
    assert world.step().motion == AHEAD


def test_it_falls_silent_after_the_last_command():
    world = World().driving()
    world.command = None
    assert world.step(25).speaking and world.decision.motion == STILL
    assert not world.step(60).speaking


def test_limits_are_those_of_the_navigation_nodes_motion():
    limits, motion = SafetyLimits(), MotionSettings()
    assert (limits.speed, limits.turn_rate) == (motion.speed, motion.turn_rate)


def test_tilt_of_quaternions():
    half = math.radians(30) / 2
    assert tilt_of(0, 0, 0, 1) == pytest.approx(0.0)
    assert tilt_of(0, 0, math.sin(1), math.cos(1)) == pytest.approx(0.0)  # yaw is no tilt
    assert tilt_of(math.sin(half), 0, 0, math.cos(half)) == pytest.approx(2 * half)
    assert tilt_of(0, -math.sin(half), 0, math.cos(half)) == pytest.approx(2 * half)
    assert tilt_of(1, 0, 0, 0) == pytest.approx(math.pi)
    assert tilt_of(0, 0, 0, 0) is None and tilt_of(math.nan, 0, 0, 1) is None


def test_nearest_ahead_looks_ahead_only():
    ranges = [0.3, 2.0, 1.5, math.inf, 0.4]  # at -90, -45, 0, 45, 90 degrees
    cone = math.radians(100)
    step = math.pi / 4
    assert nearest_ahead(ranges, -math.pi / 2, step, 0.05, 10.0, cone) == 1.5
    assert nearest_ahead(ranges, -math.pi / 2, step, 0.05, 10.0, math.pi) == 0.3
    assert nearest_ahead([20.0], 0.0, step, 0.05, 10.0, cone) == math.inf
    assert nearest_ahead([math.nan, 0.01], 0.0, 0.1, 0.05, 10.0, cone) is None
    assert nearest_ahead([5.0], math.nan, step, 0.05, 10.0, cone) is None
    assert nearest_ahead([5.0], 0.0, math.inf, 0.05, 10.0, cone) is None
    assert nearest_ahead([5.0], math.tau, step, 0.05, 10.0, cone) == 5.0  # 0..360 scans


def test_range_readings():
    assert range_reading(0.3, 0.05, 4.0) == 0.3
    assert range_reading(5.0, 0.05, 4.0) == math.inf == range_reading(math.inf, 0.05, 4.0)
    assert range_reading(0.01, 0.05, 4.0) == 0.0 == range_reading(-math.inf, 0.05, 4.0)
    assert range_reading(math.nan, 0.05, 4.0) is None
    assert range_reading(0.3, 0.0, 0.0) == 0.3  # a sensor that does not say its limits


def test_the_page_explains_every_cause_and_time_out():
    page = (share_directory() / "docs" / "safety.md").read_text()
    rows = re.findall(r"^\| \**`([A-Z_]+)`", page, re.MULTILINE)
    assert rows == [cause.name for cause in Cause]
    bold = re.findall(r"^\| \*\*`([A-Z_]+)`", page, re.MULTILINE)
    assert {Cause[name] for name in bold} == BINDS_OPERATOR
    for field in fields(Timeouts):
        assert f"`{field.name}`" in page, field.name


SPEEDS = st.sampled_from([0.0, 0.0, 0.3, -0.3, 0.5, 2.0, math.nan, math.inf])
MOTIONS = st.builds(Motion, SPEEDS, st.sampled_from([0.0, 0.0, 0.0, 0.3]), SPEEDS)


class AnySequence(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.latched = False
        self.operator = STILL
        self.announced = False  # a good action, since the last thing that ends one

    @rule(times=st.integers(1, 22))
    def wait(self, times):
        for _ in range(times):
            if self.world.joystick is not None and self.world.joystick.finite:
                self.note_operator(self.world.joystick, self.world.now + STEP)
            self.world.step()
            self.check()

    @rule(motion=st.none() | MOTIONS)
    def navigation(self, motion):
        self.world.command = motion

    @rule(motion=st.none() | MOTIONS)
    def joystick(self, motion):
        self.world.joystick = motion

    @rule(what=st.sampled_from(["odometry", "imu", "camera", "range", "heartbeat"]))
    def toggle(self, what):
        self.world.silent ^= {what}

    @rule(held=st.sampled_from([True, True, False, None]))
    def deadman(self, held):
        self.world.held = held
        if held is False:
            self.world.supervisor.on_deadman(False, self.world.now)

    @rule(tilt=st.sampled_from([0.0, 0.0, 0.42, 1.0, None]))
    def lean(self, tilt):
        self.world.tilt = tilt

    @rule(distance=st.sampled_from([math.inf, 1.0, 0.36, 0.1, None, math.nan]))
    def obstacle(self, distance):
        self.world.distance = distance

    @rule(charge=st.sampled_from([1.0, 0.16, 0.05, math.nan]))
    def battery(self, charge):
        self.world.supervisor.on_battery(charge)

    @rule(trouble=st.sampled_from(["", "", "lost"]))
    def link(self, trouble):
        self.world.supervisor.on_report("draft_node", trouble)

    @rule(x=st.floats(-1.0, 1.0), yaw=st.floats(-4.0, 4.0))
    def moved(self, x, yaw):
        self.world.pose = Pose(x, 0.0, yaw)

    @rule(
        kind=st.sampled_from([*ActionKind, None]),
        amount=st.sampled_from([0, 15, 50, 60]),
        verified=st.sampled_from([True, True, False]),
        age=st.sampled_from([0.0, 0.1, 4.0, 9.0]),
    )
    def action(self, kind, amount, verified, age):
        world = self.world
        stamp = world.now + CLOCK
        world.supervisor.on_action(announced(kind, amount), verified, stamp - age, stamp, world.now)
        self.announced = verified and kind is not None and age < 5.0

    @rule()
    def emergency_stop(self):
        self.world.supervisor.on_emergency_stop("a test", self.world.now)
        self.latched, self.announced = True, False

    @precondition(lambda self: self.latched)
    @rule()
    def reset(self):
        assert self.world.supervisor.reset()
        self.latched = False

    @rule(seconds=st.floats(0.31, 5.0))
    def frozen(self, seconds):
        self.world.now += seconds

    def note_operator(self, motion, now):
        if now >= self.world.supervisor._distrust_until:  # what came while the process was frozen is no news
            self.operator = motion
            self.announced = False

    @invariant()
    def after(self):
        self.world.decision = self.world.supervisor.decide(self.world.now)
        self.check()

    def check(self):
        world, decision = self.world, self.world.decision
        causes = set(world.causes)
        assert decision.motion.finite
        assert world.causes == sorted(causes)
        if decision.motion.moving:
            assert not decision.stopped
            # Nothing that binds the one who commands holds, and navigation is bound by all.
            bound = causes & BINDS_OPERATOR if decision.source is Source.OPERATOR else causes
            assert not bound
            assert decision.speaking and decision.source is not Source.NONE
        assert (Cause.EMERGENCY_STOP in causes) == self.latched
        if self.latched or world.held is False:
            assert decision.motion == STILL
        if decision.source is Source.NAVIGATION and decision.motion.moving:
            assert self.announced and world.command is not None
            assert abs(decision.motion.vx) <= 0.53 and abs(decision.motion.wz) <= 0.56
        if decision.source is Source.OPERATOR and not causes & BINDS_OPERATOR:
            limits = SafetyLimits()
            turn = limits.operator_turn_rate
            assert decision.motion == self.operator.within(limits.operator_speed, turn)


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = hypothesis_settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, math.nan, 2e7])
def test_implausible_values_are_no_news(value):
    supervisor, now = Supervisor(), 50.0
    supervisor.decide(now)
    for number, pose in enumerate((Pose(value, 0.0, 0.0), Pose(0.0, value, 0.0), Pose(0.0, 0.0, value))):
        supervisor.on_odometry(pose, number + 1.0, now)
    supervisor.on_navigation(Motion(vx=value), now)
    supervisor.on_operator(Motion(wz=value), now)
    supervisor.on_battery(value)
    supervisor.on_battery(-1.0)
    decision = supervisor.decide(now)
    causes = {cause for cause, _ in decision.causes}
    assert Cause.ODOMETRY_STALE in causes and decision.source is Source.NONE and decision.motion == STILL
    assert Cause.LOW_BATTERY not in causes
    assert nearest_ahead([1.0, 2.0], value, 0.1, 0.0, 10.0, 1.0) is None
    assert nearest_ahead([1.0, 2.0], 0.0, value, 0.0, 10.0, 1.0) is None


def test_a_scan_of_a_million_readings_is_none():
    assert nearest_ahead([1.0] * 1_000_000, 0.0, 0.0, 0.0, 10.0, 1.0) is None


def test_a_fault_of_the_supervisor_holds_everybody_until_it_is_reset():
    world = World()
    world.step(2)
    world.act()
    world.command = AHEAD
    assert world.step(3).motion == AHEAD
    world.supervisor.on_fault("the callback of odom (ValueError)", world.now)
    world.joystick = Motion(-0.2)
    decision = world.step(3)
    assert world.causes[0] is Cause.SUPERVISOR_FAULT and "odom" in decision.causes[0][1]
    assert decision.stopped and decision.motion == STILL and decision.speaking
    world.joystick = None
    assert world.step(200).speaking and world.supervisor.reset() and not world.supervisor.reset()
    assert Cause.SUPERVISOR_FAULT not in {cause for cause, _ in world.step().causes}


def test_a_stranger_holds_navigation_and_zero_is_repeated_while_he_is_there():
    world = World()
    world.step(2)
    world.act()
    world.command = AHEAD
    assert world.step(3).motion == AHEAD
    world.supervisor.on_strangers("cmd_vel has a publisher that does not belong there: /teleop.", world.now)
    decision = world.step()
    assert world.causes[0] is Cause.FOREIGN_PUBLISHER and decision.stopped and decision.motion == STILL
    world.command = None
    assert world.step(200).speaking
    world.joystick = Motion(-0.2)
    assert world.step().motion == Motion(-0.2)  # the operator can still drive out of it
    world.supervisor.on_strangers("", world.now)
    assert Cause.FOREIGN_PUBLISHER not in {cause for cause, _ in world.step().causes}


def test_nodes_are_awaited_until_they_were_well_once():
    supervisor, now = Supervisor(), 10.0
    every = {"draft_node", "navigation_node"}
    assert supervisor.decide(now).awaited == every  # not the nodes of another robot or link, which never come
    for node in supervisor.decide(now).awaited:
        supervisor.on_heartbeat(node, now)  # alive, and has not reported yet
    decision = supervisor.decide(now)
    assert "draft_node: starting" in dict(decision.causes)[Cause.LINK_LOST]
    assert Cause.LINK_LOST in dict(decision.causes) and decision.stopped
    assert decision.awaited == every
    now += 2.0  # loading the model
    decision = supervisor.decide(now)
    assert Cause.NODE_SILENT in dict(decision.causes) and decision.stopped
    for node in decision.awaited:
        supervisor.on_report(node, "")
    assert supervisor.decide(now).awaited == frozenset()
    supervisor.on_report("draft_node", "link lost")
    decision = supervisor.decide(now)
    assert Cause.LINK_LOST in dict(decision.causes) and decision.awaited == frozenset()
