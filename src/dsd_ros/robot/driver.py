"""One interface to a robot's base, whatever robot it is: posture, motion, state, limits.

A call that changes the posture returns when the robot has confirmed it, and raises :class:`DriverError` otherwise.
``move`` returns at once: it names the velocity to keep, the driver sends it as often as the robot needs it, stops the
robot when no further ``move`` comes, and shows in :meth:`Driver.fault` what keeps it from being obeyed.
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
    """Why a driver cannot do what it was asked."""

    NO_STATE = "The robot's state has not come lately, so nothing it does could be seen."
    NO_SERVICE = "Nobody listens to the robot's service: is the robot on, and in this network and DDS domain?"
    NO_ANSWER = "The robot's service has not answered in time."
    REJECTED = "The robot has rejected the request."
    UNCONFIRMED = "The robot has said yes, but its state does not show it."
    STOP_UNCONFIRMED = "The robot has not acknowledged the stop; it gets no further motion until it does."
    WRONG_POSTURE = "The robot is not standing, so it cannot move."
    BAD_COMMAND = "The velocity is not a finite number."
    BAD_STATE = "The robot's state cannot be read."
    CLOSED = "The driver is closed."


@dataclass(frozen=True)
class Fault:
    """A cause, what exactly happened, the robot's own status code if it gave one, and since when (monotonic, s)."""

    cause: FaultCause
    detail: str = ""
    code: int | None = None
    since: float = 0.0

    def __str__(self) -> str:
        return f"{self.cause.value} {self.detail}".strip()


class DriverError(RuntimeError):
    """A request that the robot did not carry out, or not provably."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


class Posture(Enum):
    """How the robot holds itself."""

    UNKNOWN = "unknown"
    STANDING = "standing"  # ready to move
    MOVING = "moving"
    LOCKED = "locked"  # standing with stiff joints
    LYING = "lying"
    DAMPED = "damped"  # limp
    BUSY = "busy"  # on the way from one to another, or in a trick


@dataclass(frozen=True)
class MotionLimits:
    """What a base may be asked for, in its own frame, and how fast it may gain it.

    The ranges of the settings are what a Go2's sport service takes.
    """

    vx_min: float = option(-0.5, "top speed backwards, m/s", -2.5, 0.0)
    vx_max: float = option(1.5, "top speed ahead, m/s", 0.0, 3.8)
    vy_max: float = option(0.5, "top speed sideways, m/s", 0.0, 1.0)
    wz_max: float = option(1.5, "top turn rate, rad/s", 0.0, 4.0)
    ax: float = option(2.0, "acceleration ahead, m/s^2", 0.1, 10.0)
    ay: float = option(2.0, "acceleration sideways, m/s^2", 0.1, 10.0)
    awz: float = option(6.0, "angular acceleration, rad/s^2", 0.1, 40.0)

    def __post_init__(self) -> None:
        positive = (self.vx_max, self.vy_max, self.wz_max, self.ax, self.ay, self.awz)
        if not all(math.isfinite(v) and v >= 0 for v in positive) or not -10 <= self.vx_min <= 0:
            raise ValueError(f"The limits must be finite, and vx_min not positive: {self}.")

    def clip(self, vx: float, vy: float, wz: float) -> tuple[float, float, float]:
        """The nearest allowed velocity."""
        return (
            min(max(vx, self.vx_min), self.vx_max),
            min(max(vy, -self.vy_max), self.vy_max),
            min(max(wz, -self.wz_max), self.wz_max),
        )

    def approach(
        self, present: tuple[float, float, float], wanted: tuple[float, float, float], span: float
    ) -> tuple[float, float, float]:
        """The next velocity on the way to the wanted one, ``span`` seconds on; slowing down is never delayed."""
        gains = (self.ax, self.ay, self.awz)
        x, y, z = (_approach(a, b, gain * span) for a, b, gain in zip(present, self.clip(*wanted), gains, strict=True))
        return x, y, z


def _approach(present: float, wanted: float, gain: float) -> float:
    if present * wanted < 0.0:
        present = 0.0  # turning round begins from rest
    if abs(wanted) <= abs(present):
        return wanted
    return math.copysign(min(abs(wanted), abs(present) + gain), wanted)


@dataclass(frozen=True)
class RobotState:
    """What is known of the robot. m, m/s, rad, rad/s; ``received`` is monotonic time, ``stamp`` the robot's own.

    ``velocity`` is in the robot's frame (x ahead, y left). ``orientation`` is (w, x, y, z). ``battery`` is a
    fraction of 1, None where the robot does not say. ``error_code`` is the robot's own, whatever it means by it.
    """

    received: float
    stamp: float
    position: tuple[float, float, float]
    orientation: tuple[float, float, float, float]
    rpy: tuple[float, float, float]
    velocity: tuple[float, float, float]
    yaw_rate: float
    gyroscope: tuple[float, float, float]
    accelerometer: tuple[float, float, float]
    posture: Posture
    mode: int = 0
    error_code: int = 0
    body_height: float = 0.0
    battery: float | None = None

    def age(self, now: float | None = None) -> float:
        """Seconds since it arrived."""
        return (time.monotonic() if now is None else now) - self.received

    def still(self, limit: float) -> bool:
        """Whether it neither goes nor turns faster than ``limit`` (m/s, rad/s)."""
        return max(*map(abs, self.velocity[:2]), abs(self.yaw_rate)) < limit


class Driver(Protocol):
    """A robot's base. Thread-safe; every wait ends by itself."""

    limits: MotionLimits

    def state(self) -> RobotState | None:
        """The newest state; None before the first."""

    def fault(self) -> Fault | None:
        """What keeps the robot from moving as asked, while it does."""

    def stand_up(self) -> None:
        """Get up, from lying or damped. :raises DriverError: when it is not confirmed."""

    def balance(self) -> None:
        """Stand ready to move. :raises DriverError: when it is not confirmed."""

    def stand_down(self) -> None:
        """Stop, then lie down. :raises DriverError: when it is not confirmed."""

    def damp(self) -> None:
        """Go limp at once, whatever the robot does. :raises DriverError: when it is not confirmed."""

    def move(self, vx: float, vy: float, wz: float) -> None:
        """Keep this velocity (m/s, m/s, rad/s) until the next call or the command's time-out; zero stops.

        :raises DriverError: for a velocity that is no number, or from a closed driver.
        """

    def stop(self, timeout: float = 1.0) -> None:
        """Stop, and return when the robot has acknowledged it. :raises DriverError: when it has not."""

    def close(self) -> None:
        """Stop the robot as far as it lets itself be stopped, and give threads and topics back."""


def wait_until(done: Callable[[], bool], timeout: float, step: float = 0.01) -> bool:
    """Poll until ``done()``; False after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(step)
    return True


def until_connected(driver: Driver, timeout: float, stop: Callable[[], bool]) -> bool:
    """Wait for the robot's first state; False after ``timeout`` seconds or when ``stop()``."""
    wait_until(lambda: driver.state() is not None or stop(), timeout, 0.02)
    return driver.state() is not None
