# SPDX-License-Identifier: Apache-2.0
"""Carries out one action, closed loop on odometry, with a trapezoidal speed profile that ends at rest.

Pure: time, pose and velocity are passed in, commands are returned. Units: metres, radians, seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from dsd_ros.navigation.run.actions import Action, ActionKind
from dsd_ros.options import option


@dataclass(frozen=True)
class Pose:
    """The robot's pose in the odometry frame; ``yaw`` counter-clockwise from x."""

    x: float
    y: float
    yaw: float


@dataclass(frozen=True)
class Velocity:
    """Forward speed (m/s) and turn rate (rad/s), measured or commanded."""

    vx: float = 0.0
    wz: float = 0.0


AT_REST = Velocity(0.0, 0.0)
_LENGTH_ERROR = 0.25  # of a quaternion


def unit_quaternion(x: float, y: float, z: float, w: float) -> tuple[float, float, float, float] | None:
    """The quaternion scaled to length 1; None when its length is too far from 1 (or NaN) to mean a rotation."""
    length = math.hypot(x, y, z, w)
    if not abs(length - 1.0) <= _LENGTH_ERROR:  # NaN fails here, too
        return None
    return x / length, y / length, z / length, w / length


def predict(pose: Pose, velocity: Velocity, span: float) -> Pose:
    """The pose after ``span`` seconds at constant velocity (constant-twist arc)."""
    middle = pose.yaw + velocity.wz * span / 2
    way = velocity.vx * span
    return Pose(pose.x + way * math.cos(middle), pose.y + way * math.sin(middle), pose.yaw + velocity.wz * span)


@dataclass(frozen=True)
class MotionSettings:
    """Limits of a motion."""

    speed: float = option(0.5, "top speed ahead, m/s", 0.05, 1.5)
    turn_rate: float = option(0.5235987, "top turn rate, rad/s", 0.08, 2.1)
    acceleration: float = option(0.8, "acceleration and braking, m/s^2", 0.1, 3.0)
    rest_s: float = option(0.1, "an action is over after standing this long, s", 0.0, 2.0)

    def slower(self, share: float) -> MotionSettings:
        """The same settings with this share of the top speeds."""
        return replace(self, speed=self.speed * share, turn_rate=self.turn_rate * share)


_TURN_ACCELERATION = math.pi / 2  # and braking, rad/s^2
_DISTANCE_DONE, _ANGLE_DONE = 0.01, math.radians(0.5)  # m and rad; a motion this close to its end is done
_STILL_SPEED, _STILL_TURN_RATE = 0.02, math.radians(1.5)  # m/s and rad/s; a slower robot stands
STUCK_S = 1.5  # no progress for this long counts as stuck


def stands(measured: Velocity) -> bool:
    """Whether a robot with this measured velocity stands."""
    return abs(measured.vx) <= _STILL_SPEED and abs(measured.wz) <= _STILL_TURN_RATE


class MotionStatus(Enum):
    """Progress of an action; DONE and STUCK are final, and the robot stands in both."""

    MOVING = "moving"
    SETTLING = "settling"
    DONE = "done"
    STUCK = "stuck"


_ASIDE_M, _ASIDE_RAD = 0.1, math.radians(10.0)  # m and rad; how far beside its line a drive may begin
_STOP_M = 0.15  # from where the picture of a stop was taken
_CREEP = 0.1  # least share of the top speed before the goal is reached
_HEADING_GAIN = 1.5  # 1/s; holds the heading during a drive
_REST_LIMIT_S = 3.0  # a robot still moving this long after the zero command is moved by something else


