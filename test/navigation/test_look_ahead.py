# SPDX-License-Identifier: Apache-2.0
"""Looking ahead: a reply about a picture taken in motion counts from its place, or the robot looks again at rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from run_bench import GO, SETTINGS, STOP, TICK_S, Bench, report, say

from dsd_ros.navigation.run.controller import AT_REST, MotionSettings, Pose, Velocity
from dsd_ros.navigation.run.records import DecodeAnswer, Phase
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.run.track import PoseTrack
from dsd_ros.navigation.safety.causes import REFUSALS, Cause, Motion, Requirements
from dsd_ros.navigation.safety.supervisor import Supervisor

AHEAD = replace(SETTINGS, look_ahead=True, max_steps=20)
REPLY_S = 0.3
FAR = say("forward 75 cm")


class Walk(Bench):
    """A robot that looks ahead. A reply about the picture of a request comes ``REPLY_S`` later."""

    def __init__(self, settings=AHEAD, **options):
        super().__init__(settings, **options)
        self.began = self.now

    def wait(self):
        """Until the next request; returns it, and where its picture is taken."""
        count = len(self.asked)
        self.until(lambda: len(self.asked) > count or self.run.ended)
        assert not self.run.ended, self.run.sentence
        return self.asked[-1], self.pose

    def reply(self, text, seconds=REPLY_S, request=None, observed_at=None, verified=True):
        """Answer the newest request after ``seconds``."""
        request = request or self.asked[-1]
        self.ticks(seconds)
        observed_at = request.not_before if observed_at is None else observed_at
        self.run.on_answer(request.number, DecodeAnswer(text, observed_at, verified, object()), self.moment)
        self.listen()

    def first(self, text=FAR):
        self.wait()
        self.reply(text)
        assert self.run.phase is Phase.EXECUTING

    def look_ahead(self):
        """Until the request that is made in motion; where its picture is taken."""
        request, place = self.wait()
        assert request.ahead and self.run.phase is Phase.EXECUTING
        return request, place

    def again(self):
        """The next request after the answer, made at rest."""
        self.until(lambda: self.run.ended or (self.pending and not self.asked[-1].ahead))
        assert not self.run.ended and abs(self.velocity.vx) <= 0.02
        return self.asked[-1]

    def stopped(self):
        return self.velocity == AT_REST


def test_a_drive_goes_on_without_a_rest_and_ends_where_its_picture_says():
    walk = Walk()
    walk.first()
    _, place = walk.look_ahead()
    assert 0.37 < place.x < 0.6 and walk.velocity.vx == pytest.approx(0.5)
    walk.reply(FAR)
    slowest = walk.velocity.vx
    while walk.run.phase is Phase.EXECUTING and walk.pose.x < place.x + 0.5:
        slowest = min(slowest, walk.tick().vx)
    assert slowest > 0.4  # it need not brake
    again = walk.asked[-1]
    assert again.ahead and walk.pending
    walk.run.on_failure(again.number, RunOutcome.NO_OBSERVATION, "no picture")
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    assert walk.pose.x == pytest.approx(place.x + 0.75, abs=0.03)
    assert [step.seen_from is None for step in walk.run.steps] == [True, False]
    assert walk.run.steps[1].seen_from.x == pytest.approx(place.x, abs=0.02)
    assert walk.announcements[1].standing_seconds == 0.0


def test_another_kind_of_action_waits_for_the_rest_and_no_longer():
    walk = Walk()
    walk.first()
    walk.look_ahead()
    walk.reply(say("turn left 30 degrees"), seconds=0.1)
    asked = walk.pose.x
    walk.until(lambda: len(walk.announcements) == 2)
    assert asked < walk.pose.x < asked + 0.2 < 0.75  # it braked at once
    assert walk.announcements[1].standing_seconds <= 3 * TICK_S and abs(walk.velocity.vx) <= 0.02
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    assert walk.pose.yaw == pytest.approx(math.radians(30), abs=0.02)


def test_a_turn_counts_from_the_heading_of_its_picture():
    walk = Walk()
    walk.first(say("turn left 45 degrees"))
    _, place = walk.look_ahead()
    assert math.radians(28) < place.yaw < math.radians(38)
    walk.reply(say("turn left 15 degrees"))
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    assert walk.pose.yaw == pytest.approx(place.yaw + math.radians(15), abs=0.02)


def test_a_drive_after_a_turn_follows_the_heading_of_its_picture():
    walk = Walk()
    walk.first(say("turn left 30 degrees"))
    _, place = walk.look_ahead()
    walk.reply(FAR)
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    assert walk.pose.yaw == pytest.approx(place.yaw, abs=0.01)


def test_a_stop_counts_only_near_the_place_of_its_picture():
    near, far = Walk(), Walk()
    near.first(GO)
    near.look_ahead()
    near.reply(STOP)
    assert near.finish() is RunOutcome.ARRIVED and near.pose.x < 0.26
    far.first()
    _, place = far.look_ahead()
    far.reply(STOP)
    request, _ = far.wait()
    assert not request.ahead and far.pose.x - place.x > 0.15 and len(far.run.steps) == 1
    far.reply(STOP)
    assert far.finish() is RunOutcome.ARRIVED


@pytest.mark.parametrize("action", ["forward 50 cm", "turn left 30 degrees"])
def test_the_picture_is_taken_so_that_its_reply_comes_as_the_action_ends(action):
    walk = Walk()
    walk.first(say(action))
    walk.look_ahead()
    asked = walk.now
    walk.until(lambda: walk.stopped())
    assert walk.now - asked == pytest.approx(walk.run._reply_s, abs=3 * TICK_S)


def test_a_reply_that_leaves_nothing_to_do_is_no_step_and_the_robot_looks_again_at_rest():
    walk = Walk()
    walk.first()
    walk.look_ahead()
    walk.reply(GO, seconds=0.56)
    request, _ = walk.wait()
    assert not request.ahead and len(walk.run.steps) == 1 and walk.pose.x == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize("reply_s", [2.5, 6.0])
def test_a_reply_that_takes_longer_than_the_action_is_asked_for_at_rest(reply_s):
    walk = Walk(replace(AHEAD, max_observation_age_s=10.0))
    walk.wait()
    walk.reply(FAR, seconds=reply_s)
    request, place = walk.wait()
    assert not request.ahead and place.x == pytest.approx(0.75, abs=0.03)


def test_a_picture_taken_while_the_robot_turns_faster_is_taken_again_at_rest():
    walk = Walk()
    walk.first(say("turn left 45 degrees"))
    walk.look_ahead()
    walk.run.adopt(replace(AHEAD, look_ahead_turn_rate=0.01), MotionSettings())
    walk.reply(say("turn left 15 degrees"))
    walk.again()
    assert len(walk.run.steps) == 1


def test_switched_off_it_looks_at_rest():
    walk = Walk(SETTINGS)
    walk.first()
    request, place = walk.wait()
    assert not request.ahead and place.x == pytest.approx(0.75, abs=0.03)


# -- what may go wrong between a picture and its action ------------------------------------------


def test_a_link_lost_in_mid_motion_with_the_next_reply_pending():
    walk = Walk()
    walk.first()
    request, _ = walk.look_ahead()
    walk.safety = report(Cause.LINK_LOST)
    assert walk.tick() == AT_REST  # at once, as without a reply under way
    walk.run.on_failure(request.number, RunOutcome.LINK_LOST, "gone")
    held = walk.pose
    walk.ticks(3.0)
    assert walk.pose == held and not walk.run.ended and len(walk.asked) == 2
    walk.safety = report()
    request, place = walk.wait()  # what is left of the action first, then a picture at rest
    assert not request.ahead and place.x == pytest.approx(0.75, abs=0.03)


def test_a_link_that_stays_lost_ends_the_run_as_it_does_without_looking_ahead():
    walk = Walk(replace(AHEAD, link_patience_s=3.0))
    walk.first()
    walk.look_ahead()
    walk.safety, began = report(Cause.LINK_LOST), walk.now
    assert walk.finish() is RunOutcome.SAFETY_STOP and walk.now - began < 3.1


@pytest.mark.parametrize("at_rest", [False, True])
def test_a_stale_pictures_reply_that_arrives_late(at_rest):
    walk = Walk(replace(AHEAD, max_observation_age_s=0.5))
    walk.first()
    request, _ = walk.look_ahead()
    walk.reply(FAR, seconds=3.0 if at_rest else 0.6)
    assert walk.again().number > request.number and len(walk.run.steps) == 1
    assert walk.pose.x == pytest.approx(0.75, abs=0.03) and not walk.run.ended
    walk.reply(STOP)
    assert walk.finish() is RunOutcome.ARRIVED


@pytest.mark.parametrize("jump", [Pose(1.0, 0.0, 0.0), Pose(-0.4, 0.3, 0.0), Pose(0.0, 0.0, 0.5)])
def test_odometry_that_jumps_between_picture_and_action(jump):
    walk = Walk()
    walk.first()
    walk.look_ahead()
    walk.ticks(0.1)
    before = walk.pose
    walk.pose = Pose(before.x + jump.x, before.y + jump.y, before.yaw + jump.yaw)
    walk.reply(FAR, seconds=0.1)
    walk.again()
    assert len(walk.run.steps) == 1  # the picture's place is not known any more


def test_an_emergency_stop_between_picture_and_action():
    walk = Walk()
    walk.first()
    request, _ = walk.look_ahead()
    walk.safety = report(Cause.EMERGENCY_STOP)
    walk.tick()
    assert walk.run.outcome is RunOutcome.SAFETY_STOP
    walk.reply(FAR, request=request)
    assert len(walk.run.steps) == 1 and walk.tick() == AT_REST


def test_an_operator_between_picture_and_action():
    walk = Walk()
    walk.first()
    request, _ = walk.look_ahead()
    walk.safety = report(Cause.OPERATOR)
    walk.ticks(0.5)
    walk.reply(FAR, request=request)
    walk.safety = report()
    new, _ = walk.wait()
    assert not new.ahead and new.not_before > request.not_before and len(walk.run.steps) == 1


def test_two_replies_for_one_picture():
    walk = Walk()
    walk.first()
    request, _ = walk.look_ahead()
    walk.reply(FAR, request=request)
    walk.tick()
    assert len(walk.run.steps) == 2
    place = walk.run.steps[1].seen_from
    walk.reply(say("turn left 45 degrees"), seconds=0.1, request=request)
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    assert len(walk.run.steps) == 2 and walk.pose.x == pytest.approx(place.x + 0.75, abs=0.03)
    assert walk.pose.yaw == pytest.approx(0.0, abs=0.01)


def test_a_reply_that_is_not_of_the_grammar_ends_the_run_at_rest():
    walk = Walk()
    walk.first()
    walk.look_ahead()
    walk.reply("I do not know.")
    assert not walk.run.ended
    assert walk.finish() is RunOutcome.UNPARSABLE_REPLY and walk.stopped()


def test_a_draft_that_looked_ahead_and_failed_is_asked_again_at_rest():
    walk = Walk()
    walk.first()
    request, _ = walk.look_ahead()
    walk.until(lambda: walk.run.phase is Phase.DECODING)
    walk.run.on_failure(request.number, RunOutcome.NO_OBSERVATION, "no picture")
    new, _ = walk.wait()
    assert not new.ahead
    walk.reply(STOP)
    assert walk.finish() is RunOutcome.ARRIVED


def test_an_unverified_action_is_not_looked_beyond():
    walk = Walk(replace(AHEAD, fallback="draft_only"))
    walk.wait()
    walk.reply(FAR, verified=False)
    request, place = walk.wait()
    assert not request.ahead and place.x == pytest.approx(0.75, abs=0.03)


def test_a_blocked_robot_is_still_found_stuck():
    walk = Walk(blocked=True)
    for _ in range(3):
        request, _ = walk.wait()
        assert not request.ahead
        walk.reply(FAR)
    assert walk.finish() is RunOutcome.STUCK


def test_the_track_knows_no_pose_beside_a_gap_a_jump_or_its_ends():
    track, settings = PoseTrack(), MotionSettings()
    for n in range(11):
        track.add(n * 0.1, Pose(n * 0.05, 0.0, 0.0), Velocity(0.5, 0.2), settings)
    assert track.at(0.25, 0.3) == Pose(pytest.approx(0.125), 0.0, 0.0)
    assert track.at(0.25, 0.1) is None and track.at(1.01, 0.3) is None and track.at(-0.1, 0.3) is None
    track.add(1.4, Pose(0.7, 0.0, 0.0), AT_REST, settings)  # a gap
    track.add(1.5, Pose(0.75, 0.0, 0.0), AT_REST, settings)
    assert track.at(0.95, 0.3) is None and track.at(1.2, 0.3) is None and track.at(1.45, 0.3) is not None
    track.add(1.6, Pose(2.0, 0.0, 0.0), AT_REST, settings)  # a jump
    assert track.at(1.45, 0.3) is None and track.at(1.55, 0.3) is None


def test_the_supervisor_lets_every_action_follow_the_one_before():
    supervisor, walk = Supervisor(required=Requirements(camera="none", imu=False, heartbeats="", link="")), Walk()
    actions = ["forward 75 cm"] * 3 + ["turn left 45 degrees"] * 2 + ["turn right 15 degrees", "forward 25 cm", "stop"]
    known, due = 0, None
    while not walk.run.ended:
        command = walk.tick()
        supervisor.on_odometry(walk.pose, walk.moment.stamp, walk.now)
        if len(walk.announcements) > known:
            known, step = len(walk.announcements), walk.run.steps[-1]
            supervisor.on_action(step.reply.action, True, step.observed_at, walk.moment.stamp, walk.now)
        supervisor.on_navigation(Motion(command.vx, 0.0, command.wz), walk.now)
        decision = supervisor.decide(walk.now)
        assert REFUSALS.isdisjoint(cause for cause, _ in decision.causes), decision.causes
        due = (due or walk.now + REPLY_S) if walk.pending else None
        if due is not None and walk.now >= due:
            walk.reply(say(actions[min(len(walk.run.steps), len(actions) - 1)]), seconds=0.0)
            due = None
    assert walk.run.outcome is RunOutcome.ARRIVED and len(walk.run.steps) == len(actions)
    assert sum(step.seen_from is not None for step in walk.run.steps) >= 5
