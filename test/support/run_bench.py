# SPDX-License-Identifier: Apache-2.0
"""A navigation run with a simple simulated robot and a scripted supervisor."""

from __future__ import annotations

import math
import random

from dsd_ros.navigation.run.actions import Grammar
from dsd_ros.navigation.run.controller import AT_REST, MotionSettings, Pose, Velocity
from dsd_ros.navigation.run.executor import GoalEnd, GoalExecutor, Order
from dsd_ros.navigation.run.records import Announcement, DecodeAnswer, DecodeRequest, Moment, Phase
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.run.settings import RunSettings
from dsd_ros.navigation.safety.causes import Cause, SafetyReport

SETTINGS = RunSettings(max_steps=5, time_limit_s=60.0)
GO = "I see it. Action: forward 25 cm"
STOP = "I am there. Action: stop"
TICK_S = 0.02


def say(action: str) -> str:
    return f"So it is. Action: {action}"


def report(*causes: Cause, waived: tuple[Cause, ...] = ()) -> SafetyReport:
    return SafetyReport(causes, tuple(f"Because of {cause.name}." for cause in causes), waived)


def silent(node: str) -> SafetyReport:
    return SafetyReport((Cause.NODE_SILENT,), (f"No heartbeat of {node} for more than 0.40 s.",))


class Bench:
    """The stamps' clock is 1000 s ahead of the steady one.

    :param blocked: the robot does not move.
    :param lag: share of the commanded speed that is not yet reached after a tick.
    :param noise: standard deviation of the odometry's position (m); of its yaw, half of it in rad.
    """

    def __init__(
        self,
        settings: RunSettings = SETTINGS,
        blocked: bool = False,
        lag: float = 0.0,
        noise: float = 0.0,
        seed: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        self.now = 50.0
        self.pose = Pose(0.0, 0.0, 0.0)  # where it really is
        self.velocity = AT_REST
        self.command = AT_REST
        self.blocked, self.lag, self.noise = blocked, lag, noise
        self.chance = random.Random(seed)
        self.announcements: list[Announcement] = []
        self.asked: list[DecodeRequest] = []
        # What a supervisor says; None: it is silent.
        self.safety: SafetyReport | None = SafetyReport()
        self.run = NavigationRun(settings, MotionSettings(), self.moment, grammar=grammar)

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.now + 1000.0)

    def tick(self, odometry: bool = True) -> Velocity:
        """One odometry sample, and what follows from it; returns the command."""
        self.now += TICK_S
        self.command = AT_REST
        if self.safety is not None:
            self.run.on_safety(self.safety, self.now)
        if odometry:
            self.command = self.run.on_odometry(self.measured(), self.velocity, self.moment)
            self._move()
        self.run.on_time(self.moment)
        self.listen()
        return self.command

    def ticks(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()

    def measured(self) -> Pose:
        pose, noise = self.pose, self.noise
        if not noise:
            return pose
        return Pose(
            pose.x + self.chance.gauss(0.0, noise),
            pose.y + self.chance.gauss(0.0, noise),
            pose.yaw + self.chance.gauss(0.0, noise / 2),
        )

    def _move(self) -> None:
        wanted = AT_REST if self.blocked else self.command
        keep = self.lag
        self.velocity = Velocity(
            keep * self.velocity.vx + (1 - keep) * wanted.vx, keep * self.velocity.wz + (1 - keep) * wanted.wz
        )
        yaw = self.pose.yaw + self.velocity.wz * TICK_S
        way = self.velocity.vx * TICK_S
        self.pose = Pose(self.pose.x + way * math.cos(yaw), self.pose.y + way * math.sin(yaw), yaw)

    def listen(self) -> None:
        announcement = self.run.take_announcement()
        if announcement is not None:
            self.announcements.append(announcement)
        request = self.run.take_request()
        if request is not None:
            self.asked.append(request)

    def until(self, done, limit: float = 40.0):
        """Tick until ``done()`` is true, and return that."""
        end = self.now + limit
        while not (value := done()):
            assert self.now < end, f"not within {limit} s; {self.run.phase}, {self.run.sentence}"
            self.tick()
        return value

    def until_request(self) -> DecodeRequest:
        """Tick until the run has asked again, and the robot's rest is confirmed."""
        count = len(self.asked)
        self.until(
            lambda: self.run.ended or (self.run.phase is Phase.DECODING and (len(self.asked) > count or self.pending))
        )
        return self.asked[-1]

    @property
    def pending(self) -> bool:
        """Whether the newest request waits for its answer."""
        return bool(self.asked) and self.run._pending.awaits(self.asked[-1].number)

    def answer(self, text: str, age: float = 0.1, verified: bool = True) -> DecodeRequest:
        """Wait for a request, and answer it ``age`` seconds later."""
        request = self.until_request()
        self.now += age
        self.run.on_answer(request.number, DecodeAnswer(text, request.not_before, verified, object()), self.moment)
        self.listen()
        return request

    def fail(self, outcome, sentence: str = "Gone.") -> None:
        request = self.until_request()
        self.run.on_failure(request.number, outcome, sentence)

    def finish(self, limit: float = 60.0):
        """Tick until the run has ended; returns how."""
        self.until(lambda: self.run.ended, limit)
        return self.run.outcome


class DelegatedBench(Bench):
    """A bench whose actions a kinematic navigator carries out.

    ``answers``, ``cancels``, ``ready``: it answers goals, obeys cancels, is there. ``share``: how much of each goal it
    drives.
    """

    def __init__(self, **settings) -> None:
        super().__init__()
        self.executor = GoalExecutor()
        settings = RunSettings(**{"max_steps": 5, "time_limit_s": 60.0} | settings)
        self.run = NavigationRun(settings, MotionSettings(), self.moment, self.executor)
        self.answers = self.cancels = self.ready = True
        self.share, self.end = 1.0, (GoalEnd.SUCCEEDED, "")
        self.goals: list = []  # as sent
        self.left = None  # m or rad of the goal under way
        self.alarms = 0

    def tick(self, odometry=True):
        assert super().tick(odometry) == AT_REST  # it never commands anything itself
        executor = self.executor
        self.alarms += executor.take_alarm()
        order = executor.take_order(self.ready)
        if order is Order.SEND:
            assert self.left is None, "two goals at a time"
            assert self.announcements and self.announcements[-1].action == executor.goal.action
            self.goals.append(executor.goal)
            if self.answers:
                self.left = executor.goal.amount * self.share
                executor.on_answer(executor.number, True)
        elif order is Order.CANCEL and self.cancels:
            self.left = None
            executor.on_result(executor.number, GoalEnd.CANCELLED)
        elif self.left is not None:
            speed = math.copysign(min(self.goals[-1].speed, abs(self.left) / TICK_S), self.left)
            self.left -= speed * TICK_S
            self.drive(speed)
            if abs(self.left) < 1e-9:
                self.left = None
                executor.on_result(executor.number, *self.end)
        return AT_REST

    def drive(self, speed):
        ahead = Velocity(0.0, speed) if self.goals[-1].turning else Velocity(speed, 0.0)
        self.command, self.blocked = ahead, False
        Bench._move(self)

    def _move(self):
        self.velocity = AT_REST
