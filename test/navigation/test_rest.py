# SPDX-License-Identifier: Apache-2.0
"""Pictures are taken at rest, and errors of single actions do not add up over a run."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings as hypothesis_settings, strategies as st
from run_bench import SETTINGS, Bench, say

from dsd_ros.navigation.run.actions import all_actions
from dsd_ros.navigation.run.controller import AT_REST
from dsd_ros.navigation.run.records import DecodeAnswer

LONG = replace(SETTINGS, max_steps=40)


def test_nothing_is_asked_of_a_robot_that_moves():
    bench = Bench(LONG)
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: len(bench.asked) == 2)
    assert bench.velocity == AT_REST


@given(
    actions=st.lists(st.sampled_from([a for a in all_actions() if a.radians or a.metres]), min_size=2, max_size=6),
    lag=st.floats(0.0, 0.7),
    delay=st.floats(0.02, 1.0),
)
@hypothesis_settings(max_examples=40)
def test_errors_do_not_add_up_over_a_run(actions, lag, delay):
    with patch.multiple("dsd_ros.navigation.run.run", _MOST_REVERSALS=40, _MOST_REPEATS=20):
        bench = Bench(LONG, lag=lag)
    seen_from = bench.pose
    answered, checked, due, limit = 0, 0, math.inf, bench.now + 200.0
    while checked < len(actions):
        bench.tick()
        assert bench.now < limit and not bench.run.ended
        if len(bench.asked) > answered and due == math.inf:
            due = bench.now + delay
        steps = bench.run.steps
        if bench.now >= due:
            request, answered, due = bench.asked[-1], len(bench.asked), math.inf
            text = say(_phrase(actions[len(steps) % len(actions)]))
            answer = DecodeAnswer(text, request.not_before, True, request.number)
            bench.run.on_answer(request.number, answer, bench.moment)
            bench.listen()
        if len(steps) > checked + 1:  # the next one begins: that before it is over
            step, checked = steps[checked], checked + 1
            assert step.observation_age <= LONG.max_observation_age_s
            turned = math.remainder(bench.pose.yaw - seen_from.yaw, math.tau)
            seen_from = bench.pose
            off = math.remainder(turned - step.reply.action.radians, math.tau)
            assert abs(off) < math.radians(4.0)
    used = [step.details for step in bench.run.steps]
    assert len(set(used)) == len(used)  # no answer twice


def _phrase(action) -> str:
    unit = "cm" if action.metres else "degrees"
    return f"{action.kind.value} {action.amount} {unit}"
