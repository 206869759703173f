# SPDX-License-Identifier: Apache-2.0
"""Where the robot was when a picture was taken: its poses of the last seconds by stamp. Pure."""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

from dsd_ros.navigation.run.controller import MotionSettings, Pose, Velocity

_KEPT_S = 10.0  # of poses
_SPACING_S = 0.01  # between kept poses
_GAP_S = 0.15  # between two poses; within a longer gap the robot's way is not known
# A pose further from the last one than twice the top speed and this leads: the odometry's frame has moved.
_JUMP_M, _JUMP_RAD = 0.1, math.radians(6.0)


class _Sample(NamedTuple):
    stamp: float
    pose: Pose
    turn_rate: float  # rad/s, without sign


class PoseTrack:
    """Poses in order of their stamps. An odometry that jumps or pauses begins a new track: nothing before it counts."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []

    def clear(self) -> None:
        """Forget all."""
        self._samples.clear()

    def add(self, stamp: float, pose: Pose, measured: Velocity, settings: MotionSettings) -> None:
        """Record a measured pose, its stamp (s) and the measured velocity; ``settings``: how fast the robot drives."""
        samples = self._samples
        if samples:
            last, passed = samples[-1], stamp - samples[-1].stamp
            if passed < 0.0 or passed > _GAP_S or _jumped(last.pose, pose, passed, settings):
                samples.clear()
            elif passed < _SPACING_S:
                return
        samples.append(_Sample(stamp, pose, measured.wz))
        if stamp - samples[0].stamp > 2 * _KEPT_S:
            del samples[: bisect.bisect_left(samples, (stamp - _KEPT_S,))]

    def reaches(self, stamp: float) -> bool:
        """Whether poses up to ``stamp`` (s) have come."""
        return bool(self._samples) and stamp <= self._samples[-1].stamp

    def at(self, stamp: float, turn_rate: float) -> Pose | None:
        """The pose at ``stamp`` (s), interpolated; None where it is not known, or the robot turned faster (rad/s)."""
        samples = self._samples
        after = bisect.bisect_left(samples, (stamp,))
        if not 0 < after < len(samples):
            return None
        old, new = samples[after - 1 : after + 1]
        if max(old.turn_rate, new.turn_rate) > turn_rate:
            return None
        share = (stamp - old.stamp) / (new.stamp - old.stamp)
        a, b = old.pose, new.pose
        turned = math.remainder(b.yaw - a.yaw, math.tau)
        return Pose(a.x + share * (b.x - a.x), a.y + share * (b.y - a.y), a.yaw + share * turned)


def _jumped(old: Pose, new: Pose, passed: float, settings: MotionSettings) -> bool:
    moved = math.hypot(new.x - old.x, new.y - old.y)
    turned = abs(math.remainder(new.yaw - old.yaw, math.tau))
    return moved > _JUMP_M + 2 * settings.speed * passed or turned > _JUMP_RAD + 2 * settings.turn_rate * passed
