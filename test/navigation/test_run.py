"""A Navigate run as a state machine: the good path, every bad end, and that the robot stands in all
of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsd_ros.navigation.controller import AT_REST, MotionSettings, Pose, Velocity
from dsd_ros.navigation.records import Answer, Moment, Phase
from dsd_ros.navigation.run import NavigationRun
from dsd_ros.navigation.safety import Cause, SafetyReport
from dsd_ros.navigation.settings import RunOutcome, RunSettings

SETTINGS = RunSettings(max_steps=5, time_limit_s=60.0)
GO = "I see it. Action: forward 25 cm"
STOP = "I am there. Action: stop"


class Bench:
    """A run with an ideal robot under it. The stamps' clock is 1000 s ahead of the steady one."""

    def __init__(self, settings: RunSettings = SETTINGS, blocked: bool = False) -> None:
        self.now = 50.0
        self.pose = Pose(0.0, 0.0, 0.0)
        self.velocity = AT_REST
        self.blocked = blocked
        self.safety: SafetyReport | None = (
            SafetyReport()
        )  # what a supervisor says; None: it is silent
        self.run = NavigationRun(settings, MotionSettings(), self.moment)

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.now + 1000.0)

    def tick(self, odometry: bool = True) -> Velocity:
        self.now += 0.02
        command = AT_REST
        if self.safety is not None:
            self.run.on_safety(self.safety, self.now)
        if odometry:
            command = self.run.on_odometry(self.pose, self.velocity, self.moment)
            self.velocity = AT_REST if self.blocked else command
            yaw = self.pose.yaw + self.velocity.wz * 0.02
            step = self.velocity.vx * 0.02
            self.pose = Pose(
                self.pose.x + step * math.cos(yaw), self.pose.y + step * math.sin(yaw), yaw
            )
        self.run.on_time(self.moment)
        return command

    def until_request(self):
        """Tick until the run has asked, and the robot's rest is confirmed."""
        request = None
        for _ in range(2000):
            request = self.run.take_request() or request
            if self.run.ended or (request is not None and self.run.phase is Phase.DECODING):
                return request
            self.tick()
        raise AssertionError("the run neither asks nor ends")

    def answer(self, text: str, age: float = 0.1):
        request = self.until_request()
        self.now += age
        self.run.on_answer(request.number, Answer(text, request.not_before), self.moment)

    def finish(self):
        for _ in range(2000):
            if self.run.ended:
                return self.run.outcome
            self.tick()
        raise AssertionError("the run does not end")


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


def report(*causes: Cause) -> SafetyReport:
    return SafetyReport(causes, tuple(f"Because of {cause.name}." for cause in causes))


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


def test_after_the_operators_hand_the_run_observes_anew():
    bench = Bench()
    bench.answer(GO)
    for _ in range(10):
        bench.tick()
    bench.safety = report(Cause.OPERATOR)
    bench.tick()
    for _ in range(50):
        bench.tick()
    assert bench.run.phase is Phase.SETTLING and bench.run.take_request() is None
    bench.safety = report()
    answered = bench.now
    assert bench.until_request().not_before >= answered + 1000.0
    bench.safety = report(Cause.OPERATOR)
    bench.tick()
    assert bench.finish() is RunOutcome.SAFETY_STOP  # it lasts


def test_asks_only_at_rest_and_hands_a_request_out_once():
    bench = Bench()
    bench.velocity = Velocity(0.4, 0.0)
    assert bench.run.take_request() is None
    bench.run.on_odometry(bench.pose, Velocity(0.4, 0.0), bench.moment)
    assert bench.run.take_request() is None
    request = bench.until_request()
    assert request.number == 1
    assert bench.run.take_request() is None
    assert request.not_before <= bench.moment.stamp


