"""Pictures taken while the robot still moves: where it was then, and whether a decision about them still fits."""

from __future__ import annotations

import math
from collections import deque

from dsd_ros.navigation.actions import Action, ActionKind
from dsd_ros.navigation.controller import Pose

_MEMORY_S = 6.0
_LARGEST_GAP_S = 0.3  # between two poses: no guessing where the robot was in between
_MOST_TURNED = math.radians(15.0)  # since the picture, for a decision that still fits
_MOST_MOVED_M = 0.4


class Track:
    """The robot's last poses, by the stamps they were true at (s)."""

    def __init__(self) -> None:
        self._poses: deque[tuple[float, Pose]] = deque()

    def add(self, stamp: float, pose: Pose) -> None:
        poses = self._poses
        if poses and stamp < poses[-1][0] - _MEMORY_S:
            poses.clear()  # that clock was set back
        if poses and stamp <= poses[-1][0]:
            return
        poses.append((stamp, pose))
        while poses[0][0] < stamp - _MEMORY_S:
            poses.popleft()

    def at(self, stamp: float) -> Pose | None:
        """The pose at ``stamp``, between two that were measured; None where there are none near."""
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


def fits(action: Action, seen_from: Pose, pose: Pose) -> bool:
    """Whether an action decided at ``seen_from`` can still be carried out from ``pose``.

    It cannot when the robot has gone beyond where the action would have led it: it neither drives
    nor turns back. A stop never fits: that is said of a picture at rest, or not at all.
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
