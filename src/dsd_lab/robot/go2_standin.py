# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a Unitree Go2: answers its services and reports its state as the robot does, in a simulated world.

Where the robot's behaviour is not public, the stand-in chooses which posture refuses what, and with which code: only
standing up leaves the ground, and a Move is refused (4202) unless the robot is in balance stand or walking.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from dsd_ros.robot.driver import DriverError, Posture
from dsd_ros.robot.go2.protocol import (
    API_VERSION,
    HOLD_S,
    OBSTACLES_AVOID,
    SPORT,
    AvoidApi,
    Code,
    ServiceRequest,
    ServiceResponse,
    SportApi,
    encode_state,
    finite,
    read_parameter,
)
from dsd_ros.robot.sim.driver import SimulatedDriver
from dsd_ros.robot.sim.simulator import Simulator

RISE_S = 1.0  # duration of standing up and of lying down
SLOW_S = 0.8  # delay of every request when the robot is slow
SLOW_STATE_S = 0.2
_VERSION = "1.0.0.1"  # of its services
_CLOCK = 1000.0  # s; the robot's clock differs from the reader's
_AHEAD = 0.15  # m; range of its obstacle avoidance
_IDLE, _BALANCE, _WALKING, _LYING, _LOCKED, _DAMPED, _RISING = 0, 1, 3, 5, 6, 7, 8
_STANDING = (_IDLE, _BALANCE, _WALKING)


class StandinFault(Enum):
    """Failures of the robot, on demand."""

    NONE = "none"
    FREEZE = "freeze"  # no state and no answers; the firmware holds the last Move as usual
    SLOW = "slow"  # requests are carried out late, and states are rare
    DIE = "die"  # no services, but states
    REJECT = "reject"  # every request is answered with an error


