# SPDX-License-Identifier: Apache-2.0
"""Replies of several actions: each is announced and supervised, and a newer reply that says otherwise ends them."""

from __future__ import annotations

import math

import pytest
from run_bench import Bench, report

from dsd_ros.navigation.run.actions import PRESETS, Action, ActionKind, parse_reply
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.settings import RunOutcome, RunSettings
from dsd_ros.navigation.safety.causes import Cause, Motion, SafetyLimits
from dsd_ros.navigation.safety.guard import ActionGuard

ARROWS = PRESETS["streamvln"]
FORWARD, LEFT = ActionKind.FORWARD, ActionKind.TURN_LEFT


def bench(look_ahead: bool = False, **settings) -> Bench:
    return Bench(RunSettings(look_ahead=look_ahead, **settings), grammar=ARROWS)


def kinds(made: Bench) -> list[ActionKind]:
    return [each.action.kind for each in made.announcements]


def reply_to_the_second_look(made: Bench, text: str, verified: bool = True) -> None:
    """Answer what was asked between the reply's first and second action, while the second is carried out."""
    made.until(lambda: len(made.announcements) == 2)
    made.ticks(0.3)
    request = made.asked[-1]
    made.run.on_answer(request.number, DecodeAnswer(text, request.not_before, verified, "newer"), made.moment)


def test_each_action_is_announced_in_turn_without_waiting_for_a_reply():
    made = bench()
    made.answer("↑←↑")
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD, LEFT, FORWARD]
    assert [each.number for each in made.announcements] == [1, 2, 3]
    assert made.pose.x == pytest.approx(0.25 + 0.25 * math.cos(math.radians(15)), abs=0.03)
    assert math.degrees(made.pose.yaw) == pytest.approx(15, abs=1.5)
    # What was carried out is the next request's history.
    made.until_request()
    assert [step.reply.action.kind for step in made.asked[-1].history] == [FORWARD, LEFT, FORWARD]
    made.answer("STOP")
    assert made.finish() is RunOutcome.ARRIVED


def test_a_newer_reply_that_agrees_says_what_follows():
    made = bench()
    made.answer("↑↑↑↑")
    reply_to_the_second_look(made, "↑←STOP")
    assert made.finish() is RunOutcome.ARRIVED
    assert kinds(made) == [FORWARD, FORWARD, LEFT, ActionKind.STOP]
    assert [step.details for step in made.run.steps[1:]] == ["newer"] * 3


def test_what_an_aged_newer_reply_said_is_not_carried_out():
    made = bench(max_observation_age_s=0.9)
    made.answer("↑↑")
    reply_to_the_second_look(made, "↑←")
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD, FORWARD]


def test_a_newer_reply_that_says_otherwise_drops_the_rest_and_the_robot_looks_again():
    made = bench()
    made.answer("↑↑↑↑")
    reply_to_the_second_look(made, "←")
    assert made.run.phase is Phase.SETTLING
    asked = len(made.asked)
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD, FORWARD] and len(made.asked) == asked + 1
    assert 0.25 < made.pose.x < 0.45


@pytest.mark.parametrize(("newer", "then"), [("←STOP", [LEFT, ActionKind.STOP]), ("↑↑STOP", [FORWARD] * 3)])
def test_what_is_said_of_a_picture_taken_in_motion_replaces_the_rest_of_the_reply(newer, then):
    made = bench(look_ahead=True)
    made.answer("↑→→→")
    made.until(lambda: made.pending)
    assert made.asked[-1].ahead
    made.run.on_answer(made.asked[-1].number, DecodeAnswer(newer, made.moment.stamp, True, "newer"), made.moment)
    made.until(lambda: len(made.announcements) == 3)
    assert kinds(made) == [FORWARD, *then][:3]
    assert abs(math.degrees(made.pose.yaw)) < 20.0


def test_without_a_reply_in_motion_the_sequence_goes_on():
    made = bench(look_ahead=True)
    made.answer("↑→↑")
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD, ActionKind.TURN_RIGHT, FORWARD]


