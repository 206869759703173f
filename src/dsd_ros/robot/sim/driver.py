# SPDX-License-Identifier: Apache-2.0
"""The simulated Go2 behind the driver interface: requests take effect at once, within the simulator's limits."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from dsd_ros.robot.driver import DriverError, Fault, FaultCause, MotionLimits, Posture, RobotState
from dsd_ros.robot.sim.simulator import VX_MAX, VX_MIN, VY_MAX, WZ_MAX, Simulator

STANDING_HEIGHT, LYING_HEIGHT = 0.31, 0.08  # m
_GRAVITY = 9.81
_AT_REST = (0.0, 0.0, 0.0)


class SimulatedDriver:
    """Drives a simulator by a clock; :meth:`advance` moves it up to a given time (s).

    :param hold_s: how long the last command is kept, s.
    :param rate: simulated seconds per second.
    """

    def __init__(
        self, simulator: Simulator, hold_s: float = 0.5, rate: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The simulator itself limits the acceleration.
        self.limits = MotionLimits(VX_MIN, VX_MAX, VY_MAX, WZ_MAX)
        self.simulator = simulator
        self.posture = Posture.STANDING
        self.hold_s, self._rate = hold_s, rate
        self._lock = threading.RLock()
        self._command = _AT_REST
        self._command_time = -math.inf
        self._clock = clock
        self._time = clock()
        self._accelerometer = (0.0, 0.0, _GRAVITY)

    def advance(self, now: float | None = None) -> None:
        """Move until ``now``; a command that expires earlier counts only until then."""
        with self._lock:
            now = self._clock() if now is None else now
            runs_out = self._command_time + self.hold_s
            before, simulated = self.simulator.velocity, self.simulator.time
            for until in sorted({min(max(runs_out, self._time), now), now}):
                if until <= self._time:
                    continue
                command = self._command if self._time < runs_out else _AT_REST
                self.simulator.step((until - self._time) * self._rate, *command)
                self._time = until
            elapsed = self.simulator.time - simulated
            if elapsed > 0.0:
                vx, vy, _ = self.simulator.velocity
                self._accelerometer = (
                    (vx - before[0]) / elapsed, (vy - before[1]) / elapsed, _GRAVITY,
                )  # fmt: skip

    @property
    def command(self) -> tuple[float, float, float]:
        """The last commanded velocity while it is kept; otherwise zero."""
        with self._lock:
            kept = self._clock() - self._command_time < self.hold_s
            return self._command if kept else _AT_REST

    def state(self) -> RobotState:
        with self._lock:
            x, y, yaw = self.simulator.pose
            vx, vy, wz = self.simulator.velocity
            standing = self.posture is Posture.STANDING
            moving = standing and max(abs(vx), abs(vy), abs(wz)) > 0.02
            height = STANDING_HEIGHT if standing else LYING_HEIGHT
            return RobotState(
                received=self._time,
                stamp=self.simulator.time,
                position=(x, y, height),
                orientation=(math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)),
                rpy=(0.0, 0.0, yaw),
                velocity=(vx, vy, 0.0),
                yaw_rate=wz,
                gyroscope=(0.0, 0.0, wz),
                accelerometer=self._accelerometer,
                posture=Posture.MOVING if moving else self.posture,
                body_height=height,
            )

    def fault(self) -> Fault | None:
        with self._lock:
            return self._lying()

    def _lying(self) -> Fault | None:
        if self.posture is Posture.STANDING:
            return None
        return Fault(FaultCause.WRONG_POSTURE, f"It is {self.posture.value}.")

    def stand_up(self) -> None:
        self._take(Posture.STANDING)

    def balance(self) -> None:
        fault = self.fault()
        if fault is not None:
            raise DriverError(fault)

    def stand_down(self) -> None:
        self._take(Posture.LYING)

    def damp(self) -> None:
        self._take(Posture.DAMPED)

    def _take(self, posture: Posture) -> None:
        with self._lock:
            self.stop()
            self.posture = posture

    def move(self, vx: float, vy: float, wz: float) -> None:
        if not all(map(math.isfinite, (vx, vy, wz))):
            raise DriverError(Fault(FaultCause.BAD_COMMAND, f"It was {vx}, {vy}, {wz}."))
        with self._lock:
            fault = self._lying()
            if fault is not None:
                raise DriverError(fault)
            self.advance()  # the old command holds until now
            self._command = self.limits.clip(vx, vy, wz)
            self._command_time = self._time

    def stop(self, timeout: float = 1.0) -> None:
        with self._lock:
            self.advance()
            self._command_time = -math.inf

    def close(self) -> None:
        self.stop()
