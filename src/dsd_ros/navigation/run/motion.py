# SPDX-License-Identifier: Apache-2.0
"""A run's own view of the robot: its pose, the motion under way, and actions that lead nowhere. Pure."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from dsd_ros.navigation.run.actions import Action, ActionKind, format_action
from dsd_ros.navigation.run.controller import MotionController, MotionSettings, MotionStatus, Pose, Velocity, predict
from dsd_ros.navigation.run.executor import DelegatedMotion, GoalExecutor
from dsd_ros.navigation.run.records import STAMP_ROUNDING_S, Moment
from dsd_ros.navigation.run.retrace import Path
from dsd_ros.navigation.run.track import PoseTrack
from dsd_ros.navigation.safety.odometry import SpeedEstimate

_MAX_PREDICTION_S = 0.3  # beyond this: a stalled sender, or another machine's clock
_SAME_PLACE_M = 0.1
_SAME_HEADING = math.radians(7.5)  # half of the smallest turn
_MOST_TURNED_ON_SPOT = 2.6 * math.tau  # all in one direction


class RobotMotion:
    """Where the robot is, the path it took, and the motion under way.

    ``executor``: carries out the motions in place of commands. ``stood``: when the robot was first measured standing
    after the last motion. ``velocity``: the greater of the twist and of what the poses show, without signs.
    """

    def __init__(self, executor: GoalExecutor | None = None) -> None:
        self._executor = executor
        self.pose = Pose(0.0, 0.0, 0.0)
        self.path = Path()
        self.motion: MotionController | None = None
        self.stood: Moment | None = None
        self.velocity = Velocity(math.inf, math.inf)
        self._speed = SpeedEstimate()
        self._distance = 0.0
        self.track = PoseTrack()

    @property
    def distance(self) -> float:
        """Length of the path since the start, m, including the motion under way."""
        return self._distance + (self.motion.travelled if self.motion else 0.0)

    @property
    def conflict(self) -> str:
        """How the odometry has contradicted itself for long; empty when it has not."""
        return self._speed.conflict

    def on_clock_set(self, jump: float) -> None:
        """The stamps' clock was set by ``jump`` s."""
        self._speed.on_clock_set(jump)
        self.track.clear()
        if self.stood is not None:
            self.stood = replace(self.stood, stamp=self.stood.stamp + jump)

    def on_pose(
        self, pose: Pose, twist: Velocity, moment: Moment, stamp: float | None, settings: MotionSettings, outward: bool
    ) -> float:
        """Record a pose that was true at ``stamp`` (None: now); returns the stamp used for it.

        :param outward: the pose belongs to the path; False on the way back.
        """
        self.velocity = self._speed.update(pose, twist, moment.steady, moment.stamp)
        at = moment.stamp
        if stamp is not None and 0.0 <= at - stamp < _MAX_PREDICTION_S:
            at = stamp
        self.track.add(at, pose, self.velocity, settings)
        self.pose = predict(pose, twist, moment.stamp - at)
        if outward:
            self.path.add(self.pose)
        return at

    def begin(
        self, action: Action, settings: MotionSettings, moment: Moment, seen_from: Pose | None = None
    ) -> MotionController:
        """Begin an action; one under way that it follows without a rest goes on at its speed.

        :param seen_from: where the picture was taken that the action is about; None: here.
        """
        self.stood = None
        speed = self.motion.speed if self.motion is not None else 0.0
        self.drop()
        if self._executor is None or action.kind is ActionKind.STOP:
            self.motion = MotionController(action, settings, self.pose, moment.steady, seen_from, speed)
        else:
            self.motion = DelegatedMotion(action, settings, self.pose, moment.steady, self._executor)
        return self.motion

    def update(self, motion: MotionController, at: float, moment: Moment) -> Velocity:
        """The motion's command for the newest pose, which was true at ``at``."""
        command = motion.update(self.pose, self.velocity, moment.steady)
        if motion.standing:
            self.stood = self.stood or Moment(moment.steady, at)
        elif motion.finished:  # it never stood quite still, and will not get any stiller
            self.stood = moment
        else:
            self.stood = None
        return command

    def finish(self) -> bool:
        """End the motion; returns whether it was blocked."""
        stuck = self.motion is not None and self.motion.status is MotionStatus.STUCK
        self.drop()
        return stuck

    def drop(self) -> None:
        """Forget the motion under way."""
        self._distance = self.distance
        if self.motion is not None:
            self.motion.drop()
        self.motion = None

    def stood_at(self, stamp: float) -> bool:
        """Whether the robot has stood where it is since ``stamp`` or earlier."""
        return self.stood is not None and stamp >= self.stood.stamp - STAMP_ROUNDING_S


class OscillationDetector:
    """Notices a run that makes no progress: it repeats a decision at the same place, or turns back and forth.

    Call :meth:`refuses` before each action and :meth:`carried_out` after it, unless it was blocked.

    :param repeats: this many-th time for the same action at the same pose is refused.
    :param reversals: so many changes of direction between turns, without a drive, are refused.
    """

    def __init__(self, repeats: int, reversals: int) -> None:
        self.repeats = repeats
        self.reversals = reversals
        self._done: list[tuple[Pose, Action]] = []
        self._turns: list[float] = []  # rad, since the last drive

    def refuses(self, pose: Pose, action: Action) -> str:
        """Why ``action`` at ``pose`` would lead nowhere; empty when it is allowed."""
        if action.kind is ActionKind.STOP:
            return ""
        same = sum(1 for then, what in self._done if what == action and _same(then, pose))
        if same + 1 >= self.repeats:
            return f"'{format_action(action)}' was decided {same + 1} times at the same place"
        turns = [*self._turns, action.radians] if action.radians and not action.metres else []
        changes = sum(1 for a, b in itertools.pairwise(turns) if a * b < 0.0)
        if changes >= self.reversals:
            return f"it turned to and fro {len(turns)} times without driving"
        if abs(sum(turns)) > _MOST_TURNED_ON_SPOT:
            return f"it turned by {math.degrees(abs(sum(turns))):.0f} degrees without driving"
        return ""

    def carried_out(self, pose: Pose, action: Action) -> None:
        """Record that ``action``, decided at ``pose``, is over."""
        if action.kind is ActionKind.STOP:
            return
        self._done.append((pose, action))
        self._turns = [*self._turns, action.radians] if action.radians and not action.metres else []


def _same(a: Pose, b: Pose) -> bool:
    near = math.hypot(a.x - b.x, a.y - b.y) <= _SAME_PLACE_M
    return near and abs(math.remainder(a.yaw - b.yaw, math.tau)) <= _SAME_HEADING
