# SPDX-License-Identifier: Apache-2.0
"""Runs without progress are detected; runs with progress are not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from run_bench import GO, SETTINGS, Bench, say

from dsd_ros.navigation.run.actions import ActionKind, all_actions, parse_action
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.motion import OscillationDetector
from dsd_ros.navigation.run.settings import RunOutcome

MOVES = [action for action in all_actions() if action.kind is not ActionKind.STOP]


def test_turning_to_and_fro_ends_the_run():
    bench = Bench(replace(SETTINGS, max_steps=20))
    for side in ("left", "right", "left", "right"):
        bench.answer(say(f"turn {side} 30 degrees"))
    bench.answer(say("turn left 30 degrees"))
    assert bench.finish() is RunOutcome.OSCILLATING
    assert len(bench.run.steps) == 4 and "gets nowhere" in bench.run.sentence
    assert abs(bench.pose.yaw) < 0.05


def test_deciding_the_same_at_the_same_place_ends_the_run(monkeypatch):
    monkeypatch.setattr("dsd_ros.navigation.run.run._MOST_REVERSALS", 40)
    bench = Bench(replace(SETTINGS, max_steps=60))
    there_and_back = [GO, *[say("turn left 45 degrees")] * 4] * 2
    for text in there_and_back * 2:
        bench.answer(text)
    bench.answer(GO)
    assert bench.finish() is RunOutcome.OSCILLATING
    assert "'forward 25 cm' was decided 3 times at the same place" in bench.run.sentence


def test_turning_round_and_round_ends_the_run():
    watch = OscillationDetector(repeats=50, reversals=20)
    turn = parse_action("turn right 45 degrees")
    counted = 0
    pose = Pose(0.0, 0.0, 0.0)
    while not watch.refuses(pose, turn):
        watch.carried_out(pose, turn)
        counted += 1
    assert counted == 20  # two and a half times round


def test_looking_round_then_driving_is_no_oscillation():
    watch = OscillationDetector(repeats=3, reversals=4)
    x, yaw = 0.0, 0.0
    for _ in range(10):
        for phrase in ["turn left 45 degrees"] * 3 + ["turn right 15 degrees", "forward 50 cm"]:
            action, pose = parse_action(phrase), Pose(x, 0.0, yaw)
            assert not watch.refuses(pose, action)
            watch.carried_out(pose, action)
            yaw += action.radians
            x += action.metres


def test_blocked_actions_are_stuck_and_not_oscillating(monkeypatch):
    monkeypatch.setattr("dsd_ros.navigation.run.run._MOST_REPEATS", 2)
    bench = Bench(blocked=True)
    for _ in range(3):
        bench.answer(GO)
    assert bench.finish() is RunOutcome.STUCK


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.sampled_from(MOVES)), max_size=30))
def test_a_stop_is_never_refused_and_a_place_seen_once_neither(decisions):
    watch = OscillationDetector(repeats=2, reversals=50)
    stop = parse_action("stop")
    for index, (dx, dy, action) in enumerate(decisions):
        pose = Pose(10.0 * index + dx, dy, 0.0)
        assert not watch.refuses(pose, stop)
        if "same place" in watch.refuses(pose, action):
            raise AssertionError(f"{pose} was never visited before")
        watch.carried_out(pose, action)
        assert "same place" in watch.refuses(pose, action)


@pytest.mark.parametrize(("degrees", "same"), [(7.0, True), (-7.0, True), (8.0, False)])
def test_headings_are_compared_round_the_circle(degrees, same):
    watch = OscillationDetector(repeats=2, reversals=50)
    action = parse_action("forward 25 cm")
    watch.carried_out(Pose(0.0, 0.0, math.pi), action)
    again = Pose(0.05, 0.0, -math.pi + math.radians(degrees))
    assert bool(watch.refuses(again, action)) is same
