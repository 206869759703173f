"""Pictures taken before the rest: what is decided about them is carried out from where they were taken."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from run_bench import GO, SETTINGS, STOP, Bench, say

from dsd_ros.navigation.actions import all_actions, parse_action
from dsd_ros.navigation.controller import AT_REST, MotionController, MotionSettings, Pose, Velocity
from dsd_ros.navigation.motion import PoseTrack, still_fits
from dsd_ros.navigation.records import DecodeAnswer, Phase
from dsd_ros.navigation.settings import RunOutcome

AHEAD = replace(SETTINGS, look_ahead_s=0.4, max_steps=40)


def answer_ahead(bench: Bench, text: str, verified: bool = True) -> Pose:
    """Answer the next request, which comes while the robot moves, at once; returns the picture's pose."""
    count = len(bench.asked)
    bench.until(lambda: len(bench.asked) > count)
    assert bench.run.phase is Phase.EXECUTING and bench.velocity != AT_REST
    request, seen_from = bench.asked[-1], bench.before
    bench.run.on_answer(request.number, DecodeAnswer(text, request.not_before, verified, object()), bench.moment)
    return seen_from


class Watched(Bench):
    """Remembers the pose that the run was told last."""

    before = Pose(0.0, 0.0, 0.0)

    def measured(self) -> Pose:
        self.before = self.pose
        return self.pose


def carried_out(bench: Bench, count: int) -> None:
    bench.until(lambda: len(bench.announcements) > count)
    assert bench.velocity == AT_REST or bench.velocity.vx < 0.02
    bench.until(lambda: bench.run.phase is Phase.DECODING and bench.command == AT_REST)


@pytest.mark.parametrize("first", ["forward 75 cm", "turn left 45 degrees", "turn right 45 degrees"])
@pytest.mark.parametrize("then", ["forward 50 cm", "turn left 30 degrees", "turn right 30 degrees"])
def test_an_action_counts_from_the_pose_of_its_picture(first, then):
    bench = Watched(AHEAD)
    bench.answer(say(first))
    seen_from = answer_ahead(bench, say(then))
    assert len(bench.run.steps) == 1  # nothing begins before the robot stands
    carried_out(bench, 1)
    action = parse_action(then)
    turned = math.remainder(bench.pose.yaw - seen_from.yaw, math.tau)
    assert turned == pytest.approx(action.radians, abs=math.radians(1.5))
    if action.metres:
        goal = (
            seen_from.x + action.metres * math.cos(seen_from.yaw),
            seen_from.y + action.metres * math.sin(seen_from.yaw),
        )
        assert math.dist(goal, (bench.pose.x, bench.pose.y)) < 0.04
    assert bench.announcements[1].standing_seconds == pytest.approx(0.1, abs=0.03)


def test_the_look_ahead_is_kept():
    bench = Watched(AHEAD)
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: len(bench.asked) == 2)
    asked = bench.now
    bench.until(lambda: bench.velocity == AT_REST)
    assert 0.2 < bench.now - asked <= 0.4 + 0.05


def test_a_stop_before_the_rest_is_asked_for_again_at_rest():
    bench = Watched(AHEAD)
    bench.answer(say("forward 75 cm"))
    answer_ahead(bench, STOP)
    request = bench.until_request()
    assert request.number == 3 and bench.velocity == AT_REST and len(bench.run.steps) == 1
    bench.answer(STOP)
    assert bench.finish() is RunOutcome.ARRIVED


def test_what_no_longer_fits_is_asked_for_again():
    bench = Watched(replace(AHEAD, look_ahead_s=1.0))
    bench.answer(say("turn left 45 degrees"))
    answer_ahead(bench, say("turn left 15 degrees"))  # by then it has turned further than that
    assert bench.until_request().number == 3 and len(bench.run.steps) == 1


def test_without_look_ahead_nothing_is_asked_of_a_robot_that_moves():
    bench = Watched(replace(AHEAD, look_ahead_s=0.0))
    bench.answer(say("forward 75 cm"))
    bench.until(lambda: len(bench.asked) == 2)
    assert bench.velocity == AT_REST


@given(
    actions=st.lists(st.sampled_from([a for a in all_actions() if a.radians or a.metres]), min_size=2, max_size=6),
    look_ahead=st.floats(0.0, 1.5),
    lag=st.floats(0.0, 0.7),
    delay=st.floats(0.02, 1.0),
)
@hypothesis_settings(max_examples=40)
def test_errors_do_not_add_up_over_a_run(actions, look_ahead, lag, delay):
    settings = replace(AHEAD, look_ahead_s=look_ahead, max_reversals=40, max_repeats=20)
    bench = Bench(settings, lag=lag)
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
            assert step.observation_age <= settings.max_observation_age_s
            seen_from = bench.run._robot.track.at(step.observed_at)
            if seen_from is not None:  # not too long ago
                turned = math.remainder(bench.pose.yaw - seen_from.yaw, math.tau)
                off = math.remainder(turned - step.reply.action.radians, math.tau)
                assert abs(off) < math.radians(4.0)
    used = [step.details for step in bench.run.steps]
    assert len(set(used)) == len(used)  # no answer twice


