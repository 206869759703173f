# SPDX-License-Identifier: Apache-2.0
"""The driver interface to a robot's base: posture, motion, state, limits.

A call that changes the posture returns when the robot has confirmed it, and raises :class:`DriverError` otherwise.
``move`` returns at once; the driver repeats it as often as the robot needs it, and stops when no further one comes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dsd_ros.options import option


class FaultCause(Enum):
    """Why a driver cannot do what was asked."""

    NO_STATE = "The robot's state has not come recently, so its motion cannot be observed."
    NO_SERVICE = "The robot's service is not there: is the robot on, and in this network and DDS domain?"
    NO_ANSWER = "The robot's service has not answered in time."
    REJECTED = "The robot has rejected the request."
    UNCONFIRMED = "The robot has accepted the request, but its state does not show it."
    STOP_UNCONFIRMED = "The robot has not acknowledged the stop; it will not be moved until it does."
    WRONG_POSTURE = "The robot is not standing, so it cannot move."
    BAD_COMMAND = "The velocity is not a finite number."
    BAD_STATE = "The robot's state cannot be read."
    CLOSED = "The driver is closed."


@dataclass(frozen=True)
class Fault:
    """Why a driver cannot do what was asked."""

    cause: FaultCause
    detail: str = ""
    code: int | None = None  # the robot's own
    since: float = 0.0  # monotonic, s

    def __str__(self) -> str:
        return f"{self.cause.value} {self.detail}".strip()


class DriverError(RuntimeError):
    """A request that the robot did not carry out, or did not confirm."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Posture(Enum):
    """The robot's posture."""

    UNKNOWN = "unknown"
    STANDING = "standing"  # ready to move
    MOVING = "moving"
    LOCKED = "locked"  # standing with stiff joints
    LYING = "lying"
    DAMPED = "damped"  # limp
    BUSY = "busy"  # between two postures, or in a trick


ACCELERATION = (2.0, 2.0, 6.0)  # ahead and sideways, m/s^2, and turning, rad/s^2


@dataclass(frozen=True)
class MotionLimits:
    """Limits of velocity in the base's own frame; their ranges are those of a Go2's sport service."""

    vx_min: float = option(-0.5, "top speed backwards, m/s", -2.5, 0.0)
    vx_max: float = option(1.5, "top speed ahead, m/s", 0.0, 3.8)
    vy_max: float = option(0.5, "top speed sideways, m/s", 0.0, 1.0)
    wz_max: float = option(1.5, "top turn rate, rad/s", 0.0, 4.0)

    def __post_init__(self) -> None:
        positive = (self.vx_max, self.vy_max, self.wz_max)
        if not all(math.isfinite(v) and v >= 0 for v in positive) or not -10 <= self.vx_min <= 0:
            raise ValueError(f"The limits must be finite, and vx_min not positive: {self}.")

    def clip(self, vx: float, vy: float, wz: float) -> tuple[float, float, float]:
        """The nearest allowed velocity."""
        vx, vy = min(max(vx, self.vx_min), self.vx_max), min(max(vy, -self.vy_max), self.vy_max)
        return vx, vy, min(max(wz, -self.wz_max), self.wz_max)

    def approach(
        self, present: tuple[float, float, float], wanted: tuple[float, float, float], span: float
    ) -> tuple[float, float, float]:
        """The velocity ``span`` seconds later on the way to the wanted one; slowing down is not limited."""
        wanted = self.clip(*wanted)
        x, y, z = (_approach(a, b, gain * span) for a, b, gain in zip(present, wanted, ACCELERATION, strict=True))
        return x, y, z


def _approach(present: float, wanted: float, gain: float) -> float:
    if present * wanted < 0.0:
        present = 0.0  # a reversal starts from rest
    if abs(wanted) <= abs(present):
        return wanted
    return math.copysign(min(abs(wanted), abs(present) + gain), wanted)


@dataclass(frozen=True)
class RobotState:
    """The robot's state, in m, m/s, rad, rad/s."""

    received: float  # monotonic time of arrival, s
    stamp: float  # the robot's own time, s
    position: tuple[float, float, float]
    orientation: tuple[float, float, float, float]  # w, x, y, z
    rpy: tuple[float, float, float]
    velocity: tuple[float, float, float]  # in the robot's frame: x ahead, y left
    yaw_rate: float
    gyroscope: tuple[float, float, float]
    accelerometer: tuple[float, float, float]
    posture: Posture
    mode: int = 0
    error_code: int = 0
    body_height: float = 0.0
    battery: float | None = None  # charge, 0 to 1

    def age(self, now: float | None = None) -> float:
        """Seconds since it arrived."""
        return (time.monotonic() if now is None else now) - self.received

    def still(self, limit: float) -> bool:
        """Whether it moves and turns slower than ``limit`` (m/s, rad/s)."""
        return max(*map(abs, self.velocity[:2]), abs(self.yaw_rate)) < limit


class Driver(Protocol):
    """A robot's base. Thread-safe; every wait has a limit."""

    limits: MotionLimits

    def state(self) -> RobotState | None:
        """The newest state; None before the first."""

    def fault(self) -> Fault | None:
        """What prevents the robot from moving as asked; None when nothing does."""

    def stand_up(self) -> None:
        """Get up, from lying or damped. :raises DriverError: when it is not confirmed."""

    def balance(self) -> None:
        """Stand ready to move. :raises DriverError: when it is not confirmed."""

    def stand_down(self) -> None:
        """Stop, then lie down. :raises DriverError: when it is not confirmed."""

    def damp(self) -> None:
        """Go limp at once, even in motion. :raises DriverError: when it is not confirmed."""

    def move(self, vx: float, vy: float, wz: float) -> None:
        """Keep this velocity (m/s, m/s, rad/s) until the next call or the command's time-out; zero stops.

        :raises DriverError: for a velocity that is not finite, or when the driver is closed.
        """

    def stop(self, timeout: float = 1.0) -> None:
        """Stop, and return when the robot has acknowledged it. :raises DriverError: when it has not."""

    def close(self) -> None:
        """Stop the robot if it still answers, and free threads and topics."""


def wait_until(done: Callable[[], bool], timeout: float, step: float = 0.01) -> bool:
    """Poll until ``done()`` is true; False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (is_done := done()) and time.monotonic() < deadline:
        time.sleep(step)
    return is_done


def until_connected(driver: Driver, timeout: float, stop: Callable[[], bool]) -> bool:
    """Wait for the robot's first state; False after ``timeout`` seconds or when ``stop()``."""
    wait_until(lambda: driver.state() is not None or stop(), timeout, 0.02)
    return driver.state() is not None
