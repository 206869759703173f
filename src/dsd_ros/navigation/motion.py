"""A run's own view of the robot: poses, the motion under way, and actions that lead nowhere. Pure.

Pictures may be taken while the robot still moves: :class:`PoseTrack` says where it was then, and :func:`still_fits`
whether an action decided there can still be carried out.
"""

from __future__ import annotations

import math
from collections import deque

from dsd_ros.navigation.actions import Action, ActionKind, format_action
from dsd_ros.navigation.controller import MotionController, MotionSettings, MotionStatus, Pose, Velocity, predict
from dsd_ros.navigation.records import STAMP_ROUNDING_S, Moment
from dsd_ros.navigation.retrace import Path

_MAX_PREDICTION_S = 0.3  # beyond this: a stalled sender, or another machine's clock
_TRACK_S = 6.0
_LARGEST_GAP_S = 0.3  # poses further apart are not interpolated
_MOST_TURNED = math.radians(15.0)  # since the picture, for a decision that still fits
_MOST_MOVED_M = 0.4
_SAME_PLACE_M = 0.1
_SAME_HEADING = math.radians(7.5)  # half of the smallest turn
_MOST_TURNED_ON_SPOT = 2.6 * math.tau  # all in one direction


class RobotMotion:
    """Where the robot is and was, and the motion under way.

    ``stood``: when the robot was first measured standing after the last motion.
    """

    def __init__(self) -> None:
        self.pose = Pose(0.0, 0.0, 0.0)
        self.path = Path()
        self.track = PoseTrack()
        self.motion: MotionController | None = None
        self.stood: Moment | None = None
        self._distance = 0.0

    @property
    def distance(self) -> float:
        """Length of the path since the start, m, including the motion under way."""
        return self._distance + (self.motion.travelled if self.motion else 0.0)

    def on_pose(self, pose: Pose, measured: Velocity, moment: Moment, stamp: float | None, outward: bool) -> float:
        """Record a pose that was true at ``stamp`` (None: now); returns the stamp used for it.

        :param outward: the pose belongs to the path; False on the way back.
        """
        at = moment.stamp
        if stamp is not None and 0.0 <= at - stamp < _MAX_PREDICTION_S:
            at = stamp
        self.track.add(at, pose)
        self.pose = predict(pose, measured, moment.stamp - at)
        if outward:
            self.path.add(self.pose)
        return at

    def begin(
        self, action: Action, settings: MotionSettings, moment: Moment, origin: Pose | None = None
    ) -> MotionController:
        """Begin a motion; ``origin`` as in :class:`MotionController`."""
        self.stood = None
        self.motion = MotionController(action, settings, self.pose, moment.stamp, origin)
        return self.motion

    def update(self, motion: MotionController, measured: Velocity, at: float, moment: Moment) -> Velocity:
        """The motion's command for the newest pose, which was true at ``at``."""
        command = motion.update(self.pose, measured, moment.stamp)
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
        self.motion = None

    def stood_at(self, stamp: float) -> bool:
        """Whether the robot has stood where it is since ``stamp`` or earlier."""
        return self.stood is not None and stamp >= self.stood.stamp - STAMP_ROUNDING_S


class PoseTrack:
    """The robot's last poses, by the stamps at which they were true (s)."""

    def __init__(self) -> None:
        self._poses: deque[tuple[float, Pose]] = deque()

    def add(self, stamp: float, pose: Pose) -> None:
        poses = self._poses
        if poses and stamp < poses[-1][0] - _TRACK_S:
            poses.clear()  # the clock was set back
        if poses and stamp <= poses[-1][0]:
            return
        poses.append((stamp, pose))
        while poses[0][0] < stamp - _TRACK_S:
            poses.popleft()

    def at(self, stamp: float) -> Pose | None:
        """The pose at ``stamp``, interpolated; None where no two measured poses are near enough."""
        later: tuple[float, Pose] | None = None
        for time, pose in reversed(self._poses):
            if time == stamp:
                return pose
            if time < stamp:
                if later is None or later[0] - time > _LARGEST_GAP_S:
                    return None
                return _between(pose, later[1], (stamp - time) / (later[0] - time))
            later = (time, pose)
        return None


def still_fits(action: Action, seen_from: Pose, pose: Pose) -> bool:
    """Whether an action decided at ``seen_from`` can still be carried out from ``pose``.

    It cannot once the robot is past the action's end, since the robot neither reverses nor turns back. A stop never
    fits: it must be decided from a picture taken at rest.
    """
    dx, dy = pose.x - seen_from.x, pose.y - seen_from.y
    turned = math.remainder(pose.yaw - seen_from.yaw, math.tau)
    if math.hypot(dx, dy) > _MOST_MOVED_M or abs(turned) > _MOST_TURNED:
        return False
    if action.kind is ActionKind.FORWARD:
        return dx * math.cos(seen_from.yaw) + dy * math.sin(seen_from.yaw) < action.metres
    return action.kind is not ActionKind.STOP and turned / action.radians < 1.0


def _between(a: Pose, b: Pose, share: float) -> Pose:
    return Pose(
        a.x + share * (b.x - a.x), a.y + share * (b.y - a.y), a.yaw + share * math.remainder(b.yaw - a.yaw, math.tau)
    )


class OscillationDetector:
    """Notices a run that makes no progress: it repeats a decision at the same place, or turns back and forth.

    Call :meth:`refuses` before each action and :meth:`carried_out` after it. Blocked actions do not count; they are
    detected separately.

    :param repeats: this many-th time for the same action at the same pose is refused.
    :param reversals: so many changes of direction between turns, without a drive, are refused.
    """

    def __init__(self, repeats: int, reversals: int) -> None:
        self._repeats = repeats
        self._reversals = reversals
        self._done: list[tuple[Pose, Action]] = []
        self._turns: list[float] = []  # rad, since the last drive

    def refuses(self, pose: Pose, action: Action) -> str:
        """Why ``action`` at ``pose`` would lead nowhere; empty when it is allowed."""
        if action.kind is ActionKind.STOP:
            return ""
        same = sum(1 for then, what in self._done if what == action and _same(then, pose))
        if same + 1 >= self._repeats:
            return f"'{format_action(action)}' was decided {same + 1} times at the same place"
        turns = [*self._turns, action.radians] if action.radians else []
        changes = sum(1 for a, b in zip(turns, turns[1:], strict=False) if a * b < 0.0)
        if changes >= self._reversals:
            return f"it turned to and fro {len(turns)} times without driving"
        if abs(sum(turns)) > _MOST_TURNED_ON_SPOT:
            return f"it turned by {math.degrees(abs(sum(turns))):.0f} degrees without driving"
        return ""

    def carried_out(self, pose: Pose, action: Action) -> None:
        """Record that ``action``, decided at ``pose``, is over."""
        if action.kind is ActionKind.STOP:
            return
        self._done.append((pose, action))
        self._turns = [*self._turns, action.radians] if action.radians else []


def _same(a: Pose, b: Pose) -> bool:
    near = math.hypot(a.x - b.x, a.y - b.y) <= _SAME_PLACE_M
    return near and abs(math.remainder(a.yaw - b.yaw, math.tau)) <= _SAME_HEADING