def _phrase(action) -> str:
    unit = "cm" if action.metres else "degrees"
    return f"{action.kind.value} {action.amount} {unit}"


def test_a_track_knows_where_the_robot_was_between_two_poses():
    track = PoseTrack()
    assert track.at(1.0) is None
    track.add(1.0, Pose(0.0, 0.0, 3.1))
    track.add(1.1, Pose(1.0, 2.0, -3.1))
    assert track.at(1.0) == Pose(0.0, 0.0, 3.1)
    middle = track.at(1.05)
    assert (middle.x, middle.y) == (pytest.approx(0.5), pytest.approx(1.0))
    assert abs(math.remainder(middle.yaw - math.pi, math.tau)) < 1e-9
    assert track.at(0.9) is None and track.at(1.2) is None
    track.add(1.05, Pose(9.0, 9.0, 9.0))  # late: it is left out
    assert track.at(1.05) == middle
    track.add(2.0, Pose(0.0, 0.0, 0.0))
    assert track.at(1.5) is None  # too far from both
    track.add(30.0, Pose(5.0, 0.0, 0.0))
    assert track.at(1.05) is None  # long ago
    track.add(2.0, Pose(7.0, 0.0, 0.0))  # that clock was set back
    assert track.at(2.0) == Pose(7.0, 0.0, 0.0) and track.at(30.0) is None


@pytest.mark.parametrize(
    ("phrase", "pose", "expected"),
    [
        ("forward 50 cm", Pose(0.2, 0.0, 0.0), True),
        ("forward 25 cm", Pose(0.3, 0.0, 0.0), False),
        ("forward 50 cm", Pose(0.0, 0.0, math.radians(20)), False),
        ("turn left 30 degrees", Pose(0.0, 0.0, math.radians(-10)), True),
        ("turn left 30 degrees", Pose(0.1, 0.0, math.radians(10)), True),
        ("turn right 15 degrees", Pose(0.0, 0.0, math.radians(-14.9)), True),
        ("turn right 15 degrees", Pose(0.0, 0.0, math.radians(-16)), False),
        ("stop", Pose(0.0, 0.0, 0.0), False),
        ("forward 75 cm", Pose(0.5, 0.0, 0.0), False),
    ],
)
def test_what_fits(phrase, pose, expected):
    assert still_fits(parse_action(phrase), Pose(0.0, 0.0, 0.0), pose) is expected


@pytest.mark.parametrize("phrase", ["forward 75 cm", "turn left 45 degrees", "turn right 15 degrees"])
def test_the_time_that_is_left_is_known(phrase):
    settings, pose, now = MotionSettings(), Pose(0.0, 0.0, 0.0), 0.0
    controller = MotionController(parse_action(phrase), settings, pose, now)
    said = []
    while not controller.finished:
        command = controller.update(pose, AT_REST, now)
        said.append((now, controller.time_left))
        now += 0.02
        yaw = pose.yaw + command.wz * 0.02
        pose = Pose(pose.x + command.vx * 0.02, pose.y, yaw)
    stood = next(time for time, left in said if left == 0.0)
    for time, left in said[2:]:
        assert left == pytest.approx(max(0.0, stood - time), abs=0.3)


def test_a_drive_that_begins_askew_turns_into_its_direction_first():
    pose, now = Pose(0.1, 0.02, math.radians(12)), 0.0
    drive = MotionController(parse_action("forward 50 cm"), MotionSettings(), pose, now, origin=Pose(0.0, 0.0, 0.0))
    velocity = Velocity()
    while not drive.finished:
        velocity = drive.update(pose, velocity, now)
        if abs(math.degrees(pose.yaw)) > 3.0:
            assert velocity.vx == 0.0 and velocity.wz <= 0.0
        now += 0.02
        yaw = pose.yaw + velocity.wz * 0.02
        way = velocity.vx * 0.02
        pose = Pose(pose.x + way * math.cos(yaw), pose.y + way * math.sin(yaw), yaw)
    assert pose.x == pytest.approx(0.5, abs=0.02) and abs(pose.y - 0.02) < 0.02
    assert drive.travelled == pytest.approx(0.4, abs=0.02)
    stuck = MotionController(parse_action("forward 50 cm"), MotionSettings(), Pose(0.0, 0.0, 0.2), 0.0, Pose(0, 0, 0))
    while not stuck.finished:
        now += 0.02
        stuck.update(Pose(0.0, 0.0, 0.2), AT_REST, now)
    assert stuck.status.value == "stuck" and GO
