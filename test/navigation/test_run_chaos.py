# SPDX-License-Identifier: Apache-2.0
"""Any order of events: motion only by an announced action, nothing twice, nothing stale, and no life after the end."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings as hypothesis_settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from run_bench import GO, SETTINGS, STOP, TICK_S, Bench, report, say, silent

from dsd_ros.navigation.run.controller import AT_REST, Pose, Velocity
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import FALLBACKS, MOST_UNVERIFIED, Cause

TEXTS = [GO, GO, STOP, say("turn right 45 degrees"), say("turn left 15 degrees"), "nonsense"]
CLEAR = report()
SAFETY = [
    *[CLEAR] * 4,
    report(Cause.LINK_LOST),
    report(Cause.LINK_LOST, waived=(Cause.LINK_LOST,)),
    report(Cause.CAMERA_STALE),
    report(Cause.OPERATOR),
    report(Cause.MOTION_REFUSED),
    silent("draft_node"),
    None,
]
FAILURES = [RunOutcome.LINK_LOST, RunOutcome.DECODE_TIMEOUT, RunOutcome.NO_OBSERVATION, RunOutcome.VERIFIER_REFUSED]


class Chaos(RuleBasedStateMachine):
    """A run between an unreliable robot, draft node, supervisor and operator."""

    @initialize(
        fallback=st.sampled_from(FALLBACKS),
        check=st.sampled_from(["model", "service"]),
        lag=st.sampled_from([0.0, 0.6]),
        look_ahead=st.booleans(),
    )
    def begin(self, fallback, check, lag, look_ahead):
        budgets = {"max_steps": 12, "max_observation_age_s": 3.0}
        self.settings = replace(SETTINGS, **budgets, fallback=fallback, arrival_check=check, look_ahead=look_ahead)
        self.bench = Bench(self.settings, lag=lag)
        self.end: object = None
        self.pushed = False

    def _tick(self, odometry: bool = True) -> None:
        bench = self.bench
        before = len(bench.announcements)
        held = bench.safety is not None and bench.safety.holds
        command = bench.tick(odometry)
        if command == AT_REST:
            return
        run = bench.run
        assert not held and not run.ended
        assert run.phase in (Phase.EXECUTING, Phase.RETRACING)
        # What moves the robot was announced first, and is what is under way.
        assert len(bench.announcements) == before > 0
        assert bench.announcements[-1].action == run.action

    @rule(count=st.integers(1, 60), odometry=st.sampled_from([True, True, True, False]))
    def ticks(self, count, odometry):
        for _ in range(count):
            self._tick(odometry)

    @rule(safety=st.sampled_from(SAFETY), count=st.integers(0, 140))
    def says(self, safety, count):
        self.bench.safety = safety
        for _ in range(count):
            self._tick()

    @rule(text=st.sampled_from(TEXTS), age=st.floats(0.0, 1.0), verified=st.sampled_from([True] * 3 + [False]))
    def answer(self, text, age, verified):
        bench = self.bench
        if not bench.asked:
            return
        request = bench.asked[-1]
        for _ in range(round(age / TICK_S)):
            self._tick()
        details = (request.number, len(bench.announcements))
        bench.run.on_answer(request.number, DecodeAnswer(text, request.not_before, verified, details), bench.moment)
        bench.listen()

    @rule(number=st.integers(0, 8), text=st.sampled_from(TEXTS), age=st.floats(-1.0, 8.0))
    def late_or_early_answer(self, number, text, age):
        bench = self.bench
        observed = bench.moment.stamp - age
        bench.run.on_answer(number, DecodeAnswer(text, observed, True, ("late", number)), bench.moment)
        bench.listen()

    @rule(newest=st.booleans(), number=st.integers(0, 8), outcome=st.sampled_from(FAILURES))
    def failure(self, newest, number, outcome):
        bench = self.bench
        number = bench.asked[-1].number if newest and bench.asked else number
        bench.run.on_failure(number, outcome, "gone")

    @rule(vx=st.floats(-0.3, 0.3))
    def push(self, vx):
        self.bench.velocity = Velocity(vx, 0.0)
        self.pushed = self.pushed or vx != 0.0

    @rule(arrived=st.booleans())
    def arrival(self, arrived):
        asked = self.bench.run.take_check()
        if asked or arrived:
            self.bench.run.on_arrival(arrived, "the check says so")

    @rule()
    def cancel(self):
        if len(self.bench.run.steps) > 2:  # not before something has happened
            self.bench.run.cancel()

    @invariant()
    def nothing_forbidden_has_happened(self):
        bench, run = self.bench, self.bench.run
        if not bench.announcements and not self.pushed:
            assert bench.pose == Pose(0.0, 0.0, 0.0)
        numbers = [announcement.number for announcement in bench.announcements]
        assert numbers == sorted(set(numbers))
        limit = self.settings.max_observation_age_s
        assert all(-0.5 <= step.observation_age <= limit for step in run.steps)
        used = [step.details for step in run.steps]
        assert len({id(details) for details in used}) == len(used)
        by_request = [d[0] for d in used if d is not None and d[0] != "late"]
        assert len(set(by_request)) == len(by_request)  # no request answered twice
        self._unverified(run.steps)
        legs = [a for a in bench.announcements if a.retracing]
        assert not legs or self.settings.fallback == "return"
        assert len(run.steps) <= self.settings.max_steps
        if run.ended:
            assert run.outcome is not RunOutcome.UNKNOWN and run.sentence
            assert bench.tick() == AT_REST and run.take_request() is None
            assert not run.take_check() and run.take_announcement() is None
            self.end = self.end or (run.outcome, run.sentence, len(run.steps))
            assert (run.outcome, run.sentence, len(run.steps)) == self.end

    def _unverified(self, steps) -> None:
        in_a_row = 0
        for step in steps:
            in_a_row = 0 if step.verified else in_a_row + 1
            assert in_a_row <= (MOST_UNVERIFIED if self.settings.fallback == "draft_only" else 0)


Chaos.TestCase.settings = hypothesis_settings(max_examples=30, stateful_step_count=25)
TestChaos = Chaos.TestCase
