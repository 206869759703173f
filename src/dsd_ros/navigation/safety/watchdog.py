# SPDX-License-Identifier: Apache-2.0
"""The last gate before the motors: a command that is not fresh becomes a zero command."""

from __future__ import annotations

import math

from dsd_ros.navigation.run.controller import AT_REST, Velocity


class Watchdog:
    """Passes the last command on while it and the robot's odometry are fresh, and zero otherwise. Not thread-safe.

    :param timeout: how long a command or an odometry sample stays fresh, s, by the monotonic clock of ``now``.
    """

    def __init__(self, timeout: float = 0.5) -> None:
        if not (math.isfinite(timeout) and timeout > 0.0):
            raise ValueError(f"the watchdog's timeout must be a positive number, not {timeout!r}")
        self.timeout = timeout
        self._command = AT_REST
        self._command_time = -math.inf
        self._odometry_time = -math.inf

    def command(self, velocity: Velocity, now: float) -> None:
        """Record a command, unless it is not finite."""
        if math.isfinite(velocity.vx) and math.isfinite(velocity.wz):
            self._command = velocity
            self._command_time = now

    def odometry(self, now: float) -> None:
        """Record that the robot has reported its pose."""
        self._odometry_time = now

    def stop(self) -> None:
        """Forget the command: zero until the next one."""
        self._command_time = -math.inf

    def odometry_age(self, now: float) -> float:
        return now - self._odometry_time

    def fresh(self, now: float) -> bool:
        """Whether the last command passes now."""
        limit = self.timeout
        return now - self._command_time < limit and self.odometry_age(now) < limit

    def output(self, now: float) -> Velocity:
        """The velocity to send to the robot now."""
        return self._command if self.fresh(now) else AT_REST
