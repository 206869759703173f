# SPDX-License-Identifier: Apache-2.0
"""Odometry with parts missing or wrong: no twist, a frozen or wrong twist, frozen poses, odd orientations."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from run_bench import GO, SETTINGS, STOP, TICK_S, Bench, say

from dsd_ros.navigation.run.controller import AT_REST, Pose, Velocity, stands
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import tilt_of
from dsd_ros.navigation.safety.odometry import OdometryError, SpeedEstimate, checked_pose, checked_twist

LEFT = say("turn left 45 degrees")


class OddBench(Bench):
    """A robot that slows down gradually, whose driver reports what ``twist`` and ``place`` make of the truth."""

    def __init__(self, coast: float = 0.6, **options) -> None:
        super().__init__(replace(SETTINGS, max_steps=20), **options)
        self.coast = coast
        self.twist = lambda velocity: velocity
        self.place = lambda pose: pose
        self.asked_at: list[Velocity] = []

    def tick(self, odometry: bool = True) -> Velocity:
        self.now += TICK_S
        self.run.on_safety(self.safety, self.now)
        self.command = self.run.on_odometry(self.place(self.measured()), self.twist(self.velocity), self.moment)
        self._move()
        self.run.on_time(self.moment)
        count = len(self.asked)
        self.listen()
        self.asked_at += [self.velocity] * (len(self.asked) - count)
        return self.command

    def _move(self) -> None:
        share = TICK_S / self.coast

        def approach(present: float, wanted: float) -> float:
            return present + (wanted - present) * (share if abs(wanted) < abs(present) else min(1.0, 4 * share))

        before = self.velocity
        self.lag, self.velocity = (
            1.0,
            Velocity(approach(before.vx, self.command.vx), approach(before.wz, self.command.wz)),
        )
        super()._move()


@pytest.mark.parametrize("twist", [lambda v: v, lambda v: AT_REST, lambda v: Velocity(1e-12, -1e-12)])
def test_pictures_are_taken_at_rest_with_or_without_a_twist(twist):
    bench = OddBench()
    bench.twist = twist
    for text in (GO, say("forward 75 cm"), LEFT, LEFT, STOP):
        bench.answer(text)
    assert bench.finish() is RunOutcome.ARRIVED
    assert len(bench.asked_at) >= 5
    assert max(v.vx for v in bench.asked_at) < 0.035
    assert max(abs(v.wz) for v in bench.asked_at) < math.radians(2.5)


def test_a_run_that_begins_while_the_robot_coasts_without_a_twist_waits_for_rest():
    bench = OddBench()
    bench.twist = lambda velocity: AT_REST
    bench.velocity = Velocity(0.5, 0.5)
    bench.until_request()
    assert bench.asked_at[0].vx < 0.035


def test_a_twist_that_freezes_at_zero_does_not_hide_motion():
    bench = OddBench(coast=2.0)
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: bench.velocity.vx > 0.35)
    bench.twist = lambda velocity: AT_REST
    count = len(bench.asked)
    bench.until(lambda: len(bench.asked) > count or bench.run.ended)
    assert bench.run.ended or bench.velocity.vx < 0.035


@pytest.mark.parametrize(
    ("action", "twist", "place"),
    [
        ("forward 75 cm", lambda v: v, lambda p: Pose(0.0, 0.0, 0.0)),  # poses freeze
        ("forward 75 cm", lambda v: Velocity(100 * v.vx, v.wz), lambda p: p),  # cm/s
        ("turn left 45 degrees", lambda v: Velocity(v.vx, math.degrees(v.wz)), lambda p: p),
        ("turn left 45 degrees", lambda v: Velocity(v.vx, -v.wz), lambda p: p),
        ("turn left 45 degrees", lambda v: v, lambda p: Pose(p.x, p.y, 0.0)),
    ],
)
def test_odometry_that_contradicts_itself_ends_the_run_by_name(action, twist, place):
    bench = OddBench(coast=0.1)
    bench.twist, bench.place = twist, place
    turns = itertools.cycle([action, "turn right 45 degrees" if "left" in action else "forward 50 cm"])
    for _ in range(8):
        bench.until(lambda: bench.run.ended or (bench.run.phase is Phase.DECODING and bench.pending))
        if bench.run.ended:
            break
        bench.answer(say(next(turns)))
    assert bench.run.outcome is RunOutcome.ODOMETRY_LOST
    assert "contradicts itself" in bench.run.sentence and "by its twist" in bench.run.sentence
    assert bench.tick() == AT_REST


@pytest.mark.parametrize("rate", [0.1, 0.5, 4.0, 20.0])
def test_good_odometry_of_a_simulation_at_any_rate_does_not_contradict_itself(rate):
    estimate, x, yaw = SpeedEstimate(), 0.0, 0.0
    for tick in range(1000):
        x, yaw = x + 0.4 * TICK_S * rate, yaw + 0.5 * TICK_S * rate
        estimate.update(
            Pose(x, 0.0, math.remainder(yaw, math.tau)), Velocity(0.4, 0.5), tick * TICK_S, tick * TICK_S * rate
        )
    assert not estimate.conflict


@pytest.mark.parametrize("hertz", [5, 20, 50, 200, 500])
@pytest.mark.parametrize("twist", [True, False])
def test_a_standing_robot_with_noisy_odometry_is_at_rest(hertz, twist):
    """2 mm and 1 mrad: a walking robot's estimator at rest; drift of 2 mm/s and 0.2 degrees/s on top."""
    chance, estimate, still = random.Random(hertz), SpeedEstimate(), []
    for tick in range(10 * hertz):
        now = tick / hertz
        pose = Pose(chance.gauss(0.002 * now, 0.002), chance.gauss(0, 0.002), chance.gauss(0.0035 * now, 0.001))
        said = Velocity(abs(chance.gauss(0, 0.003)), chance.gauss(0, 0.003)) if twist else AT_REST
        still.append(stands(estimate.update(pose, said, now, now)))
    assert sum(still) / len(still) > 0.97
    assert not estimate.conflict


