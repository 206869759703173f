# SPDX-License-Identifier: Apache-2.0
"""The judge of the fault bench reports every kind of violation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dsd_lab.faults.judge import (
    Announced,
    Command,
    Record,
    SeenPose,
    SupervisorVerdict as Verdict,
    difference,
    first_cause,
    judge,
    late_motion,
    moving_at,
    stop_after,
)
from dsd_ros.navigation.run.actions import Action, ActionKind

FORWARD, LEFT, STOP = (Action(ActionKind.FORWARD, 50), Action(ActionKind.TURN_LEFT, 30), Action(ActionKind.STOP))


def announced(at: float, step: int, action: Action | None, **changes) -> Announced:
    made = Announced(at, 1, step, action, True, False, "I see it.", round(at * 1e9))
    return replace(made, **changes)


def drive(begin: float, end: float, vx: float = 0.4, wz: float = 0.0) -> list[Command]:
    """Commands 25 times a second, and a zero after them."""
    count = round((end - begin) * 25)
    moving = [Command(begin + index / 25, vx, 0.0, wz) for index in range(count)]
    return [*moving, Command(end, 0.0, 0.0, 0.0)]


def poses(begin: float, end: float, speed: float, x: float = 0.0) -> list[SeenPose]:
    count = round((end - begin) * 50)
    return [SeenPose(begin + i / 50, x + speed * i / 50, 0.0, 0.0, speed, 0.0) for i in range(count)]


@pytest.fixture
def good() -> Record:
    """A drive, a turn, a stop."""
    return Record(
        commands=drive(1.0, 2.0) + drive(3.0, 4.0, 0.0, 0.5),
        poses=poses(0.9, 2.0, 0.4) + poses(2.0, 6.0, 0.0, 0.44),
        verdicts=[Verdict(at / 5, False, ()) for at in range(30)],
        actions=[announced(0.95, 1, FORWARD), announced(2.95, 2, LEFT), announced(4.5, 3, STOP)],
    )


def test_a_good_run_has_nothing_wrong(good):
    assert judge(good) == []
    good.actions.append(announced(5.0, 1, STOP, run=2))  # a new run counts from one
    assert judge(good) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"verified": False}, "was not verified"),
        ({"retracing": True}, "no model's word"),
        ({"action": None}, "none of the grammar's"),
        ({"step": 1}, "came where action 2 was due"),
        ({"step": 3}, "came where action 2 was due"),
        ({"picture": round(0.95e9)}, "had been answered before"),
    ],
)
def test_wrong_announcements(good, change, sentence):
    good.actions[1] = replace(good.actions[1], **change)
    assert any(sentence in found for found in judge(good))


def test_unannounced_motion(good):
    good.commands.append(Command(5.0, 0.3, 0.0, 0.0))  # behind the stop
    assert any("under Action" in found for found in judge(good))
    assert any("no action" in f for f in judge(Record(commands=[Command(1.0, 0.1, 0.0, 0.0)])))


def test_driving_under_a_turn(good):
    good.commands[30] = Command(3.2, 0.3, 0.0, 0.2)
    assert any("(0.30, 0.00 m/s" in found for found in judge(good))


def test_commands_and_actions_may_overtake_each_other_a_little(good):
    good.actions[0] = replace(good.actions[0], at=1.05)
    good.actions[1] = replace(good.actions[1], at=1.99)
    assert judge(good) == []


def test_going_further_than_the_action_says(good):
    good.poses = poses(0.9, 2.9, 0.5)
    assert any("went" in found for found in judge(good))
    turned = [SeenPose(1.0 + i / 50, 0.0, 0.0, i * 0.05, 0.0, 0.5) for i in range(20)]
    good.poses = turned
    assert any("turned 54 degrees" in found for found in judge(good))


def test_being_carried_back_is_no_overshoot(good):
    good.poses += [SeenPose(7.0, -3.0, 2.0, math.pi, 0.0, 0.0)]
    assert judge(good) != []
    good.resets = [6.9]
    assert judge(good) == []


def test_motion_against_the_supervisors_word(good):
    good.verdicts = [Verdict(0.2, False, ()), Verdict(1.2, True, ("TILT",))]
    assert any("into a stop of the supervisor" in found for found in judge(good))
    good.verdicts = [Verdict(1.6, True, ("TILT",))]  # it may take half a second
    good.commands = drive(1.0, 2.0)
    assert judge(good) == []


def test_a_stop_is_timed_to_the_zero_after_the_last_motion():
    record = Record(commands=drive(0.0, 2.0), poses=poses(0.0, 2.2, 0.4) + poses(2.2, 4.0, 0.0, 0.88))
    stop = stop_after(record, 1.65, 4.0)
    assert stop.commanded_s == pytest.approx(0.35)
    assert stop.rest_s == pytest.approx(0.53, abs=0.011)
    assert late_motion(record, 1.65, 4.0) == []
    assert late_motion(record, 1.2, 4.0) == [
        "motion was commanded until 0.76 s after the cause",
        "the base moved until 0.98 s after the cause",
    ]


def test_a_silence_ends_commands_and_there_is_nothing_to_time_when_the_robot_stood():
    record = Record(commands=drive(0.0, 2.0)[:-1])
    assert stop_after(record, 1.9, 4.0).commanded_s == pytest.approx(0.06)
    assert stop_after(record, 1.9, 4.0).rest_s is None
    record = Record(commands=drive(0.0, 1.0))
    assert not moving_at(record, 1.1) and not moving_at(record, 3.0) and moving_at(record, 0.5)
    assert stop_after(record, 1.1, 4.0).commanded_s is None


def test_the_first_cause_after_a_fault():
    verdicts = [Verdict(1.0, True, ("TILT",)), Verdict(2.0, False, ()), Verdict(3.0, True, ("LINK_LOST",))]
    record = Record(verdicts=verdicts)
    assert first_cause(record, 1.5, 9.0) == (3.0, ("LINK_LOST",))
    assert first_cause(record, 1.5, 2.5) is None


def test_actions_are_compared_with_the_targets_own():
    for action, heard, text, sentence in [
        (FORWARD, None, "I see it. Action: forward 50 cm", ""),
        (FORWARD, ("I see it. Action: forward 50 cm", 9), "I see it. Action: forward 50 cm", ""),
        (FORWARD, None, "I see it. Action: forward 75 cm", "the target says"),
        (FORWARD, None, "I saw it. Action: forward 50 cm", "the target says"),
        (FORWARD, None, "I see it.", "says nothing that may be"),
        (FORWARD, ("I see it. Action: forward 50 cm", 8), "I see it. Action: forward 50 cm", "the reply was"),
    ]:
        found = difference(announced(1.0, 1, action), heard, (text, 9))
        assert (sentence in found) if sentence else found == ""
