# SPDX-License-Identifier: Apache-2.0
"""The protocol of a Unitree Go2: its services' functions, their parameters and answers, its state, and service calls.

The driver and the stand-in are the two sides of it. The numbers are those of the vendor's public SDK (unitree_sdk2,
unitree_sdk2_python) and of unitree_ros2.

Two layouts of SportModeState share one type name: unitree_ros2's ends with ``foot_speed_body``, and the SDK's has ten
path points after that. A reader of one layout drops messages of the other, so the state is received as raw CDR and
parsed here: :func:`decode_state` tells the layouts apart by their length.
"""

from __future__ import annotations

import json
import math
import random
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from dsd_ros.robot.driver import DriverError, Fault, FaultCause, Posture, RobotState

SPORT, OBSTACLES_AVOID, VIDEO = "sport", "obstacles_avoid", "videohub"
API_VERSION = 1  # a function of every service: its interface's version, as text
HOLD_S = 1.0  # how long the firmware holds the last Move
JPEG_LIMIT_BYTES = 8 << 20


class SportApi(IntEnum):
    """Functions of the service ``sport``."""

    DAMP = 1001
    BALANCE_STAND = 1002
    STOP_MOVE = 1003
    STAND_UP = 1004
    STAND_DOWN = 1005
    RECOVERY_STAND = 1006
    MOVE = 1008


class AvoidApi(IntEnum):
    """Functions of the service ``obstacles_avoid``."""

    SWITCH_SET = 1001
    SWITCH_GET = 1002
    MOVE = 1003
    USE_REMOTE_COMMAND = 1004  # take over: its Move is obeyed instead of the remote control


class VideoApi(IntEnum):
    """Functions of the service ``videohub``."""

    GET_IMAGE_SAMPLE = 1001


class Code(IntEnum):
    """Known status codes of answers."""

    OK = 0
    SEND_FAILED = 3102
    NO_ANSWER = 3104
    INTERNAL = 3202
    NOT_IMPLEMENTED = 3203
    BAD_PARAMETER = 3204
    OVERTIME = 4201
    NOT_READY = 4202


_CODE_TEXTS = {
    Code.OK: "done",
    Code.SEND_FAILED: "the request could not be sent",
    Code.NO_ANSWER: "no answer came in time",
    Code.INTERNAL: "the robot's service failed",
    Code.NOT_IMPLEMENTED: "the robot's service has no such function",
    Code.BAD_PARAMETER: "the robot does not accept the parameter",
    Code.OVERTIME: "the robot took too long",
    Code.NOT_READY: "the robot is not ready for it in its present posture",
}


def code_text(code: int) -> str:
    """A status code in words, with its number."""
    try:
        return f"{_CODE_TEXTS[Code(code)]} (code {code})"
    except ValueError:
        return f"code {code}, which is not known here"


@dataclass(frozen=True)
class ServiceRequest:
    """A call of a service's function, with a JSON parameter."""

    identity: int
    api_id: int
    parameter: str = "{}"
    noreply: bool = False


@dataclass(frozen=True)
class ServiceResponse:
    """The answer to a call, with the call's identity and function."""

    identity: int
    api_id: int
    code: int = 0
    data: str = ""
    binary: bytes = b""


def move_parameter(vx: float, vy: float, wz: float) -> str:
    """The parameter of the sport service's Move: m/s, m/s, rad/s."""
    return json.dumps({"x": vx, "y": vy, "z": wz})


def avoid_move_parameter(vx: float, vy: float, wz: float) -> str:
    """The parameter of the obstacle avoidance's Move: m/s, m/s, rad/s; mode 0 means velocities."""
    return json.dumps({"x": vx, "y": vy, "yaw": wz, "mode": 0})