@given(speed=st.floats(0.06, 2.0), turn=st.floats(-2.0, 2.0), hertz=st.integers(5, 200), start=st.floats(-4, 4))
def test_a_moving_robot_is_never_at_rest(speed, turn, hertz, start):
    estimate, x, y, yaw = SpeedEstimate(), 0.0, 0.0, start
    for tick in range(2 * hertz):
        yaw += turn / hertz
        x, y = x + speed * math.cos(yaw) / hertz, y + speed * math.sin(yaw) / hertz
        measured = estimate.update(Pose(x, y, math.remainder(yaw, math.tau)), AT_REST, tick / hertz, 0.0)
        if speed > 0.15 or tick / hertz > 0.6:  # slow motion takes longer to show
            assert not stands(measured)


def test_after_a_gap_the_robot_counts_as_moving_until_poses_show_that_it_stands():
    estimate = SpeedEstimate()
    for tick in range(50):
        measured = estimate.update(Pose(0.0, 0.0, 0.0), AT_REST, tick * TICK_S, tick * TICK_S)
    assert stands(measured)
    assert not stands(estimate.update(Pose(0.0, 0.0, 0.0), AT_REST, 10.0, 10.0))


@given(yaw=st.floats(-3.1, 3.1), length=st.floats(0.76, 1.24))
def test_a_heading_does_not_depend_on_the_length_of_the_orientation(yaw, length):
    pose = checked_pose((1.0, 2.0, 0.0), (0.0, 0.0, length * math.sin(yaw / 2), length * math.cos(yaw / 2)))
    assert (pose.x, pose.y) == (1.0, 2.0) and pose.yaw == pytest.approx(yaw, abs=1e-9)


@pytest.mark.parametrize("value", [0.0, 1e-300, 0.5, 2.0, 1e200, 1e308, math.inf, math.nan])
@pytest.mark.parametrize("at", range(4))
def test_an_orientation_far_from_length_1_is_no_odometry(value, at):
    q = [0.0] * 4
    q[at] = value
    with pytest.raises(OdometryError, match="orientation has length"):
        checked_pose((0.0, 0.0), q)
    assert tilt_of(*q) is None


@pytest.mark.parametrize("value", [1e308, -1e9, math.inf, -math.inf, math.nan])
def test_numbers_that_no_robot_has_are_no_odometry(value):
    for place in ((value, 0.0), (0.0, value)):
        with pytest.raises(OdometryError, match="position"):
            checked_pose(place, (0.0, 0.0, 0.0, 1.0))
    for twist in ((value, 0.0, 0.0), (0.0, value, 0.0), (0.0, 0.0, value)):
        with pytest.raises(OdometryError, match="twist"):
            checked_twist(*twist)


def test_the_end_names_what_was_wrong_with_the_odometry():
    bench = Bench()
    bench.answer(GO)
    for _ in range(150):
        bench.tick(odometry=False)
        bench.run.on_bad_odometry("Its orientation has length 0.")
    assert bench.run.outcome is RunOutcome.ODOMETRY_LOST and bench.run.sentence.endswith("length 0.")


def test_an_answer_is_not_used_when_a_robot_without_a_twist_moves_again():
    bench = OddBench()
    bench.twist = lambda velocity: AT_REST
    bench.answer(GO)
    count = len(bench.asked)
    bench.until(lambda: len(bench.asked) > count)
    bench.velocity, bench.coast = Velocity(0.3, 0.0), 5.0  # pushed
    for _ in range(5):
        bench.tick()
    request = bench.asked[-1]
    bench.run.on_answer(request.number, DecodeAnswer(STOP, request.not_before), bench.moment)
    bench.ticks(0.2)
    assert len(bench.run.steps) == 1 and bench.run.phase is Phase.EXECUTING
