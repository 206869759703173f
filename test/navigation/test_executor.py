# SPDX-License-Identifier: Apache-2.0
"""Actions as another navigator's goals: one at a time, held, cancelled, refused, lost, and judged by odometry. Pure."""

from __future__ import annotations

import math
import random

import pytest
from run_bench import GO, STOP, DelegatedBench, report, say

from dsd_ros.navigation.run.executor import GoalEnd, GoalExecutor, Order
from dsd_ros.navigation.run.records import Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause


def test_every_action_becomes_one_goal_and_the_robot_gets_there():
    bench = DelegatedBench()
    bench.answer(GO)
    bench.answer(say("turn left 30 degrees"))
    bench.answer(say("turn right 15 degrees"))
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED
    amounts = [goal.amount for goal in bench.goals]
    assert amounts == pytest.approx([0.25, math.radians(30), math.radians(-15)])
    assert bench.pose.x == pytest.approx(0.25, abs=0.01) and bench.pose.yaw == pytest.approx(math.radians(15), abs=0.01)
    assert bench.goals[0].speed == 0.5 and bench.goals[0].time_allowance == pytest.approx(6.0)
    assert bench.goals[0].target.x == pytest.approx(0.25) and bench.goals[1].target.yaw == pytest.approx(
        0.5236, abs=1e-3
    )
    assert bench.run.distance == pytest.approx(0.25, abs=0.01) and not bench.alarms


def test_a_hold_cancels_the_goal_and_what_is_left_follows():
    bench = DelegatedBench()
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: bench.pose.x > 0.3)
    bench.safety = report(Cause.OBSTACLE)
    bench.ticks(0.1)
    assert not bench.executor.busy
    stood = bench.pose.x
    bench.ticks(1.0)
    assert bench.pose.x == stood and len(bench.goals) == 1
    bench.safety = report()
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED
    assert len(bench.goals) == 2 and bench.goals[1].amount == pytest.approx(0.75 - stood, abs=0.02)
    assert bench.pose.x == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("stop", ["cancel", "emergency", "operator"])
def test_what_stops_the_run_cancels_the_goal(stop):
    bench = DelegatedBench()
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: bench.pose.x > 0.3)
    if stop == "cancel":
        bench.run.cancel()
    else:
        bench.safety = report(Cause.EMERGENCY_STOP if stop == "emergency" else Cause.OPERATOR)
    bench.ticks(0.1)
    assert not bench.executor.busy and bench.left is None and bench.pose.x < 0.4
    outcomes = {"cancel": RunOutcome.CANCELLED, "emergency": RunOutcome.SAFETY_STOP, "operator": RunOutcome.UNKNOWN}
    assert bench.run.outcome is outcomes[stop] and not bench.alarms


def test_aborted_goals_are_blocked_actions():
    bench = DelegatedBench()
    bench.end, bench.share = (GoalEnd.FAILED, "Nav2 aborted the goal (error 723)"), 0.2
    for _ in range(3):
        bench.answer(GO)
    assert bench.finish() is RunOutcome.STUCK
    assert bench.run.sentence.endswith("blocked 3 times in a row. The last time Nav2 aborted the goal (error 723).")


def test_success_that_odometry_does_not_show_is_a_blocked_action():
    bench = DelegatedBench()
    bench.share = 0.2
    for _ in range(3):
        bench.answer(say("turn left 45 degrees"))
    assert bench.finish() is RunOutcome.STUCK and "by odometry" in bench.run.sentence
    assert len(bench.goals) == 3


def test_a_cancel_by_somebody_else_is_a_blocked_action():
    bench = DelegatedBench()
    bench.end = (GoalEnd.CANCELLED, "")
    bench.answer(GO)
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED and len(bench.goals) == 1


@pytest.mark.parametrize(
    ("fault", "sentence", "alarms"),
    [
        ("answers", "Nav2 has not answered the goal 'forward 25 cm' within 3.0 s.", 1),
        ("ready", "No Nav2 server takes the goal 'forward 25 cm': start and activate Nav2.", 0),
        ("cancels", "Nav2 has not answered the cancelling of its goal 'forward 25 cm' within 3.0 s.", 1),
    ],
)
def test_a_navigator_that_does_not_answer_ends_the_run(fault, sentence, alarms):
    bench = DelegatedBench(safety_patience_s=30.0)
    setattr(bench, fault, False)
    bench.answer(GO)
    bench.tick()
    if fault == "cancels":
        bench.ticks(0.1)
        bench.safety = report(Cause.OBSTACLE)
    bench.left = None  # it has died
    began = bench.now
    assert bench.finish() is RunOutcome.EXECUTOR_FAILED
    assert bench.run.sentence == sentence and bench.now - began < 3.3 and bench.alarms == alarms
    assert not bench.executor.busy


def test_a_goal_that_takes_too_long_is_cancelled_and_counts_as_blocked(monkeypatch):
    monkeypatch.setattr("dsd_ros.navigation.run.run._MOST_STUCK", 1)
    bench = DelegatedBench()
    bench.share = 0.5
    bench.answer(GO)
    bench.tick()
    bench.left = math.inf  # it will never be done
    bench.drive = lambda speed: None
    assert bench.finish() is RunOutcome.STUCK and "in time" in bench.run.sentence
    assert not bench.executor.busy and not bench.alarms


def test_a_cancel_that_overtakes_the_acceptance_takes_effect_after_it():
    executor = GoalExecutor()
    executor.start(_goal(executor))
    assert executor.take_order(True) is Order.SEND
    executor.stop()
    assert executor.take_order(True) is None and executor.busy
    executor.on_answer(executor.number, True)
    assert executor.take_order(True) is Order.CANCEL
    executor.on_result(executor.number, GoalEnd.SUCCEEDED)
    assert executor.take_end() == (GoalEnd.CANCELLED, "") and not executor.busy


def _goal(executor):
    bench = DelegatedBench()
    bench.answer(GO)
    bench.tick()
    return bench.goals[0]


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_there_is_one_goal_at_a_time_and_none_after_the_end(seed):
    """Holds, operators, cancels, aborts, deafness and silence at random; DelegatedBench checks the rest."""
    chance = random.Random(seed)
    bench = DelegatedBench(max_steps=20)
    replies = [GO, say("forward 75 cm"), say("turn left 45 degrees"), say("turn right 15 degrees")]
    while not bench.run.ended and bench.now < 200.0:
        bench.safety = report(*chance.choice([(), (), (), (Cause.OBSTACLE,), (Cause.OPERATOR,)]))
        bench.end = chance.choice([(GoalEnd.SUCCEEDED, ""), (GoalEnd.FAILED, "Nav2 aborted the goal")])
        bench.share = chance.choice([1.0, 1.0, 0.3])
        bench.answers = chance.random() > 0.02
        for _ in range(chance.randrange(60)):
            if bench.run.phase is Phase.DECODING and bench.pending:
                bench.answer(chance.choice(replies))
            bench.tick()
        if chance.random() < 0.02:
            bench.run.cancel()
    sent = len(bench.goals)
    bench.answers = True
    bench.ticks(8.0)
    assert len(bench.goals) == sent and bench.left is None and not bench.executor.busy