@pytest.mark.parametrize(
    "text", ["", "Go ahead!", "Action: forward 25 cm now", "Action: stop Action: stop"]
)
def test_what_does_not_parse_ends_the_run_without_motion(text):
    bench = Bench()
    bench.answer(text)
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
    bench.run.on_answer(request.number, Answer(GO, request.not_before + offset), bench.moment)
    assert bench.run.outcome is RunOutcome.STALE_OBSERVATION


def test_a_late_answer_to_an_earlier_request_is_ignored():
    bench = Bench()
    bench.answer(STOP.replace("stop", "turn right 15 degrees"))
    second = bench.until_request()
    bench.run.on_answer(1, Answer(GO, second.not_before), bench.moment)
    bench.run.on_failure(1, RunOutcome.LINK_LOST, "late")
    assert bench.run.phase is Phase.DECODING and len(bench.run.steps) == 1


def test_a_decode_that_never_answers_ends_the_run():
    bench = Bench(replace(SETTINGS, decode_timeout_s=3.0))
    bench.until_request()
    assert bench.finish() is RunOutcome.DECODE_TIMEOUT


def test_a_failure_of_the_decode_names_the_end():
    bench = Bench()
    request = bench.until_request()
    bench.run.on_failure(request.number, RunOutcome.NO_OBSERVATION, "The camera is silent.")
    assert bench.run.outcome is RunOutcome.NO_OBSERVATION
    assert bench.run.sentence == "The camera is silent."


@pytest.mark.parametrize("when", ["start", "driving"])
def test_lost_odometry_ends_the_run(when):
    bench = Bench()
    if when == "driving":
        bench.answer(GO)
        for _ in range(20):
            bench.tick()
    for _ in range(150):
        bench.tick(odometry=False)
    assert bench.run.outcome is RunOutcome.ODOMETRY_LOST


def test_budgets():
    bench = Bench()
    for _ in range(SETTINGS.max_steps):
        bench.answer("Go on. Action: turn left 15 degrees")
    assert bench.finish() is RunOutcome.STEP_BUDGET
    bench = Bench(replace(SETTINGS, time_limit_s=2.0))
    bench.answer("Go on. Action: forward 75 cm")
    assert bench.finish() is RunOutcome.TIME_BUDGET
    assert 0.2 < bench.run.distance < 0.8


def test_a_blocked_robot_gets_other_chances_and_then_the_run_ends():
    bench = Bench(blocked=True)
    for _ in range(3):
        bench.answer(GO)
    assert bench.finish() is RunOutcome.STUCK


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


class Chaos(RuleBasedStateMachine):
    """Any order of events: motion only while executing a parsed reply, and an end stays an end."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.command = AT_REST
        self.end = None

    @rule(count=st.integers(1, 40), odometry=st.booleans())
    def ticks(self, count, odometry):
        for _ in range(count):
            self.command = self.bench.tick(odometry)

    @rule()
    def request(self):
        self.bench.run.take_request()

    @rule(
        number=st.integers(0, 6),
        text=st.sampled_from([GO, STOP, "nonsense", "x Action: turn right 45 degrees"]),
        age=st.floats(-1.0, 8.0),
    )
    def answer(self, number, text, age):
        moment = self.bench.moment
        self.bench.run.on_answer(number, Answer(text, moment.stamp - age), moment)

    @rule(number=st.integers(0, 6))
    def failure(self, number):
        self.bench.run.on_failure(number, RunOutcome.LINK_LOST, "gone")

    @rule()
    def cancel(self):
        self.bench.run.cancel()

    @invariant()
    def moves_only_by_a_reply(self):
        run = self.bench.run
        if not run.steps:
            assert self.bench.pose == Pose(0.0, 0.0, 0.0)
        if run.ended:
            assert run.outcome is not RunOutcome.UNKNOWN and run.sentence
            assert self.bench.tick() == AT_REST
            self.end = self.end or (run.outcome, run.sentence)
            assert (run.outcome, run.sentence) == self.end


Chaos.TestCase.settings = hypothesis_settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
TestChaos = Chaos.TestCase
