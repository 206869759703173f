# SPDX-License-Identifier: Apache-2.0
"""A Navigate run as a state machine: the good path, every bad end, and that the robot stands in all
of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_bench import GO, SETTINGS, STOP, Bench, report, say

from dsd_ros.navigation.run.controller import AT_REST, Pose, Velocity
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause


def test_drives_until_the_model_says_stop():
    bench = Bench()
    bench.answer(GO)
    assert bench.run.phase is Phase.EXECUTING
    bench.answer(GO)
    bench.answer("Left. Action: turn left 30 degrees")
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED
    assert bench.pose.x == pytest.approx(0.5, abs=0.04)
    assert bench.pose.yaw == pytest.approx(math.radians(30), abs=0.03)
    assert bench.run.distance == pytest.approx(0.5, abs=0.04)
    assert [step.number for step in bench.run.steps] == [1, 2, 3, 4]
    assert bench.velocity == AT_REST


def test_a_hold_that_passes_only_delays_the_action():
    bench = Bench()
    bench.answer(GO)
    for _ in range(20):
        bench.tick()
    assert bench.velocity.vx > 0.1
    bench.safety = report(Cause.CAMERA_STALE)
    for _ in range(80):  # 1.6 s: longer than it takes to be stuck, shorter than the patience
        assert bench.tick() == AT_REST
    bench.safety = report()
    assert bench.tick().vx < 0.1  # from zero again
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED
    assert bench.pose.x == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("safety", "longest", "sentence"),
    [
        (report(Cause.LOW_BATTERY, Cause.CAMERA_STALE), 2.1, "LOW_BATTERY. Because of CAMERA"),
        (report(Cause.MOTION_REFUSED), 0.6, "MOTION_REFUSED"),
        (report(Cause.EMERGENCY_STOP), 0.1, "EMERGENCY_STOP"),
        (None, 3.1, "supervisor has been silent"),
    ],
)
def test_a_hold_that_lasts_ends_the_run_and_is_named(safety, longest, sentence):
    bench = Bench()
    bench.answer("I see it. Action: forward 75 cm")
    bench.tick()
    began, bench.safety = bench.now, safety
    assert bench.finish() is RunOutcome.SAFETY_STOP
    assert bench.now - began <= longest and sentence in bench.run.sentence
    assert bench.tick() == AT_REST


def test_a_hold_does_not_end_a_run_that_has_nothing_to_carry_out():
    bench = Bench()
    bench.safety = report(Cause.LINK_LOST)
    bench.until_request()
    for _ in range(300):
        bench.tick()
    assert bench.run.phase is Phase.DECODING
    bench.safety = report(Cause.EMERGENCY_STOP)
    assert bench.finish() is RunOutcome.SAFETY_STOP


def test_after_an_operators_command_the_run_observes_again():
    bench = Bench()
    bench.answer(GO)
    for _ in range(10):
        bench.tick()
    bench.safety = report(Cause.OPERATOR)
    asked = len(bench.asked)
    bench.ticks(1.0)
    assert bench.run.phase is Phase.SETTLING and len(bench.asked) == asked
    bench.safety = report()
    answered = bench.now
    assert bench.until_request().not_before >= answered + 1000.0
    bench.safety = report(Cause.OPERATOR)
    bench.tick()
    assert bench.finish() is RunOutcome.SAFETY_STOP  # it lasts


def test_asks_only_of_a_robot_that_stands_and_hands_a_request_out_once():
    bench = Bench()
    bench.velocity = Velocity(0.4, 0.0)
    bench.run.on_odometry(bench.pose, bench.velocity, bench.moment)
    assert bench.run.take_request() is None
    began = bench.moment.stamp
    request = bench.until_request()
    assert request.number == 1 and not request.history
    assert began < request.not_before <= bench.moment.stamp
    bench.ticks(1.0)
    assert len(bench.asked) == 1


def test_asks_before_the_rest_is_confirmed_and_waits_for_it_with_the_answer():
    bench = Bench()
    bench.answer(GO)
    bench.until(lambda: len(bench.asked) == 2)
    assert bench.run.phase is Phase.EXECUTING and bench.velocity == AT_REST
    request = bench.asked[1]
    assert request.not_before == bench.moment.stamp  # of the first sample at rest
    bench.run.on_answer(2, DecodeAnswer(STOP, request.not_before), bench.moment)
    assert len(bench.run.steps) == 1  # not before the rest is confirmed
    bench.ticks(0.12)
    assert len(bench.run.steps) == 2
    assert bench.announcements[1].standing_seconds == pytest.approx(0.1, abs=0.03)
    assert bench.finish() is RunOutcome.ARRIVED


def test_a_robot_that_moves_again_takes_its_question_back():
    bench = Bench()
    bench.answer(GO)
    bench.until(lambda: len(bench.asked) == 2)
    bench.run.on_answer(2, DecodeAnswer(STOP, bench.asked[1].not_before), bench.moment)
    bench.velocity = Velocity(0.1, 0.0)  # pushed
    moved = bench.moment.stamp
    bench.tick()
    bench.run.on_answer(2, DecodeAnswer(STOP, bench.asked[1].not_before), bench.moment)
    bench.run.on_failure(2, RunOutcome.LINK_LOST, "late")
    request = bench.until_request()
    assert request.number == 3 and request.not_before > moved
    assert len(bench.run.steps) == 1 and not bench.run.ended


def test_a_failure_before_the_rest_is_confirmed_counts_once_it_is():
    bench = Bench()
    bench.answer(GO)
    bench.until(lambda: len(bench.asked) == 2)
    bench.run.on_failure(2, RunOutcome.LINK_LOST, "gone")
    assert not bench.run.ended
    assert bench.finish() is RunOutcome.LINK_LOST


def test_an_early_answer_that_a_long_rest_has_made_old_is_asked_for_again():
    bench = Bench(replace(SETTINGS, max_observation_age_s=0.5))
    bench.answer(GO)
    bench.until(lambda: len(bench.asked) == 2)
    bench.run.on_answer(2, DecodeAnswer(STOP, bench.asked[1].not_before), bench.moment)
    bench.now += 1.0
    assert bench.until_request().number == 3
    assert len(bench.run.steps) == 1


def test_a_request_contains_the_last_eight_steps():
    bench = Bench(replace(SETTINGS, max_steps=20))
    texts = [say(f"turn left {15 + 15 * (i % 3)} degrees") for i in range(10)]
    stamps = [bench.answer(text).not_before for text in texts]
    past = bench.until_request().history
    assert [step.observed_at for step in past] == stamps[2:]
    assert past[-1].reply.action.amount == 15 and past[-1].details is not None
    bench.safety = report(Cause.OPERATOR)
    bench.tick()
    bench.safety = report()
    assert not bench.until_request().history  # moved by hand, it starts empty


def test_what_does_not_parse_ends_the_run_without_motion():
    bench = Bench()
    bench.answer("Action: forward 25 cm now")
    assert bench.run.outcome is RunOutcome.UNPARSABLE_REPLY
    assert bench.tick() == AT_REST
    assert bench.pose == Pose(0.0, 0.0, 0.0)


def test_a_reply_about_an_old_picture_is_not_carried_out():
    bench = Bench()
    bench.answer(GO, age=SETTINGS.max_observation_age_s + 0.1)
    assert bench.run.outcome is RunOutcome.STALE_OBSERVATION
    assert "limit is 5.0 s" in bench.run.sentence


@pytest.mark.parametrize("offset", [-0.01, 2.0, math.nan, math.inf])
def test_a_picture_from_before_the_rest_or_from_the_future_is_not_acted_on(offset):
    bench = Bench()
    request = bench.until_request()
    bench.run.on_answer(request.number, DecodeAnswer(GO, request.not_before + offset), bench.moment)
    assert bench.run.outcome is RunOutcome.STALE_OBSERVATION


def test_a_late_answer_to_an_earlier_request_is_ignored():
    bench = Bench()
    bench.answer(STOP.replace("stop", "turn right 15 degrees"))
    second = bench.until_request()
    bench.run.on_answer(1, DecodeAnswer(GO, second.not_before), bench.moment)
    bench.run.on_failure(1, RunOutcome.LINK_LOST, "late")
    assert bench.run.phase is Phase.DECODING and len(bench.run.steps) == 1


def test_budgets():
    bench = Bench()
    for _ in range(SETTINGS.max_steps):
        bench.answer("Go on. Action: turn left 15 degrees")
    assert bench.finish() is RunOutcome.STEP_BUDGET
    bench = Bench(replace(SETTINGS, time_limit_s=2.0))
    bench.answer("Go on. Action: forward 75 cm")
    assert bench.finish() is RunOutcome.TIME_BUDGET
    assert 0.2 < bench.run.distance < 0.8


def test_cancel_stops_at_once():
    bench = Bench()
    bench.answer(GO)
    while bench.tick().vx < 0.2:
        pass
    bench.run.cancel()
    assert bench.tick() == AT_REST
    assert bench.run.outcome is RunOutcome.CANCELLED
    bench.run.end(RunOutcome.STUCK, "too late")
    assert bench.run.outcome is RunOutcome.CANCELLED


CHECKED = replace(SETTINGS, arrival_check="service")


def checking() -> Bench:
    bench = Bench(CHECKED)
    bench.answer(STOP)
    bench.until(lambda: bench.run.phase is Phase.CHECKING)
    return bench


@pytest.mark.parametrize(("arrived", "outcome"), [(True, RunOutcome.ARRIVED), (False, RunOutcome.NOT_THERE)])
def test_an_arrival_is_checked_where_that_is_wanted(arrived, outcome):
    bench = checking()
    assert bench.run.take_check() and not bench.run.take_check()
    bench.run.on_arrival(arrived, "0.8 m are left.")
    assert bench.run.outcome is outcome
    assert arrived or "0.8 m are left" in bench.run.sentence
    bench.run.on_arrival(not arrived, "late")
    assert bench.run.outcome is outcome


def test_an_arrival_not_confirmed_in_time_does_not_count():
    bench = checking()
    bench.run.take_check()
    began = bench.now
    assert bench.finish() is RunOutcome.NOT_THERE
    assert 2.0 <= bench.now - began < 2.1


def test_an_operators_command_during_the_check_makes_the_run_observe_again():
    bench = checking()
    bench.run.take_check()
    bench.safety = report(Cause.OPERATOR)
    bench.tick()
    bench.run.on_arrival(True, "of before")
    bench.safety = report()
    assert bench.until_request().number == 2 and not bench.run.ended


def test_an_arrival_by_the_models_word_alone_says_so():
    bench = Bench()
    bench.run.on_arrival(True, "nobody has asked")
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED and "nothing else has checked" in bench.run.sentence


def test_steps_say_how_long_they_took():
    bench = Bench()
    began = bench.now
    bench.answer(GO, age=0.3)
    first = bench.announcements[0]
    assert first.step_seconds == pytest.approx(bench.now - began)
    assert first.standing_seconds == pytest.approx(0.4, abs=0.05)
    bench.answer(STOP, age=0.3)
    assert sum(a.step_seconds for a in bench.announcements) == pytest.approx(bench.now - began)


@pytest.mark.parametrize("age", [0.05, 0.25])
def test_poses_are_taken_for_the_time_they_were_measured_at(age):
    bench = Bench()
    bench.answer("I see it. Action: forward 75 cm")
    bench.until(lambda: bench.pose.x > 0.2)
    velocity, moment = Velocity(0.5, 0.0), bench.moment
    bench.run.on_odometry(bench.pose, velocity, moment, moment.stamp - age)
    assert bench.run._robot.pose.x == pytest.approx(bench.pose.x + 0.5 * age)
    bench.run.on_odometry(bench.pose, velocity, moment, moment.stamp - 5.0)  # another clock
    assert bench.run._robot.pose == bench.pose
