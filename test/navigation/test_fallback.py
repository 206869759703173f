# SPDX-License-Identifier: Apache-2.0
"""What the supervisor allows navigation without the target's word: every combination."""

from __future__ import annotations

import math
from itertools import product

import pytest
from announced import announced

from dsd_ros.navigation.run.actions import ActionKind
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.safety.causes import (
    FALLBACKS,
    STILL,
    Cause,
    Motion,
    Requirements,
    SafetyLimits,
    SafetyReport,
    Timeouts,
)
from dsd_ros.navigation.safety.guard import Trail
from dsd_ros.navigation.safety.supervisor import Supervisor

AHEAD = Motion(0.4)
STEP = 0.02
VERIFIED, UNVERIFIED, RETRACING = "verified", "unverified", "retracing"


class World:
    """A healthy robot under a supervisor; only the link may be lost."""

    def __init__(self, fallback: str, lost: bool = False) -> None:
        required = Requirements(heartbeats="", link="draft_node")
        self.supervisor = Supervisor(Timeouts(), SafetyLimits(), required, fallback)
        self.now, self.pose, self.command = 50.0, Pose(0.0, 0.0, 0.0), STILL
        self.link(lost)
        self.step(5)

    def link(self, lost: bool) -> None:
        self.supervisor.on_report("draft_node", "gone" if lost else "")

    def step(self, times: int = 1) -> Motion:
        for _ in range(times):
            self.now += STEP
            self.supervisor.on_odometry(self.pose, self.now, self.now)
            self.supervisor.on_tilt(0.0, self.now, self.now)
            self.supervisor.on_picture(self.now, self.now)
            self.supervisor.on_navigation(self.command, self.now)
            self.decision = self.supervisor.decide(self.now)
        return self.decision.motion

    def act(self, word: str, kind: ActionKind = ActionKind.FORWARD, amount: int = 50) -> Motion:
        """Announce an action and command its motion; what of it goes to the robot."""
        stamp, back = self.now - 0.1, word == RETRACING
        self.supervisor.on_action(announced(kind, amount), word == VERIFIED, stamp, self.now, self.now, back)
        self.command = AHEAD if kind is ActionKind.FORWARD else Motion(wz=0.5)
        return self.step()

    def walk(self, x: float, y: float = 0.0) -> None:
        """Get there in small steps, as odometry tells it."""
        before = self.pose
        count = max(1, round(math.hypot(x - before.x, y - before.y) / 0.05))
        for i in range(1, count + 1):
            share = i / count
            self.pose = Pose(before.x + share * (x - before.x), before.y + share * (y - before.y), 0.0)
            self.step()

    @property
    def causes(self) -> list[Cause]:
        return [cause for cause, _ in self.decision.causes]


@pytest.mark.parametrize(
    ("fallback", "word", "lost"), list(product(FALLBACKS, (VERIFIED, UNVERIFIED, RETRACING), (False, True)))
)
def test_every_combination(fallback, word, lost):
    world = World(fallback, lost)
    motion = world.act(word)
    admitted = (fallback, word) in {("draft_only", UNVERIFIED), ("return", RETRACING)}
    if word == VERIFIED:
        assert motion == (STILL if lost else AHEAD)
        assert world.causes == ([Cause.LINK_LOST] if lost else [])
        assert world.decision.stopped == lost and world.decision.waived == ()
    elif admitted:
        assert motion == Motion(pytest.approx(0.4 * SafetyLimits().speed))  # the share
        assert world.causes == ([Cause.LINK_LOST] if lost else [])  # still said, but
        assert world.decision.waived == tuple(world.causes) and not world.decision.stopped
    else:
        assert motion == STILL and world.decision.stopped
        assert Cause.UNVERIFIED_ACTION in world.causes
        assert (Cause.LINK_LOST in world.causes) == lost
        sentence = dict(world.decision.causes)[Cause.UNVERIFIED_ACTION]
        assert ("fallback is" in sentence) == (word == RETRACING)


def test_only_the_lost_link_is_waived():
    world = World("draft_only", lost=True)
    assert world.act(UNVERIFIED).moving
    world.supervisor.on_tilt(1.0, world.now + 0.001, world.now)
    decision = world.supervisor.decide(world.now)
    assert decision.motion == STILL and decision.stopped
    assert {cause for cause, _ in decision.causes} == {Cause.TILT, Cause.LINK_LOST}
    assert decision.waived == (Cause.LINK_LOST,)


