"""The last gate before the motors: a command that is not fresh becomes a zero command."""

from __future__ import annotations

import math

from dsd_ros.navigation.controller import AT_REST, Velocity


class Watchdog:
    """Passes the last command on while it and the robot's odometry are fresh, and zero otherwise.

    ``now`` must come from a monotonic clock. Not thread-safe by itself: a caller with several
    threads holds its own lock. Before the first command and the first odometry there is nothing
    fresh, so the output is zero.

    :param timeout: seconds that a command or an odometry sample stays fresh.
    """

    def __init__(self, timeout: float = 0.5) -> None:
        if not (math.isfinite(timeout) and timeout > 0.0):
            raise ValueError(f"the watchdog's timeout must be a positive number, not {timeout!r}")
        self.timeout = timeout
        self._command = AT_REST
        self._command_time = -math.inf
        self._odometry_time = -math.inf

    def command(self, velocity: Velocity, now: float) -> None:
        """Note a fresh command. One that is not a finite number counts as none at all."""
        if math.isfinite(velocity.vx) and math.isfinite(velocity.wz):
            self._command = velocity
            self._command_time = now

    def odometry(self, now: float) -> None:
        """Note that the robot has reported where it is."""
        self._odometry_time = now

    def stop(self) -> None:
        """Forget the command: zero until the next fresh one."""
        self._command_time = -math.inf

    def command_age(self, now: float) -> float:
        return now - self._command_time

    def odometry_age(self, now: float) -> float:
        return now - self._odometry_time

    def fresh(self, now: float) -> bool:
        """Whether a command would pass now."""
        limit = self.timeout
        return self.command_age(now) < limit and self.odometry_age(now) < limit

    def output(self, now: float) -> Velocity:
        """What may be sent to the robot at this moment."""
        return self._command if self.fresh(now) else AT_REST
