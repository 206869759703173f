# SPDX-License-Identifier: Apache-2.0
"""Checks odometry: a heading from a valid orientation, and motion that the driver's twist alone would hide. Pure.

Some drivers publish poses and no twist, and some a wrong one. So the robot's speed is the greater of the twist and of
what successive poses show beyond it, and a twist that contradicts the poses for long is an error.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dsd_ros.navigation.run.controller import Pose, Velocity, unit_quaternion
from dsd_ros.navigation.safety.causes import FURTHEST

_FASTEST = 100.0  # m/s and rad/s
_KEPT_S = 1.0  # of poses
_SPACING_S = 0.01  # between kept poses
# Window (s), and by how much the mean poses of its halves may differ on a standing robot (m, rad). White noise of 4 mm
# and 2 mrad at 50 Hz stays below that; the short window notices fast motion soon, the long one slow motion at all.
_WINDOWS = ((0.2, 0.006, 0.006), (0.6, 0.003, 0.003))
_NO_TWIST = 1e-6  # m/s and rad/s; some drivers send 1e-12
_CONFLICT_S = 2.0  # of contradiction, with no agreement in motion in between
_CONFLICT_SHARE, _CONFLICT_M, _CONFLICT_RAD = 0.5, 0.1, 0.2  # of the greater; and on top, within _KEPT_S


class OdometryError(ValueError):
    """An odometry message without a usable pose or twist; one sentence."""


def checked_pose(place: Sequence[float], orientation: Sequence[float]) -> Pose:
    """The pose at ``place`` (x, y in m, ...) with an orientation (x, y, z, w).

    :raises OdometryError: for a place that is not finite or absurdly far, or an orientation that is no rotation.
    """
    if not all(abs(value) <= FURTHEST for value in place[:2]):  # NaN fails here, too
        raise OdometryError(f"The odometry's position is ({place[0]:g}, {place[1]:g}) m: check the robot's driver.")
    unit = unit_quaternion(*orientation)
    if unit is None:
        length = math.hypot(*orientation)
        raise OdometryError(f"The odometry's orientation has length {length:g} instead of 1: check the robot's driver.")
    x, y, z, w = unit
    return Pose(place[0], place[1], math.atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z)))


def checked_twist(ahead: float, left: float, turn: float) -> Velocity:
    """The speed over ground (m/s) and the turn rate (rad/s) of a twist.

    :raises OdometryError: for numbers that are not finite or absurdly large.
    """
    if not all(abs(value) <= _FASTEST for value in (ahead, left, turn)):
        raise OdometryError(
            f"The odometry's twist is ({ahead:g}, {left:g}) m/s and {turn:g} rad/s: check the robot's driver."
        )
    return Velocity(math.hypot(ahead, left), turn)


class _Sample(NamedTuple):
    steady: float
    time: float  # by the stamps' clock while it runs, else by the steady one; without jumps
    x: float
    y: float
    yaw: float  # unwrapped
    way: float  # integral of the twist's speed, m
    turned: float  # integral of the twist's turn rate, rad

    def span(self, other: _Sample) -> float:
        return min(self.steady - other.steady, self.time - other.time)


class SpeedEstimate:
    """The robot's speed by twist and poses, whichever is greater."""

    def __init__(self) -> None:
        self.conflict = ""  # a sentence once twist and poses have contradicted each other for long
        self._samples: deque[_Sample] = deque()
        self._steady = self._stamp = 0.0  # of the newest sample
        self._has_speed = self._has_turn = False  # the driver fills in that part of the twist
        self._conflict_s = 0.0

    def on_clock_set(self, jump: float) -> None:
        """The stamps' clock was set by ``jump`` s, which is no time that passed."""
        self._stamp += jump

    def update(self, pose: Pose, twist: Velocity, steady: float, stamp: float) -> Velocity:
        """Speed (m/s) and turn rate (rad/s) now, both without sign; infinite while there are too few poses.

        ``steady`` and ``stamp``: now by the steady clock and by the stamps' clock, s.
        """
        self._has_speed |= abs(twist.vx) > _NO_TWIST
        self._has_turn |= abs(twist.wz) > _NO_TWIST
        span = steady - self._steady
        sample = self._add(pose, twist, steady, stamp)
        short, long = (self._beyond_twist(sample, *window) for window in _WINDOWS)
        hidden = short or Velocity(math.inf, math.inf)
        if long is not None:
            hidden = Velocity(max(hidden.vx, long.vx), max(hidden.wz, long.wz))
        if len(self._samples) > 1:
            self._compare(sample, span)
        return Velocity(max(abs(twist.vx), hidden.vx), max(abs(twist.wz), hidden.wz))

    def _add(self, pose: Pose, twist: Velocity, steady: float, stamp: float) -> _Sample:
        samples = self._samples
        while samples and steady - samples[0].steady > _KEPT_S:
            samples.popleft()
        # Simulated time may run faster or slower, and twists are in its seconds; it may also stand still.
        passed = stamp - self._stamp if stamp > self._stamp else steady - self._steady
        self._steady, self._stamp = steady, stamp
        if not samples:
            samples.append(_Sample(steady, 0.0, pose.x, pose.y, pose.yaw, 0.0, 0.0))
            return samples[0]
        last = samples[-1]
        sample = _Sample(
            steady,
            last.time + passed,
            pose.x,
            pose.y,
            last.yaw + math.remainder(pose.yaw - last.yaw, math.tau),
            last.way + abs(twist.vx) * passed,
            last.turned + twist.wz * passed,
        )
        if len(samples) > 1 and steady - samples[-2].steady < _SPACING_S:
            samples.pop()
        samples.append(sample)
        return sample

    def _beyond_twist(self, newest: _Sample, window: float, noise_m: float, noise_rad: float) -> Velocity | None:
        """The speed between the window's halves that the twist does not explain; None: there is no earlier half."""
        middle = newest.steady - window / 2
        earlier = [sample for sample in self._samples if sample.steady <= middle]
        if not earlier:
            return None
        inside = [sample for sample in earlier if sample.steady >= newest.steady - window]
        old = _mean(inside or earlier[-1:])
        new = _mean([sample for sample in self._samples if sample.steady > middle])
        span = max(new.span(old), 1e-3)
        moved = math.hypot(new.x - old.x, new.y - old.y) - (new.way - old.way) - noise_m
        turned = abs(new.yaw - old.yaw - (new.turned - old.turned)) - noise_rad
        return Velocity(max(0.0, moved) / span, max(0.0, turned) / span)

    def _compare(self, newest: _Sample, passed: float) -> None:
        """Add up how long twist and poses have contradicted each other; ``passed``: since the last sample, s."""
        oldest = self._samples[0]
        moved, said = math.hypot(newest.x - oldest.x, newest.y - oldest.y), newest.way - oldest.way
        turned, told = newest.yaw - oldest.yaw, newest.turned - oldest.turned
        unlike = self._has_speed and _differ(moved, said, _CONFLICT_M)
        unlike_turn = self._has_turn and _differ(turned, told, _CONFLICT_RAD)
        if unlike or unlike_turn:
            self._conflict_s += passed
        elif (moved > _CONFLICT_M and self._has_speed) or (abs(turned) > _CONFLICT_RAD and self._has_turn):
            self._conflict_s = 0.0
        if self._conflict_s <= _CONFLICT_S or self.conflict:
            return
        span = newest.steady - oldest.steady
        twist, poses = f"{said:.2f} m", f"{moved:.2f} m"
        if not unlike:
            twist, poses = f"{math.degrees(told):.0f} degrees", f"{math.degrees(turned):.0f} degrees"
        self.conflict = (
            f"The robot's odometry contradicts itself: within {span:.1f} s it moved {twist} by its twist and {poses} "
            "by its poses; have the driver publish a twist in m/s and rad/s that belongs to its poses, or none."
        )


def _mean(samples: Sequence[_Sample]) -> _Sample:
    return _Sample(*(math.fsum(values) / len(samples) for values in zip(*samples, strict=True)))


def _differ(one: float, other: float, margin: float) -> bool:
    return abs(one - other) > _CONFLICT_SHARE * max(abs(one), abs(other)) + margin