def test_only_so_many_unverified_actions_in_a_row():
    world = World("draft_only", lost=True)
    assert all(world.act(UNVERIFIED).moving for _ in range(3))
    for _ in range(2):
        assert world.act(UNVERIFIED) == STILL
        assert Cause.UNVERIFIED_ACTION in world.causes
        assert "3 such in a row" in dict(world.decision.causes)[Cause.UNVERIFIED_ACTION]
    assert world.act(VERIFIED) == STILL  # the link is still lost: what was verified is held
    world.link(False)
    assert world.act(VERIFIED) == AHEAD  # and from here on the count is new
    assert all(world.act(UNVERIFIED).moving for _ in range(3))
    assert world.act(UNVERIFIED) == STILL


def test_what_is_refused_does_not_make_the_count_new():
    world = World("draft_only")
    assert all(world.act(UNVERIFIED).moving for _ in range(3))
    stale = world.now - 9.0
    world.supervisor.on_action(announced(ActionKind.FORWARD, 50), True, stale, world.now, world.now)
    world.supervisor.on_action(announced(ActionKind.FORWARD, 60), True, world.now, world.now, world.now)
    world.supervisor.on_emergency_stop("a test", world.now)
    world.supervisor.reset()
    world.step(2)
    assert world.act(UNVERIFIED) == STILL


def test_an_unverified_action_keeps_to_the_grammar_the_picture_and_the_limits():
    world = World("draft_only", lost=True)
    assert world.act(UNVERIFIED, amount=60) == STILL
    assert Cause.UNPARSABLE_ACTION in world.causes
    world.supervisor.on_action(announced(ActionKind.FORWARD, 50), False, world.now - 9.0, world.now, world.now)
    assert world.step() == STILL and Cause.STALE_REPLY in world.causes
    assert world.act(UNVERIFIED, ActionKind.TURN_LEFT, 30) == Motion(wz=pytest.approx(0.4 * math.radians(30)))
    assert world.act(UNVERIFIED).moving
    world.command = Motion(0.8)
    assert world.step() == STILL and Cause.MOTION_REFUSED in world.causes


def test_the_lost_link_holds_again_when_the_action_is_over():
    world = World("draft_only", lost=True)
    assert world.act(UNVERIFIED).moving
    world.command = STILL
    world.step(160)
    assert world.decision.stopped and world.decision.waived == ()
    assert world.causes == [Cause.LINK_LOST]


def test_the_way_back_leads_along_the_way_there():
    world = World("return")
    for x, y in ((0.5, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0)):
        assert world.act(VERIFIED) == AHEAD
        world.walk(x, y)
    world.link(True)
    world.step()
    assert world.decision.stopped
    for x, y in ((1.05, 0.5), (0.95, 0.05), (0.5, 0.1)):  # not to the centimetre
        assert world.act(RETRACING).moving
        world.walk(x, y)
        assert world.decision.motion.moving, (x, y)
    assert world.act(RETRACING).moving
    world.walk(0.5, 0.5)  # a short cut is none of the way
    assert world.decision.motion == STILL and Cause.MOTION_REFUSED in world.causes
    assert "left the way it came" in dict(world.decision.causes)[Cause.MOTION_REFUSED]


def test_what_was_walked_by_retracing_or_by_the_operator():
    world = World("return", lost=True)
    world.act(RETRACING)
    world.walk(0.28)
    world.act(RETRACING)  # leg by leg it must not get away from the way either
    world.walk(0.4)
    assert world.decision.motion == STILL and Cause.MOTION_REFUSED in world.causes
    world.supervisor.on_operator(STILL, world.now)
    world.walk(1.0)
    world.step(30)
    world.act(RETRACING)
    world.walk(0.7)
    assert world.decision.motion.moving


def test_a_return_needs_no_picture_and_uses_none_up():
    world = World("return", lost=True)
    nothing = 0.0  # an unset stamp
    world.supervisor.on_action(announced(ActionKind.TURN_LEFT, 45), False, nothing, world.now, world.now, True)
    world.command = Motion(wz=0.3)
    assert world.step().moving
    world.link(False)
    assert world.act(VERIFIED) == AHEAD


def test_a_trail():
    trail = Trail()
    assert not trail.near(0.0, 0.0)
    for i in range(100):
        trail.add(i * 0.01, -i * 0.01)
    assert trail.near(0.5, -0.5) and trail.near(0.6, -0.3) and trail.near(-0.2, 0.2)
    assert not trail.near(0.8, -0.2) and not trail.near(-0.3, 0.3)


def test_a_report_holds_by_what_is_not_waived():
    link = (Cause.LINK_LOST,)
    assert not SafetyReport().holds
    assert SafetyReport(link, ("It is lost.",)).holds
    assert not SafetyReport(link, ("It is lost.",), link).holds
    both = SafetyReport((Cause.TILT, *link), ("It leans.", "It is lost."), link)
    assert both.holds and both.sentence == "It leans. It is lost."
