# SPDX-License-Identifier: Apache-2.0
"""The stamps' clock is set, stands still or runs at another rate while a run is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st
from run_bench import GO, SETTINGS, STOP, TICK_S, Bench, say

from dsd_ros.navigation.run.actions import Action, ActionKind
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.records import ClockWatch, DecodeAnswer, Moment, Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.navigation.safety.supervisor import Supervisor

JUMPS = [-1e9, -900.0, -1.0, -0.05, 1.5, 30.0, 1e9]


class ClockBench(Bench):
    """The stamps' clock can be set, and stopped; a camera takes 20 pictures a second, stamped by it."""

    def __init__(self, settings=SETTINGS) -> None:
        self.shift, self.paused_at = 1e9, None
        self.pictures: list[tuple[float, float]] = []  # steady time and stamp
        super().__init__(settings)

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.paused_at or self.now + self.shift)

    def tick(self, odometry: bool = True):
        command = super().tick(odometry)
        if round(self.now / TICK_S) % 3 == 0:
            self.pictures.append((self.now, self.moment.stamp))
        return command

    def serve(self, *texts: str, delay: float = 0.2) -> None:
        """Answer each request ``delay`` s after a picture that fits it, until the run has ended."""
        texts = list(texts)
        due: tuple[float, int, float, str] | None = None
        end = self.now + 100.0
        self.used: list[float] = []  # when the pictures were taken, steady time
        while not self.run.ended:
            assert self.now < end, (self.run.phase, self.asked[-1:])
            self.tick()
            request = self.asked[-1] if self.pending else None
            if due is not None and (request is None or request.number != due[1]):
                due = None
            if request is not None and due is None:
                stamp = self.moment.stamp  # as the draft node: not before, and not from the future
                fit = [p for p in self.pictures[-1:] if request.not_before <= p[1] <= stamp + 0.5]
                if fit:
                    due = (self.now + delay, request.number, fit[0][1], texts[0] if texts else STOP)
                    self.taken = fit[0][0]
            if due is not None and self.now >= due[0]:
                steps = len(self.run.steps)
                self.run.on_answer(due[1], DecodeAnswer(due[3], due[2], True, due[1]), self.moment)
                self.listen()
                if len(self.run.steps) > steps:
                    self.used.append(self.taken)
                    texts = texts[1:]
                due = None


@given(jump=st.sampled_from(JUMPS), after=st.floats(0.0, 5.0), again=st.sampled_from([0.0, *JUMPS]))
@hypothesis_settings(max_examples=30, deadline=None)
def test_a_clock_that_is_set_at_any_time_only_delays_a_run(jump, after, again):
    plain, bench = ClockBench(), ClockBench()
    plain.serve(GO, say("turn left 30 degrees"), GO, STOP)
    due = [(bench.now + after, jump), (bench.now + after + 0.7, again)]
    tick = bench.tick

    def set_and_tick(odometry: bool = True):
        while due and bench.now >= due[0][0]:
            bench.shift += due.pop(0)[1]
        return tick(odometry)

    bench.tick = set_and_tick
    bench.serve(GO, say("turn left 30 degrees"), GO, STOP)
    assert bench.run.outcome is RunOutcome.ARRIVED, bench.run.sentence
    assert bench.now - plain.now < 3.0
    assert bench.pose.x == pytest.approx(plain.pose.x, abs=0.05)
    assert bench.pose.yaw == pytest.approx(plain.pose.yaw, abs=0.05)


def test_a_clock_set_back_at_rest_asks_about_a_picture_of_the_new_time():
    bench = ClockBench()
    bench.answer(GO)
    bench.until(lambda: len(bench.asked) == 2)
    bench.shift -= 900.0
    bench.until(lambda: bench.run.phase is Phase.DECODING)
    request = bench.asked[-1]
    assert request.number > 2 and request.not_before <= bench.moment.stamp


def test_a_request_asked_again_keeps_its_deadline():
    bench = ClockBench(replace(SETTINGS, decode_timeout_s=3.0))
    bench.until_request()
    began = bench.now
    while not bench.run.ended:
        bench.shift -= 5.0
        bench.ticks(0.5)
    assert bench.run.outcome is RunOutcome.DECODE_TIMEOUT and bench.now - began < 4.0
    assert len(bench.asked) > 4 and bench.asked[-1].timeout < 1.0


