# SPDX-License-Identifier: Apache-2.0
"""Drives a Unitree Go2 through its own services, over any link that carries their messages.

Everything is confirmed: a posture by the service's answer and the state that follows; a stop by the answer to StopMove;
the connection by the age of the state, which comes 50 times a second. A Move is repeated while it is wanted, as the
firmware holds it for a second; if the robot answers Moves, a missing or negative answer ends the motion. Every motion
ends in a StopMove, which is repeated until it is acknowledged; no motion begins before that.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from dsd_ros.options import check_options, option
from dsd_ros.robot.driver import DriverError, Fault, FaultCause, MotionLimits, Posture, RobotState, wait_until
from dsd_ros.robot.go2.protocol import (
    OBSTACLES_AVOID,
    SPORT,
    AvoidApi,
    Code,
    ServiceCalls,
    ServiceLink,
    ServiceRequest,
    ServiceResponse,
    SportApi,
    StateError,
    avoid_move_parameter,
    code_text,
    decode_state,
    move_parameter,
)

REQUEST_S, ATTEMPTS = 0.4, 3  # longest wait for an answer; a request sent so often counts as unanswered
STATE_S = 0.3  # without a state for this long there is no motion
COMMAND_S = 0.5  # the robot is stopped this long after the last command
POSTURE_S = 8.0  # a posture must show in the state within this time
_MOVE_S = 0.05  # between two Moves while moving
_READY = (Posture.STANDING, Posture.MOVING)
# Between StopMoves: in the first _STOP_EAGER_S seconds, and later.
_STOP_AGAIN_S, _STOP_SLOWLY_S, _STOP_EAGER_S = 0.1, 0.5, 3.0
_UNMOVED_S = 2.0  # a robot that still stands after Moves for this long does not obey them
_NOTABLE, _STILL = 0.1, 0.01  # m/s and rad/s
_SHOWN_S = 1.0  # how long a fault of motion is reported
_PAUSE_S = 0.5  # after a rejected or unanswered Move
AVOIDANCE = ("auto", "off", "required")
VELOCITY_FRAMES = ("body", "odom")


@dataclass(frozen=True)
class Go2Settings:
    """How the robot is driven; ValueError for an unknown choice."""

    avoidance: str = option(
        "auto", "the robot's obstacle avoidance. required: no motion without it; off: left as it is", choices=AVOIDANCE
    )
    velocity_frame: str = option("body", "frame of the velocity in the robot's state", choices=VELOCITY_FRAMES)

    def __post_init__(self) -> None:
        check_options(self)


class Go2Driver:
    """See the module and :class:`dsd_ros.robot.driver.Driver`."""

    def __init__(
        self, link: ServiceLink, settings: Go2Settings | None = None, limits: MotionLimits | None = None
    ) -> None:
        self.limits = limits or MotionLimits()
        self.settings = settings or Go2Settings()
        self.avoiding = False
        self._link = link
        self._changed = threading.Condition(threading.RLock())
        self._calls = ServiceCalls(link)
        self._state: RobotState | None = None
        self._bad_state: Fault | None = None
        self._battery: float | None = None
        self._target = (0.0, 0.0, 0.0)
        self._target_time = -math.inf
        self._present = (0.0, 0.0, 0.0)  # the velocity sent last
        self._moving = False  # Moves have been sent since the last acknowledged stop
        self._move_time = -math.inf
        self._moves: dict[int, float] = {}  # unanswered Moves: identity -> when sent
        self._moves_are_answered = False
        self._move_fault: Fault | None = None
        self._blocked_until = -math.inf
        self._unmoved_since: float | None = None
        self._stopping_since: float | None = None
        self._stop_time = -math.inf
        self._stop_ids: set[int] = set()
        self._stop_fault: Fault | None = None
        self._stops_acknowledged = 0
        self._closed = False
        self._thread = threading.Thread(target=self._pace, name="go2 driver", daemon=True)
        self._thread.start()

    # -- called by the link --------------------------------------------------------------------

    def on_state(self, data: bytes) -> None:
        """A serialized SportModeState has arrived."""
        now = time.monotonic()
        try:
            state = decode_state(data, now, self.settings.velocity_frame)
        except StateError as error:
            with self._changed:
                self._bad_state = Fault(FaultCause.BAD_STATE, str(error), since=now)
            return
        with self._changed:
            back = self._state is not None and state.received - self._state.received > 1.0
            self._state = replace(state, battery=self._battery)
            self._bad_state = None
            if back and self.avoiding:  # the robot may have restarted
                self._take_over(True)
            self._changed.notify_all()

    def on_battery(self, charge: float) -> None:
        """The battery's charge, 0 to 1, has arrived."""
        with self._changed:
            self._battery = min(max(charge, 0.0), 1.0)

    def on_response(self, service: str, response: ServiceResponse) -> None:
        """An answer of a service has arrived, to this driver's request or to another client's."""
        now = time.monotonic()
        with self._changed:
            if response.identity in self._stop_ids and response.api_id == SportApi.STOP_MOVE:
                self._on_stop_answer(response, now)
            elif response.identity in self._moves:
                self._on_move_answer(response, now)
            self._changed.notify_all()
        self._calls.on_response(service, response)

    def _on_stop_answer(self, response: ServiceResponse, now: float) -> None:
        if response.code != Code.OK:
            self._stop_fault = Fault(FaultCause.STOP_UNCONFIRMED, code_text(response.code), response.code, now)
            return
        self._stop_ids.clear()
        self._stopping_since = None
        self._stop_fault = None
        self._moving = False
        self._present = (0.0, 0.0, 0.0)
        self._stops_acknowledged += 1

    def _on_move_answer(self, response: ServiceResponse, now: float) -> None:
        sent = self._moves[response.identity]
        self._moves = {key: at for key, at in self._moves.items() if at > sent}
        self._moves_are_answered = True
        if response.code == Code.OK:
            self._move_fault = None
            return
        self._move_fault = Fault(FaultCause.REJECTED, code_text(response.code), response.code, now)
        self._blocked_until = now + _PAUSE_S

    # -- state ---------------------------------------------------------------------------------

    def state(self) -> RobotState | None:
        with self._changed:
            return self._state

    @property
    def moving(self) -> bool:
        """Whether Moves have been sent since the last acknowledged stop."""
        with self._changed:
            return self._moving

    def fault(self) -> Fault | None:
        now = time.monotonic()
        with self._changed:
            if self._closed:
                return Fault(FaultCause.CLOSED)
            heartbeat = self._heartbeat_fault(now)
            if heartbeat is not None:
                return heartbeat
            since = self._stopping_since
            if since is not None and now - since > REQUEST_S:
                return self._stop_fault or Fault(FaultCause.STOP_UNCONFIRMED, since=since)
            move_fault = self._move_fault  # renewed while motion is requested in vain
            return move_fault if move_fault and now - move_fault.since < _SHOWN_S else None

    def _heartbeat_fault(self, now: float) -> Fault | None:
        state = self._state
        if state is not None and state.age(now) <= STATE_S:
            return None
        if self._bad_state is not None:
            return self._bad_state
        if state is None:
            return Fault(FaultCause.NO_STATE, "None has come yet.")
        return Fault(FaultCause.NO_STATE, f"The last came {state.age(now):.1f} s ago.")

    # -- posture -------------------------------------------------------------------------------

    def stand_up(self) -> None:
        self._take_posture(SportApi.STAND_UP, (*_READY, Posture.LOCKED))

    def balance(self) -> None:
        self._take_posture(SportApi.BALANCE_STAND, _READY)

    def stand_down(self) -> None:
        self.stop()
        self._take_posture(SportApi.STAND_DOWN, (Posture.LYING,))

    def damp(self) -> None:
        with self._changed:
            self._target_time = -math.inf
        self._take_posture(SportApi.DAMP, (Posture.DAMPED, Posture.LYING))

    def _take_posture(self, api: SportApi, shown: tuple[Posture, ...]) -> None:
        answered = self.request(SPORT, api)
        if answered.code != Code.OK:
            raise DriverError(Fault(FaultCause.REJECTED, code_text(answered.code), answered.code))

        def seen() -> bool:
            state = self.state()
            return state is not None and state.age() <= STATE_S and state.posture in shown

        if not wait_until(seen, POSTURE_S):
            heartbeat = self._heartbeat_fault(time.monotonic())
            wanted = api.name.lower().replace("_", " ")
            now_in = "" if self._state is None else f"; it is {self._state.posture.value}"
            raise DriverError(heartbeat or Fault(FaultCause.UNCONFIRMED, f"Asked for: {wanted}{now_in}."))

    def start_avoidance(self) -> bool:
        """Switch the robot's obstacle avoidance on as the settings say; returns whether Moves now go through it.

        :raises DriverError: when it is required and the robot does not confirm it.
        """
        if self.settings.avoidance == "off":
            return False
        try:
            take_over = (AvoidApi.USE_REMOTE_COMMAND, '{"is_remote_commands_from_api": true}')
            for api, parameter in ((AvoidApi.SWITCH_SET, '{"enable": true}'), take_over):
                answer = self.request(OBSTACLES_AVOID, api, parameter)
                if answer.code != Code.OK:
                    raise DriverError(Fault(FaultCause.REJECTED, code_text(answer.code), answer.code))
        except DriverError:
            if self.settings.avoidance == "required":
                raise
            return False
        self.avoiding = True
        return True

    def hand_back(self) -> None:
        """Return the robot to its own remote control, until the next :meth:`start_avoidance`."""
        with self._changed:
            if self.avoiding:
                self._take_over(False)
            self.avoiding = False

    def _take_over(self, on: bool) -> None:  # without waiting for answers
        if on:
            self._calls.send(OBSTACLES_AVOID, AvoidApi.SWITCH_SET, '{"enable": true}')
        parameter = f'{{"is_remote_commands_from_api": {str(on).lower()}}}'
        self._calls.send(OBSTACLES_AVOID, AvoidApi.USE_REMOTE_COMMAND, parameter)

    def request(
        self, service: str, api: int, parameter: str = "{}", timeout: float | None = None, attempts: int | None = None
    ) -> ServiceResponse:
        """Send a request and wait for the answer, which may have any status code.

        :raises DriverError: NO_SERVICE, NO_ANSWER or CLOSED.
        """
        span = REQUEST_S if timeout is None else timeout
        tries = ATTEMPTS if attempts is None else attempts
        return self._calls.call(service, api, parameter, span, tries)

    # -- motion --------------------------------------------------------------------------------

    def move(self, vx: float, vy: float, wz: float) -> None:
        if not all(map(math.isfinite, (vx, vy, wz))):
            raise DriverError(Fault(FaultCause.BAD_COMMAND, f"It was {vx}, {vy}, {wz}."))
        with self._changed:
            if self._closed:
                raise DriverError(Fault(FaultCause.CLOSED))
            self._target = self.limits.clip(vx, vy, wz)
            self._target_time = time.monotonic()
            if any(self._target) != self._moving:
                self._changed.notify_all()  # begin or end at once

    def stop(self, timeout: float = 1.0) -> None:
        with self._changed:
            if self._closed:
                raise DriverError(Fault(FaultCause.CLOSED))
            self._target_time = -math.inf
            before = self._stops_acknowledged
            if self._stopping_since is None:
                self._begin_stop(time.monotonic())
            if self._changed.wait_for(lambda: self._stops_acknowledged > before, timeout):
                return
            fault = self._stop_fault or Fault(FaultCause.STOP_UNCONFIRMED, since=time.monotonic())
            if not self._moving:
                self._stopping_since = None  # there was nothing to stop
        raise DriverError(fault)

    def _pace(self) -> None:
        with self._changed:
            while not self._closed:
                self._tick(time.monotonic())
                self._changed.wait_for(self._is_due, self._pause())

    def _pause(self) -> float:
        return _MOVE_S if self._moving or self._stopping_since is not None else 0.1

    def _is_due(self) -> bool:
        """Whether motion must begin or end before the next Move is due."""
        if self._closed:
            return True
        wanted = self._wanted(time.monotonic()) is not None
        return self._stopping_since is None and wanted != self._moving

    def _tick(self, now: float) -> None:
        if self._stopping_since is not None:
            eager = now - self._stopping_since < _STOP_EAGER_S
            if now - self._stop_time >= (_STOP_AGAIN_S if eager else _STOP_SLOWLY_S):
                self._send_stop(now)
            return
        wanted = self._wanted(now)
        if wanted is None:
            if self._moving:
                self._begin_stop(now)
            return
        span = min(now - self._move_time, 2 * _MOVE_S) if self._moving else _MOVE_S
        if self._moving and span < 0.5 * _MOVE_S:
            return
        self._present = self.limits.approach(self._present, wanted, span)
        identity = self._calls.new_identity()
        self._moving = True
        self._watch_motion(now)
        self._move_time = self._moves[identity] = now  # before sending: the answer may come at once
        if self.avoiding:
            parameter = avoid_move_parameter(*self._present)
            self._link.send(OBSTACLES_AVOID, ServiceRequest(identity, AvoidApi.MOVE, parameter))
        else:
            self._link.send(SPORT, ServiceRequest(identity, SportApi.MOVE, move_parameter(*self._present)))

    def _wanted(self, now: float) -> tuple[float, float, float] | None:
        """The velocity to send now; None if the robot should stand, with any fault in ``_move_fault``."""
        fresh = now - self._target_time < COMMAND_S
        if not fresh or not any(self._target) or now < self._blocked_until:
            return None
        if self._state is None or self._heartbeat_fault(now) is not None:
            return None
        fault = self._motion_fault(now, self._state)
        if fault is not None:
            self._move_fault, self._blocked_until = fault, now + _PAUSE_S
            return None
        return self._target

    def _motion_fault(self, now: float, state: RobotState) -> Fault | None:
        if state.posture in (Posture.LYING, Posture.DAMPED):
            return Fault(FaultCause.WRONG_POSTURE, f"It is {state.posture.value}.", since=now)
        if self.settings.avoidance == "required" and not self.avoiding:
            return Fault(FaultCause.REJECTED, "Obstacle avoidance is required and not on.", since=now)
        if self._unmoved_since is not None and now - self._unmoved_since > _UNMOVED_S:
            return Fault(FaultCause.UNCONFIRMED, "It receives Moves and does not move.", since=now)
        if self._moves and now - min(self._moves.values()) > REQUEST_S:
            if self._moves_are_answered:
                detail = "It stopped acknowledging Moves."
                return Fault(FaultCause.NO_ANSWER, detail, Code.NO_ANSWER, now)
            self._moves.clear()  # this robot never answers Moves
        return None

    def _watch_motion(self, now: float) -> None:
        """Record since when the robot stands although it was sent a notable velocity."""
        still = self._state is not None and self._state.still(_STILL)
        if not still or max(map(abs, self._present)) < _NOTABLE:
            self._unmoved_since = None
        elif self._unmoved_since is None:
            self._unmoved_since = now

    def _begin_stop(self, now: float) -> None:
        self._stopping_since = now
        self._stop_fault = None
        self._unmoved_since = None
        self._stop_ids.clear()
        self._moves.clear()
        self._send_stop(now)

    def _send_stop(self, now: float) -> None:
        self._stop_time = now
        if self.avoiding:
            self._calls.send(OBSTACLES_AVOID, AvoidApi.MOVE, avoid_move_parameter(0.0, 0.0, 0.0))
        identity = self._calls.new_identity()
        self._stop_ids.add(identity)  # before sending: the answer may come at once
        if not self._link.send(SPORT, ServiceRequest(identity, SportApi.STOP_MOVE)):
            self._stop_fault = Fault(FaultCause.STOP_UNCONFIRMED, "Its service is not there.", Code.SEND_FAILED, now)

    def close(self, timeout: float = 0.6) -> None:
        with self._changed:
            if self._closed:
                return
            in_touch = self._state is not None
        if in_touch:
            with suppress(DriverError):  # StopMove was sent all the same, and the firmware ends the last Move
                self.stop(timeout)
        with self._changed:
            self.hand_back()
            self._closed = True
            self._changed.notify_all()
        self._calls.close()
        self._thread.join(timeout=0.5)