def test_an_unverified_newer_reply_changes_nothing_and_one_outside_the_grammar_ends_the_run():
    made = bench(fallback="draft_only")
    made.answer("↑↑↑")
    reply_to_the_second_look(made, "←", verified=False)
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD] * 3
    made = bench()
    made.answer("↑↑↑")
    reply_to_the_second_look(made, "jump")
    assert made.run.outcome is RunOutcome.UNPARSABLE_REPLY


def test_a_failed_second_look_does_not_end_a_reply_that_is_verified():
    made = bench()
    made.answer("↑↑")
    made.until(lambda: len(made.announcements) == 2)
    made.run.on_failure(made.asked[-1].number, RunOutcome.LINK_LOST, "Gone.")
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD, FORWARD] and not made.run.ended


def test_of_an_unverified_reply_only_the_first_action_is_carried_out():
    made = bench(fallback="draft_only")
    made.answer("↑↑↑↑", verified=False)
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD]


def test_nothing_goes_on_after_an_operator_a_block_or_the_budget():
    made = bench()
    made.answer("↑↑↑↑")
    made.until(lambda: made.run.phase is Phase.EXECUTING)
    made.safety = report(Cause.OPERATOR)
    made.ticks(0.5)
    made.safety = report()
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD]
    made = bench()
    made.blocked = True
    made.answer("↑↑↑↑")
    made.until(lambda: made.run.phase is Phase.DECODING)
    assert kinds(made) == [FORWARD]
    made = bench(max_steps=2)
    made.answer("↑↑↑↑")
    assert made.finish() is RunOutcome.STEP_BUDGET and kinds(made) == [FORWARD, FORWARD]


class Guarded:
    """A guard, and announcements about one picture or another."""

    def __init__(self) -> None:
        self.guard, self.now = ActionGuard(SafetyLimits(), "stop"), 50.0
        self.guard.pose(Pose(0.0, 0.0, 0.0))

    def announce(self, text: str, observed: float, after: float = 3.0, verified: bool = True) -> bool:
        self.now += after
        action = parse_reply(text, ARROWS).action
        self.guard.announce(action, verified, observed, self.now + 1000.0, self.now)
        return self.guard.action is action


def test_the_guard_admits_the_actions_of_one_reply_and_no_more():
    made = Guarded()
    picture = made.now + 1000.0
    assert [made.announce("↑", picture) for _ in range(5)] == [True, True, True, True, False]  # the last is 12 s later
    assert made.guard.refusal[0] is Cause.STALE_REPLY
    assert not made.announce("↑", picture)  # a refusal ends the sequence
    assert made.announce("↑", made.now + 1000.0)  # a fresh picture begins another


def test_the_guard_ends_a_sequence_with_a_refusal_an_operator_or_a_long_pause():
    made = Guarded()
    picture = made.now + 1000.0
    assert made.announce("↑", picture, after=0.1)
    made.guard.judge(Motion(-0.4), made.now)
    assert made.guard.refusal and not made.announce("↑", picture, after=0.1)
    made = Guarded()
    picture = made.now + 1000.0
    assert made.announce("↑", picture, after=0.1)
    made.guard.taken_over()
    assert not made.announce("↑", picture, after=0.1)
    made = Guarded()
    picture = made.now + 1000.0
    assert made.announce("↑", picture, after=0.1) and not made.announce("↑", picture, after=30.0)
    made = Guarded()
    assert made.announce("↑", made.now + 1000.0, after=0.1)
    assert not made.announce("↑", made.now + 1000.0, after=0.1, verified=False)
    made = Guarded()
    made.guard.adopt(SafetyLimits(), "draft_only")
    picture = made.now + 1000.0
    assert made.announce("↑", picture, after=0.1, verified=False) and not made.announce("↑", picture, after=0.1)


def test_a_grammar_of_one_action_a_reply_has_no_second_one_about_a_picture():
    guard = ActionGuard(SafetyLimits(), "stop")
    for taken in (True, False):
        guard.announce(Action(FORWARD, 25), True, 1050.0, 1050.1, 50.1)
        assert (guard.refusal is None) is taken