def test_a_late_answer_about_a_picture_of_before_is_asked_for_again():
    bench = ClockBench()
    request = bench.until_request()
    old = bench.moment.stamp
    bench.shift -= 900.0
    bench.tick()
    again = bench.asked[-1]
    assert again.number > request.number
    bench.run.on_answer(again.number, DecodeAnswer(GO, old, True, None), bench.moment)  # it missed the new time
    bench.tick()
    assert not bench.run.ended and not bench.run.steps and bench.asked[-1].number > again.number
    bench.ticks(3.0)
    bench.run.on_answer(bench.asked[-1].number, DecodeAnswer(GO, old, True, None), bench.moment)
    assert bench.run.outcome is RunOutcome.STALE_OBSERVATION
    assert "s ahead of this node's clock" in bench.run.sentence and "same clock" in bench.run.sentence


def test_an_action_goes_on_and_its_rest_is_found_while_the_clock_stands_still():
    bench = ClockBench()
    bench.answer(GO)
    bench.ticks(0.2)
    bench.paused_at = bench.moment.stamp
    bench.until(lambda: len(bench.asked) == 2, 5.0)
    assert bench.pose.x == pytest.approx(0.25, abs=0.03)


def test_a_paused_simulation_ends_the_run_and_is_named():
    bench = ClockBench()
    bench.answer(GO)
    bench.paused_at = bench.moment.stamp
    for _ in range(200):
        bench.tick(odometry=False)
    assert bench.run.outcome is RunOutcome.ODOMETRY_LOST and "is the simulation paused?" in bench.run.sentence


def test_lost_odometry_under_a_running_clock_says_nothing_of_a_pause():
    bench = ClockBench()
    for _ in range(200):
        bench.tick(odometry=False)
    assert bench.run.outcome is RunOutcome.ODOMETRY_LOST and "paused" not in bench.run.sentence


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_watch_notices_a_clock_that_was_set(jump):
    watch = ClockWatch(Moment(5.0, 1e9))
    assert watch.jump(Moment(5.02, 1e9 + 0.02)) == 0.0
    assert watch.jump(Moment(5.04, 1e9 + 0.04 + jump)) == pytest.approx(jump, abs=1e-5)
    assert watch.set_within(1.0, 5.5) and not watch.set_within(1.0, 7.0)
    assert watch.jump(Moment(5.06, 1e9 + 0.06 + jump)) == 0.0


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0, 20.0])
def test_a_clock_watch_knows_simulated_rates_from_jumps(rate):
    watch = ClockWatch(Moment(0.0, 100.0))
    assert not any(watch.jump(Moment(0.04 * tick, 100.0 + 0.04 * tick * rate)) for tick in range(100))
    assert watch.stands(3.99) is (rate == 0.0)


@pytest.mark.parametrize("back", [0.2, 1.1, 1.6, 10.0, 1e6])
def test_the_supervisor_takes_the_next_action_after_the_clock_was_set_back(back):
    supervisor, now, base = Supervisor(), 10.0, 2e6
    supervisor.on_odometry(Pose(0.0, 0.0, 0.0), 1.0, now)
    act = (Action(ActionKind.FORWARD, 25), True)
    supervisor.on_clock(Moment(now, base + now))
    supervisor.on_action(*act, base + now - 0.4, base + now, now)
    causes = {cause for cause, _ in supervisor.decide(now).causes}
    assert Cause.STALE_REPLY not in causes
    for tick in range(1, 76):  # 1.5 s later, of it 0.3 s after the clock was set
        later = now + TICK_S * tick
        supervisor.on_clock(Moment(later, base + later - (back if tick > 60 else 0.0)))
    stamp = base + later - back
    supervisor.on_action(*act, stamp - 0.2, stamp, later)
    assert Cause.STALE_REPLY not in {cause for cause, _ in supervisor.decide(later).causes}
    supervisor.on_action(*act, stamp - 0.2, stamp, later)  # the same picture again
    assert Cause.STALE_REPLY in {cause for cause, _ in supervisor.decide(later).causes}


@pytest.mark.parametrize("stamp", [0.0, 12.5])
def test_a_sender_whose_stamp_stands_is_named(stamp):
    supervisor = Supervisor()
    for tick in range(100):
        now = 10.0 + TICK_S * tick
        supervisor.on_odometry(Pose(0.0, 0.0, 0.0), stamp, now)
        supervisor.on_picture(stamp, now)
    said = dict(supervisor.decide(now).causes)
    assert f"The odometry repeats the stamp {stamp:.3f}" in said[Cause.ODOMETRY_STALE]
    assert f"The camera repeats the stamp {stamp:.3f}" in said[Cause.CAMERA_STALE]
    said = dict(supervisor.decide(now + 1.0).causes)
    assert "silent" in said[Cause.ODOMETRY_STALE]