class MotionController:
    """One action from start to rest. Call :meth:`update` with each odometry sample.

    The speed is the least of the top speed, the speed that acceleration allows since the last sample, and the speed
    from which the robot can still brake over the remaining distance (v^2 = 2 a s). Progress is always measured.

    ``seen_from``: where the picture was taken that the action is about, and from which it counts; None: ``pose``.
    ``speed``: at which an earlier action of this kind drives or turns the robot now, m/s or rad/s.
    """

    def __init__(
        self,
        action: Action,
        settings: MotionSettings,
        pose: Pose,
        now: float,
        seen_from: Pose | None = None,
        speed: float = 0.0,
    ) -> None:
        self.action = action
        self.status = MotionStatus.MOVING
        self.travelled = 0.0  # length of the path, m
        self.settings = settings
        self._start, self._last_pose = seen_from or pose, pose
        self._last_time = now
        self._turned = math.remainder(pose.yaw - self._start.yaw, math.tau)  # rad, unwrapped
        self.speed = speed  # of the last command, m/s or rad/s
        self._best_time = now
        self._settle_time = now
        self._still_since: float | None = None
        self._blocked = False
        self.trouble = ""  # why it was blocked, where that is known
        # To a goal the robot turns first, and then drives.
        self._turning = action.kind in (ActionKind.TURN_LEFT, ActionKind.TURN_RIGHT, ActionKind.GO_TO)
        self._goal = abs(action.radians) if self._turning else action.metres
        self._best = self.progress
        if action.kind is ActionKind.STOP:
            self.status = MotionStatus.SETTLING

    @property
    def progress(self) -> float:
        """Distance driven along the first heading, m, or angle turned in the action's direction, rad."""
        if self._turning:
            return math.copysign(1.0, self.action.radians) * self._turned
        dx, dy = self._last_pose.x - self._start.x, self._last_pose.y - self._start.y
        return dx * math.cos(self._start.yaw) + dy * math.sin(self._start.yaw)

    @property
    def seen_from(self) -> Pose:
        """The pose from which the action counts."""
        return self._start

    @property
    def remaining(self) -> float:
        """What is left of the action, m or rad; less than nothing where the robot is past its end."""
        return self._goal - self.progress

    @property
    def left(self) -> bool:
        """Whether there is something left to do: to stop, or more of a motion than its tolerance."""
        return self.action.kind in (ActionKind.STOP, ActionKind.GO_TO) or self.remaining > self._limits()[2]

    @property
    def fits(self) -> bool:
        """Whether the robot is where the action can begin: for a stop where it is meant, for a drive on its line."""
        dx, dy = self._last_pose.x - self._start.x, self._last_pose.y - self._start.y
        if self._turning:
            return self.progress >= -_ASIDE_RAD
        if abs(self._turned) > _ASIDE_RAD:
            return False
        if self.action.kind is ActionKind.STOP:
            return math.hypot(dx, dy) <= _STOP_M
        aside = dy * math.cos(self._start.yaw) - dx * math.sin(self._start.yaw)
        return self.progress >= -_ASIDE_M and abs(aside) <= _ASIDE_M

    def goes_on_as(self, action: Action) -> bool:
        """Whether ``action`` can follow without a rest: both drive ahead, or turn the same way."""
        return not self._blocked and action.kind is self.action.kind is not ActionKind.GO_TO

    def look_now(self, reply_s: float) -> bool:
        """Whether it is time for the next picture, whose reply takes ``reply_s``, s.

        The reply should come as the motion ends. After the longest action of its kind that the grammar has, another is
        likely: there it should come as the robot begins to brake. A picture that shows less than half of an action
        carried out tells little new, and so does one whose reply takes longer than all of it: then it looks at rest.
        """
        action, (top, acceleration, _) = self.action, self._limits()
        if action.kind is ActionKind.GO_TO and self._turning:
            return False  # its own drive follows
        if self.progress < self._goal / 2 or reply_s > self._goal / top + top / acceleration:
            return False
        longest = action.amount and action.amount == action.grammar.longest(action.kind)
        return self._seconds_left() - (self.speed / acceleration if longest else 0.0) <= reply_s

    def _seconds_left(self) -> float:
        """Time until the motion ends by its speed profile, s."""
        top, acceleration, tolerance = self._limits()
        left = max(0.0, self.remaining - tolerance)
        first, last = self.speed, min(self.speed, math.sqrt(2.0 * acceleration * tolerance))
        peak = max(first, min(top, math.sqrt(acceleration * left + (first**2 + last**2) / 2.0)))
        even = left - (2.0 * peak**2 - first**2 - last**2) / (2.0 * acceleration)  # m or rad at that speed
        return (2.0 * peak - first - last) / acceleration + (max(0.0, even) / peak if peak else 0.0)

    def shorten(self) -> None:
        """Give up what is left of the action but for the way that braking takes."""
        _, acceleration, _ = self._limits()
        self._goal = min(self._goal, self.progress + self.speed * self.speed / (2.0 * acceleration))

    @property
    def came_to_rest(self) -> bool:
        """Whether the robot was last measured at rest at the action's end, which nothing blocked."""
        return self.standing and not self._blocked

    @property
    def standing(self) -> bool:
        """Whether the motion is over and the robot was last measured at rest."""
        return self._still_since is not None

    @property
    def finished(self) -> bool:
        return self.status in (MotionStatus.DONE, MotionStatus.STUCK)

    def drop(self) -> None:
        """Give the action up, or put it away after its end."""

    def pause(self, now: float) -> None:
        """The command is not carried out: do not count as stuck, and accelerate from zero afterwards."""
        self.speed = 0.0
        self._best_time = max(now, self._best_time)

    def update(self, pose: Pose, measured: Velocity, now: float) -> Velocity:
        """The command for the newest odometry. A ``now`` that goes back counts as no time passed."""
        step = max(0.0, now - self._last_time)
        self._turned += math.remainder(pose.yaw - self._last_pose.yaw, math.tau)
        self.travelled += math.hypot(pose.x - self._last_pose.x, pose.y - self._last_pose.y)
        self._last_pose, self._last_time = pose, max(now, self._last_time)
        if self.status is MotionStatus.MOVING:
            return self._move(step, now)
        if self.status is MotionStatus.SETTLING:
            self._settle(measured, now)
        return AT_REST

    def _move(self, step: float, now: float) -> Velocity:
        settings = self.settings
        top, acceleration, tolerance = self._limits()
        progress, remaining = self.progress, self.remaining
        if remaining <= tolerance:
            if self._turning and self.action.kind is ActionKind.GO_TO:
                self._drive_to(self.place, now)
                return self._move(step, now)
            return self._begin_rest(now)
        if progress > self._best + tolerance:
            self._best, self._best_time = progress, now
        elif now - self._best_time > STUCK_S:
            self._blocked = True
            return self._begin_rest(now)
        top = max(top, self.speed - acceleration * step)  # where settings have lowered it
        braking = math.sqrt(2.0 * acceleration * remaining)
        wanted = min(top, max(braking, _CREEP * top))
        # Deceleration needs no limit of its own: the profile has it.
        self.speed = min(wanted, self.speed + acceleration * step)
        if self._turning:
            return Velocity(0.0, math.copysign(self.speed, self.action.radians))
        limit = settings.turn_rate
        correction = max(-limit, min(limit, -_HEADING_GAIN * self._turned))
        return Velocity(self.speed, correction)

    @property
    def place(self) -> Pose:
        """Where the robot stands after an action that drives, in the odometry frame."""
        start, action = self._start, self.action
        heading = start.yaw + action.radians
        return Pose(start.x + action.metres * math.cos(heading), start.y + action.metres * math.sin(heading), heading)

    def _drive_to(self, place: Pose, now: float) -> None:
        """The robot has turned towards its goal: the rest is a drive ahead."""
        here = self._last_pose
        heading = math.atan2(place.y - here.y, place.x - here.x)
        self._turning, self._goal = False, math.hypot(place.x - here.x, place.y - here.y)
        self._start, self._turned = Pose(here.x, here.y, heading), math.remainder(here.yaw - heading, math.tau)
        self._best, self._best_time, self.speed = 0.0, now, 0.0

    def _limits(self) -> tuple[float, float, float]:
        """Top speed, acceleration and tolerance of the motion, in m or rad."""
        settings = self.settings
        if not self._turning:
            return settings.speed, settings.acceleration, _DISTANCE_DONE
        return settings.turn_rate, _TURN_ACCELERATION, _ANGLE_DONE

    def _begin_rest(self, now: float) -> Velocity:
        self.status = MotionStatus.SETTLING
        self._settle_time = now
        self.speed = 0.0
        return AT_REST

    def _settle(self, measured: Velocity, now: float) -> None:
        if not stands(measured):
            self._still_since = None
            if now - self._settle_time > _REST_LIMIT_S:
                self.status = MotionStatus.STUCK
            return
        if self._still_since is None:
            self._still_since = now
        if now - self._still_since >= self.settings.rest_s:
            self.status = MotionStatus.STUCK if self._blocked else MotionStatus.DONE
