# SPDX-License-Identifier: Apache-2.0
"""What a run does when the link is lost: stop, a few replies by the draft alone, or the way back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_bench import GO, SETTINGS, STOP, Bench, report, say

from dsd_ros.navigation.run.controller import AT_REST
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.retrace import AIMED, REACHED_M
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause

LONG = replace(SETTINGS, max_steps=40, time_limit_s=600.0)
DRAFT_ONLY = replace(LONG, fallback="draft_only")
RETURN = replace(LONG, fallback="return")
LOST = report(Cause.LINK_LOST)
WAIVED = report(Cause.LINK_LOST, waived=(Cause.LINK_LOST,))
SPEED, TURN = 0.4 * 0.5, math.radians(0.4 * 30.0)


def test_by_default_the_run_ends():
    bench = Bench(LONG)
    bench.answer(GO)
    assert not bench.asked[-1].allow_unverified
    bench.fail(RunOutcome.LINK_LOST, "The verifier does not answer.")
    assert (bench.run.outcome, bench.run.sentence) == (RunOutcome.LINK_LOST, "The verifier does not answer.")


@pytest.mark.parametrize("settings", [LONG, RETURN])
def test_an_unverified_reply_is_not_carried_out_unless_it_was_allowed(settings):
    bench = Bench(settings)
    bench.answer(GO, verified=False)
    assert bench.run.outcome is RunOutcome.LINK_LOST and not bench.run.steps
    assert "did not verify" in bench.run.sentence
    assert bench.tick() == AT_REST


def test_draft_only_allows_a_few_slow_replies_in_a_row():
    bench = Bench(DRAFT_ONLY)
    bench.answer(GO)
    bench.until_request()
    bench.safety = WAIVED
    assert bench.asked[-1].allow_unverified
    for _ in range(3):
        bench.answer(say("forward 50 cm"), verified=False)
        fastest = 0.0
        while bench.run.phase is Phase.EXECUTING:
            fastest = max(fastest, bench.tick().vx)
        assert fastest == pytest.approx(SPEED)
    assert [a.verified for a in bench.announcements] == [True, False, False, False]
    request = bench.until_request()
    assert not request.allow_unverified
    bench.fail(RunOutcome.LINK_LOST, "Gone.")
    assert bench.run.outcome is RunOutcome.LINK_LOST
    assert "The last 3 replies were by the draft alone" in bench.run.sentence


def test_a_verified_reply_resets_the_budget_and_time_outs_count_as_loss():
    bench = Bench(DRAFT_ONLY)
    bench.answer(GO, verified=False)
    bench.answer(GO, verified=True)
    for _ in range(3):
        bench.answer(GO, verified=False)
    assert not bench.until_request().allow_unverified
    assert bench.finish() is RunOutcome.LINK_LOST  # no answer comes
    assert len(bench.run.steps) == 5


def test_a_stop_by_the_drafts_word_alone_is_no_arrival():
    bench = Bench(DRAFT_ONLY)
    bench.answer(STOP, verified=False)
    bench.answer(STOP, verified=False)
    bench.fail(RunOutcome.LINK_LOST)
    assert bench.run.outcome is RunOutcome.LINK_LOST
    bench = Bench(DRAFT_ONLY)
    bench.answer(STOP, verified=False)
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED


@pytest.mark.parametrize("settings", [LONG, DRAFT_ONLY, RETURN])
def test_a_link_that_is_lost_on_the_way(settings):
    bench = Bench(settings)
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: bench.pose.x > 0.4)
    bench.safety = LOST
    assert bench.tick() == AT_REST
    bench.ticks(2.5)
    if settings is LONG:
        assert bench.run.phase is Phase.EXECUTING and bench.pose.x < 0.7
        bench.ticks(8.0)
        assert bench.run.outcome is RunOutcome.SAFETY_STOP
    elif settings is DRAFT_ONLY:
        assert bench.run.phase is Phase.DECODING and not bench.asked[-1].history
        assert len(bench.asked) == 2 and bench.asked[-1].allow_unverified
    else:
        assert bench.run.phase is Phase.RETRACING


def test_an_action_that_the_lost_link_held_goes_on_when_it_is_back():
    bench = Bench(LONG)
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: bench.pose.x > 0.4)
    bench.safety = LOST
    bench.ticks(6.0)
    assert len(bench.announcements) == 1 and bench.pose.x < 0.7
    bench.safety = report()
    bench.answer(STOP)
    assert bench.pose.x == pytest.approx(0.75, abs=0.03)
    assert bench.finish() is RunOutcome.ARRIVED and len(bench.announcements) == 2


def go_out(bench: Bench) -> None:
    for action in ["forward 75 cm", "turn left 45 degrees", "forward 50 cm", "turn right 30 degrees"]:
        bench.answer(say(action))
    bench.until_request()


def test_return_walks_back_to_where_the_run_began():
    bench = Bench(RETURN, lag=0.5)
    go_out(bench)
    away = math.hypot(bench.pose.x, bench.pose.y)
    assert away > 0.9
    bench.safety = LOST
    bench.fail(RunOutcome.LINK_LOST, "The verifier does not answer.")
    assert bench.run.phase is Phase.RETRACING
    bench.safety = WAIVED
    fastest = turning = 0.0
    while not bench.run.ended:
        command = bench.tick()
        fastest, turning = max(fastest, command.vx), max(turning, abs(command.wz))
        assert command == AT_REST or bench.run.action == bench.announcements[-1].action
    assert bench.run.outcome is RunOutcome.LINK_LOST
    assert bench.run.sentence == "The verifier does not answer. The robot stands where it began."
    assert math.hypot(bench.pose.x, bench.pose.y) < REACHED_M + 0.03
    assert abs(math.remainder(bench.pose.yaw, math.tau)) < AIMED + 0.03
    assert fastest <= SPEED + 1e-9 and turning <= max(TURN, math.radians(12.0)) + 1e-9
    legs = bench.announcements[4:]
    assert legs and all(leg.retracing and not leg.verified for leg in legs)
    assert [a.number for a in bench.announcements] == list(range(1, len(legs) + 5))
    assert len(bench.run.steps) == 4


def test_a_run_that_has_not_moved_yet_ends_at_once():
    bench = Bench(RETURN)
    bench.fail(RunOutcome.LINK_LOST, "Gone.")
    assert bench.finish() is RunOutcome.LINK_LOST
    assert bench.run.sentence == "Gone. The robot stands where it began."
    assert not bench.announcements


def test_the_run_goes_on_when_the_link_is_back():
    bench = Bench(RETURN)
    go_out(bench)
    bench.safety = LOST
    bench.fail(RunOutcome.DECODE_TIMEOUT)
    bench.safety = WAIVED
    bench.until(lambda: len(bench.announcements) == 8)
    bench.safety = report()
    back = bench.now
    request = bench.until_request()
    assert bench.now - back >= 1.0 and not request.history
    bench.answer(say("forward 25 cm"))
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED


def test_a_second_loss_leads_back_along_what_is_left_of_the_path():
    bench = Bench(RETURN)
    go_out(bench)
    for _ in range(2):
        bench.safety = LOST
        bench.fail(RunOutcome.LINK_LOST)
        bench.safety = WAIVED
        count = len(bench.announcements)
        bench.until(lambda count=count: len(bench.announcements) > count + 5)
        bench.safety = report()
        bench.answer(say("turn right 45 degrees"))
        bench.answer(say("forward 25 cm"))
        bench.until_request()
    bench.safety = LOST
    bench.fail(RunOutcome.LINK_LOST)
    bench.safety = WAIVED
    assert bench.finish(300.0) is RunOutcome.LINK_LOST
    assert math.hypot(bench.pose.x, bench.pose.y) < REACHED_M + 0.03


def test_a_way_back_that_is_blocked_or_held_ends():
    bench = Bench(RETURN)
    go_out(bench)
    bench.fail(RunOutcome.LINK_LOST)
    bench.safety, bench.blocked = WAIVED, True
    assert bench.finish() is RunOutcome.LINK_LOST
    assert "blocked" in bench.run.sentence
    bench = Bench(RETURN)
    go_out(bench)
    bench.fail(RunOutcome.LINK_LOST)
    bench.safety = LOST  # the supervisor's own fallback says no
    assert bench.finish() is RunOutcome.SAFETY_STOP


def test_a_cancel_ends_the_way_back_at_once():
    bench = Bench(RETURN)
    go_out(bench)
    bench.fail(RunOutcome.LINK_LOST)
    bench.safety = WAIVED
    bench.until(lambda: bench.command != AT_REST)
    bench.run.cancel()
    assert bench.tick() == AT_REST and bench.run.outcome is RunOutcome.CANCELLED


def test_the_answer_of_a_lost_link_that_comes_during_the_way_back_is_not_heard():
    bench = Bench(RETURN)
    go_out(bench)
    request = bench.asked[-1]
    bench.fail(RunOutcome.DECODE_TIMEOUT)
    bench.safety = WAIVED
    bench.ticks(1.0)
    bench.run.on_answer(request.number, DecodeAnswer(GO, request.not_before), bench.moment)
    assert bench.run.phase is Phase.RETRACING and len(bench.run.steps) == 4