class Go2Standin:
    """Thread-safe. ``receive`` queues requests, ``answers`` carries out those that are due."""

    def __init__(
        self,
        simulator: Simulator,
        lying: bool = True,
        with_path: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fault = StandinFault.NONE
        self.with_path = with_path
        self.avoiding = self.taken_over = False
        self.driver = SimulatedDriver(simulator, HOLD_S, clock=clock)
        self._clock = clock
        self._mode, self._next_mode = (_LYING if lying else _BALANCE), _BALANCE
        self._busy_until = -math.inf
        self.driver.posture = Posture.LYING if lying else Posture.STANDING
        self._queue: deque[tuple[float, str, ServiceRequest]] = deque()
        self._lock = threading.RLock()
        self._state_time = -math.inf

    def receive(self, service: str, request: ServiceRequest, now: float | None = None) -> None:
        """A request has arrived."""
        now = self._clock() if now is None else now
        with self._lock:
            if self.fault in (StandinFault.FREEZE, StandinFault.DIE):
                return
            due = now + (SLOW_S if self.fault is StandinFault.SLOW else 0.0)
            self._queue.append((due, service, request))

    def answers(self, now: float | None = None) -> list[tuple[str, ServiceResponse]]:
        """Carry out what is due; returns (service, answer) for each request that wants one."""
        now = self._clock() if now is None else now
        found = []
        with self._lock:
            while self._queue and self._queue[0][0] <= now:
                _, service, request = self._queue.popleft()
                if self.fault in (StandinFault.FREEZE, StandinFault.DIE):
                    continue
                code, data = self._carry_out(service, request, now)
                if not request.noreply:
                    answer = ServiceResponse(request.identity, request.api_id, int(code), data)
                    found.append((service, answer))
        return found

    def _carry_out(self, service: str, request: ServiceRequest, now: float) -> tuple[Code, str]:
        if self.fault is StandinFault.REJECT:
            return Code.INTERNAL, ""
        self._settle(now)
        if request.api_id == API_VERSION:
            return Code.OK, _VERSION
        try:
            parameter = read_parameter(request.parameter)
            if service == SPORT:
                return self._sport(SportApi(request.api_id), parameter, now), ""
            if service == OBSTACLES_AVOID:
                return self._avoid(AvoidApi(request.api_id), parameter)
        except DriverError:
            return Code.NOT_READY, ""
        except ValueError:
            known = SportApi if service == SPORT else AvoidApi
            is_known = any(request.api_id == member for member in known)
            return (Code.BAD_PARAMETER if is_known else Code.NOT_IMPLEMENTED), ""
        return Code.NOT_IMPLEMENTED, ""

    def _sport(self, api: SportApi, parameter: dict[str, object], now: float) -> Code:
        if api is SportApi.STOP_MOVE:
            self.driver.stop()
        elif api is SportApi.DAMP:
            self.driver.damp()
            self._become(_DAMPED, now, 0.0)
        elif api in (SportApi.STAND_UP, SportApi.RECOVERY_STAND):
            after = _LOCKED if api is SportApi.STAND_UP else _BALANCE
            self._become(after, now, 0.0 if self._mode in (*_STANDING, _LOCKED) else RISE_S)
        elif api is SportApi.STAND_DOWN:
            self.driver.stand_down()
            self._become(_LYING, now, 0.0 if self._mode == _LYING else RISE_S)
        elif api is SportApi.BALANCE_STAND:
            if self._mode not in (*_STANDING, _LOCKED):
                return Code.NOT_READY
            self._become(_BALANCE, now, 0.0)
        else:
            return self._move(finite(parameter, "x", "y", "z"))
        return Code.OK

    def _avoid(self, api: AvoidApi, parameter: dict[str, object]) -> tuple[Code, str]:
        if api is AvoidApi.SWITCH_GET:
            return Code.OK, json.dumps({"enable": self.avoiding})
        if api is AvoidApi.MOVE:
            command = finite(parameter, "x", "y", "yaw")
            if not (self.avoiding and self.taken_over):
                return Code.NOT_READY, ""
            return self._move(command), ""
        switch = api is AvoidApi.SWITCH_SET
        value = parameter.get("enable" if switch else "is_remote_commands_from_api")
        if not isinstance(value, bool):
            return Code.BAD_PARAMETER, ""
        if switch:
            self.avoiding = value
        else:
            self.taken_over = value
        return Code.OK, ""

    def _move(self, command: tuple[float, ...]) -> Code:
        if self._mode not in _STANDING:
            return Code.NOT_READY
        self.driver.move(*command)
        return Code.OK

    def _become(self, mode: int, now: float, after: float) -> None:
        self._next_mode, self._busy_until = mode, now + after
        self._mode = _RISING
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Finish a change of posture that is due."""
        if self._mode == _RISING and now >= self._busy_until:
            self._mode = self._next_mode
            if self._mode in (*_STANDING, _LOCKED):
                self.driver.stand_up()

    def advance(self, now: float | None = None) -> None:
        """Move the base until ``now``."""
        now = self._clock() if now is None else now
        with self._lock:
            self._settle(now)
            if self.avoiding and self.taken_over and self._blocked():
                _, vy, wz = self.driver.command
                self.driver.move(0.0, vy, wz)
            self.driver.advance(now)

    def _blocked(self) -> bool:
        """Whether driving on would hit something."""
        if self._mode not in _STANDING or self.driver.command[0] <= 0.0:
            return False
        x, y, yaw = self.driver.simulator.pose
        world = self.driver.simulator.world
        return world.clearance(x + _AHEAD * math.cos(yaw), y + _AHEAD * math.sin(yaw)) < 0.0

    def mode(self) -> int:
        """The posture's number in the state."""
        with self._lock:
            moving = self.driver.state().posture is Posture.MOVING
            return _WALKING if self._mode in _STANDING and moving else self._mode

    def state(self, now: float | None = None) -> bytes | None:
        """The state as published now; None while the robot is silent."""
        now = self._clock() if now is None else now
        with self._lock:
            seldom = self.fault is StandinFault.SLOW and now - self._state_time < SLOW_STATE_S
            if self.fault is StandinFault.FREEZE or seldom:
                return None
            self._state_time = now
            base = self.driver.state()
            return encode_state(replace(base, stamp=_CLOCK + base.stamp, mode=self.mode()), self.with_path)