def read_parameter(text: str) -> dict[str, Any]:
    """Parse a request's parameter; ValueError unless it is a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The parameter {text[:60]!r} is no JSON.") from error
    if not isinstance(value, dict):
        raise ValueError(f"The parameter {text[:60]!r} is no JSON object.")
    return value


def finite(values: dict[str, Any], *names: str) -> tuple[float, ...]:
    """The named numbers of a parameter; ValueError when one is missing or not finite."""
    found = []
    for name in names:
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"The parameter '{name}' must be a number, not {value!r}.")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ValueError(f"The parameter '{name}' must be finite.")
        found.append(number)
    return tuple(found)


class StateError(ValueError):
    """Bytes that are not a state of the robot; one sentence."""


# stamp, error, imu (quaternion, gyroscope, accelerometer, rpy, temperature), mode, progress, gait, foot height,
# position, body height, velocity, yaw speed, ranges; then foot force, foot positions and speeds.
_HEAD = "iII4f3f3f3fbB2xfB3xf3ff3ff4f"
_FEET = "4h12f12f"
_PATH = "70f"
_LITTLE, _BIG = struct.Struct("<" + _HEAD), struct.Struct(">" + _HEAD)
STATE_BYTES = struct.calcsize("<" + _HEAD + _FEET)
STATE_WITH_PATH_BYTES = STATE_BYTES + struct.calcsize("<" + _PATH)
_HEADER_BYTES = 4
_PADDING = 3  # some writers pad to a multiple of 4
_LYING_HEIGHT = 0.15  # m; the body of a standing Go2 is at about 0.3
_POSTURES = dict.fromkeys((0, 1, 2), Posture.STANDING) | {
    3: Posture.MOVING, 5: Posture.LYING, 6: Posture.LOCKED, 7: Posture.DAMPED
}  # fmt: skip


def decode_state(data: bytes, now: float = 0.0, frame: str = "body") -> RobotState:
    """Parse a serialized SportModeState (CDR, including its 4 header bytes) of either layout.

    :param now: when it arrived (monotonic, s).
    :param frame: "body" or "odom", the frame of the velocity that the robot sends.
    :raises StateError: for another length or encoding, or numbers that are not finite.
    """
    size = len(data) - _HEADER_BYTES
    if not any(0 <= size - known <= _PADDING for known in (STATE_BYTES, STATE_WITH_PATH_BYTES)):
        raise StateError(
            f"The robot's state has {len(data)} bytes; known are layouts of {_HEADER_BYTES + STATE_BYTES} and "
            f"{_HEADER_BYTES + STATE_WITH_PATH_BYTES}: is this a Go2, and its message of a known version?"
        )
    encoding = int.from_bytes(data[:2], "big")
    if encoding not in (0, 1, 6, 7):  # plain CDR, big and little endian, of both versions
        raise StateError(f"The robot's state has the unknown encoding {encoding:#06x}.")
    layout = _LITTLE if encoding & 1 else _BIG
    v = layout.unpack_from(data, _HEADER_BYTES)
    if not all(map(math.isfinite, (*v[3:16], v[18], *v[20:29]))):  # without the ranges, which may be infinite
        raise StateError("The robot's state holds numbers that are not finite.")
    mode, rpy, height, (vx, vy, vz) = v[17], v[13:16], v[24], v[25:28]
    posture = _POSTURES.get(mode, Posture.BUSY)
    if mode == 0 and 0.0 < height < _LYING_HEIGHT:
        posture = Posture.LYING
    if frame == "odom":
        c, s = math.cos(rpy[2]), math.sin(rpy[2])
        vx, vy = c * vx + s * vy, c * vy - s * vx
    return RobotState(
        received=now, stamp=v[0] + v[1] * 1e-9, position=v[21:24], orientation=v[3:7], rpy=rpy, velocity=(vx, vy, vz),
        yaw_rate=v[28], gyroscope=v[7:10], accelerometer=v[10:13], posture=posture, mode=mode, error_code=v[2],
        body_height=height,
    )  # fmt: skip


def encode_state(state: RobotState, with_path: bool = False) -> bytes:
    """The state as the robot serializes it, little endian; ``with_path``: in the layout with path points.

    ``state.stamp`` is by the robot's own clock; the posture is in ``mode``.
    """
    whole = math.floor(state.stamp)
    head = _LITTLE.pack(
        whole, round((state.stamp - whole) * 1e9) % 1_000_000_000, state.error_code, *state.orientation,
        *state.gyroscope, *state.accelerometer, *state.rpy, 0, state.mode, 0.0, 0, 0.0,
        *state.position, state.body_height, *state.velocity, state.yaw_rate, 0.0, 0.0, 0.0, 0.0,
    )  # fmt: skip
    size = STATE_WITH_PATH_BYTES if with_path else STATE_BYTES
    return b"\x00\x01\x00\x00" + head + bytes(size - len(head))


class ServiceLink(Protocol):
    """Carries requests to the robot's services, and calls the driver's ``on_`` methods with answers and state."""

    def send(self, service: str, request: ServiceRequest) -> bool:
        """Send without waiting. False when the service is not there."""


class ServiceCalls:
    """Sends requests over a link and waits for the answers, which another thread passes in. Thread-safe."""

    def __init__(self, link: ServiceLink) -> None:
        self._link = link
        self._changed = threading.Condition()
        # Answers reach every client of a service, so identities must differ from those of other clients.
        self._identity = random.SystemRandom().getrandbits(60)
        self._waiting: dict[tuple[str, int], list[ServiceResponse]] = {}
        self._closed = False

    def new_identity(self) -> int:
        with self._changed:
            self._identity += 1
            return self._identity

    def send(self, service: str, api: int, parameter: str) -> None:
        """Send a request without waiting for its answer."""
        self._link.send(service, ServiceRequest(self.new_identity(), int(api), parameter))

    def call(self, service: str, api: int, parameter: str, timeout: float, attempts: int) -> ServiceResponse:
        """Send a request up to ``attempts`` times, waiting ``timeout`` seconds each; the first answer counts.

        :raises DriverError: NO_SERVICE, NO_ANSWER or CLOSED.
        """
        answers: list[ServiceResponse] = []
        mine: list[tuple[str, int]] = []
        heard = False
        try:
            for _ in range(attempts):
                identity = self.new_identity()
                with self._changed:
                    mine.append((service, identity))
                    self._waiting[mine[-1]] = answers
                heard |= self._link.send(service, ServiceRequest(identity, int(api), parameter))
                with self._changed:
                    self._changed.wait_for(lambda: answers or self._closed, timeout)
                    matching = [answer for answer in answers if answer.api_id == api]
                    if matching:
                        return matching[0]
                    if self._closed:
                        raise DriverError(Fault(FaultCause.CLOSED))
            cause = FaultCause.NO_ANSWER if heard else FaultCause.NO_SERVICE
            detail = f"It was asked {attempts} times: {service}, function {int(api)}."
            raise DriverError(Fault(cause, detail, Code.NO_ANSWER if heard else Code.SEND_FAILED))
        finally:
            with self._changed:
                for key in mine:
                    self._waiting.pop(key, None)

    def on_response(self, service: str, response: ServiceResponse) -> None:
        with self._changed:
            answers = self._waiting.get((service, response.identity))
            if answers is not None:
                answers.append(response)
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
