"""A stand-in that says over DDS what a healthy robot, its nodes and its operator say, and listens to ``cmd_vel``."""

from __future__ import annotations

import array
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from sensor_msgs.msg import BatteryState, CameraInfo, Image, Imu, Range
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.navigation.depth import DepthView
from dsd_ros.navigation.safety import Cause
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import camera_info
from dsd_ros.ros.stamps import to_stamp

_PATIENCE_S = 60.0
_QUIET_S = 0.15  # no motion may follow the zero for so long
_DEPTH_WIDTH, _DEPTH_HEIGHT, _DEPTH_FOCAL = 168, 112, 97.0  # pixels
# A good action lifts these.
_ENDED_BY_AN_ACTION = {
    Cause.UNVERIFIED_ACTION,
    Cause.UNPARSABLE_ACTION,
    Cause.STALE_REPLY,
    Cause.NO_ACTION,
    Cause.MOTION_REFUSED,
}


class SafetyBenchError(RuntimeError):
    """The supervisor did not do what it must; one sentence."""


@dataclass(frozen=True)
class Provocation:
    """One way to stop the robot: how it is done and undone, and the cause that must be named."""

    name: str
    cause: Cause
    provoke: Callable[[StandIn], Any]
    mend: Callable[[StandIn], Any]
    setting: str = ""  # which of the bench's settings of the supervisor it needs


class StandIn:
    """Robot, navigation, draft node and operator on one ROS node, which somebody else spins."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.muted: set[str] = set()
        self.frozen: set[str] = set()  # those whose stamps stand still
        self.speed = (0.4, 0.0)  # m/s ahead, rad/s
        self.joystick: tuple[float, float] | None = None
        self.lean, self.charge, self.held = 0.0, 0.9, True
        self.distance: float | None = 5.0  # of a wall ahead, m; None: the sensor is blind
        self.commands: list[tuple[float, bool]] = []  # (steady time of arrival, whether it moves)
        self.newest = Twist()
        self.state: SafetyState | None = None
        self._stamps: dict[str, Any] = {}

        def publisher(kind: type, topic: str, profile: Any = qos.STATE) -> Any:
            return node.create_publisher(kind, topic, profile)

        self._odometry = publisher(Odometry, "odom")
        self._imu = publisher(Imu, "imu")
        self._image = publisher(Image, "camera/image_raw", qos.CAMERA)
        self._range = publisher(Range, "range")
        self._depth = publisher(Image, "depth/image_raw", qos.CAMERA)
        self._depth_info = publisher(CameraInfo, "depth/camera_info", qos.CAMERA)
        self._battery = publisher(BatteryState, "battery_state")
        self._heart = publisher(String, "heartbeat")
        self._diagnostics = publisher(DiagnosticArray, "/diagnostics")
        self._deadman = publisher(Bool, "operator/deadman")
        self._navigation = publisher(Twist, "cmd_vel_nav", qos.COMMAND)
        self._joystick = publisher(Twist, "cmd_vel_joy")
        self._action = publisher(NavAction, "nav_action")
        self._emergency = publisher(Bool, "emergency_stop")
        self.stop_client = node.create_client(Trigger, "emergency_stop")
        self.reset_client = node.create_client(Trigger, "emergency_stop_reset")
        node.create_subscription(Twist, "cmd_vel", self._on_command, qos.STATE)
        node.create_subscription(SafetyState, "safety_state", self._on_state, qos.LATCHED)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        for period, say in (
            (0.02, self._say_pose),
            (0.04, self._say_command),
            (0.066, self._say_picture),
            (0.05, self._say_operator),
            (0.1, self._say_health),
        ):
            node.create_timer(period, say, clock=steady)

    # -- what it says --------------------------------------------------------------------------

    def announce(self, age: float = 0.05, **changes: Any) -> None:
        """Announce an action about a picture ``age`` seconds old: 75 cm ahead, verified."""
        now = self._node.get_clock().now()
        message = NavAction(**{"kind": NavAction.FORWARD, "amount": 75, "verified": True} | changes)
        message.header.stamp = now.to_msg()
        message.observation_stamp = to_stamp(now.nanoseconds * 1e-9 - age)
        self._action.publish(message)

    def report(self, node: str, level: bytes) -> None:
        """Say in /diagnostics how a node is."""
        status = DiagnosticStatus(name=node, level=level, message="not as it should be")
        self._diagnostics.publish(DiagnosticArray(status=[status]))

    def press_emergency_stop(self, pressed: bool = True) -> None:
        self._emergency.publish(Bool(data=pressed))

    def call(self, client: Any) -> Trigger.Response:
        """Call a service of the supervisor and wait for the answer."""
        future = client.call_async(Trigger.Request())
        self.until(future.done, "an answer of the supervisor")
        return future.result()

    def _stamp(self, what: str) -> Any:
        if what not in self.frozen or what not in self._stamps:
            self._stamps[what] = self._node.get_clock().now().to_msg()
        return self._stamps[what]

    def _say_pose(self) -> None:
        if "odometry" not in self.muted:
            odometry = Odometry()
            odometry.header.stamp = self._stamp("odometry")
            self._odometry.publish(odometry)
        if "imu" not in self.muted:
            self.say_imu()

    def say_imu(self) -> None:
        imu = Imu()
        imu.header.stamp = self._stamp("imu")
        imu.orientation.x, imu.orientation.w = math.sin(self.lean / 2), math.cos(self.lean / 2)
        self._imu.publish(imu)

    def _say_command(self) -> None:
        if "command" not in self.muted:
            self._navigation.publish(_twist(*self.speed))
        if self.joystick is not None:
            self._joystick.publish(_twist(*self.joystick))

    def _say_picture(self) -> None:
        if "camera" not in self.muted:
            image = Image(height=2, width=2, encoding="bgr8", step=6, data=bytes(12))
            image.header.stamp = self._stamp("camera")
            self._image.publish(image)
        if "depth" not in self.muted and self._depth.get_subscription_count():
            self._say_depth()

    def _say_depth(self) -> None:
        depths = np.full((_DEPTH_HEIGHT, _DEPTH_WIDTH), np.nan, np.float32)
        if self.distance is not None:  # a wall
            pitch = math.radians(DepthView().camera_pitch_deg)
            down = (np.arange(_DEPTH_HEIGHT) - _DEPTH_HEIGHT / 2) / _DEPTH_FOCAL
            depths[:] = (self.distance / (math.cos(pitch) - math.sin(pitch) * down))[:, None]
        image = Image(height=_DEPTH_HEIGHT, width=_DEPTH_WIDTH, encoding="32FC1")
        image.step, image.data = 4 * _DEPTH_WIDTH, array.array("B", depths.tobytes())
        image.header.stamp = self._stamp("depth")
        self._depth.publish(image)
        self._depth_info.publish(camera_info(image.header, _DEPTH_WIDTH, _DEPTH_HEIGHT, _DEPTH_FOCAL))

    def _say_operator(self) -> None:
        if "range" not in self.muted:
            distance = math.nan if self.distance is None else self.distance
            self._range.publish(Range(min_range=0.05, max_range=10.0, range=distance))
        if "deadman" not in self.muted:
            self._deadman.publish(Bool(data=self.held))
        self._battery.publish(BatteryState(percentage=self.charge))

    def _say_health(self) -> None:
        if "heartbeat" not in self.muted:
            self._heart.publish(String(data="draft_node"))

    # -- what it hears -------------------------------------------------------------------------

    def _on_command(self, message: Twist) -> None:
        values = (message.linear.x, message.linear.y, message.angular.z)
        self.newest = message
        self.commands.append((time.monotonic(), any(values)))

    def _on_state(self, message: SafetyState) -> None:
        self.state = message

    @property
    def causes(self) -> list[Cause]:
        return [] if self.state is None else [Cause(cause) for cause in self.state.causes]

    def until(self, done: Callable[[], Any], what: str) -> None:
        """Poll; SafetyBenchError when it takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                names = ", ".join(cause.name for cause in self.causes) or "none"
                raise SafetyBenchError(f"There was no {what} within {_PATIENCE_S:.0f} s; causes then: {names}.")
            time.sleep(0.002)

    # -- trials --------------------------------------------------------------------------------

    def drive(self) -> None:
        """Have the robot driven by navigation, with nothing in the way."""
        self.until(lambda: set(self.causes) <= _ENDED_BY_AN_ACTION, "healthy state")
        patience = time.monotonic() + _PATIENCE_S
        while time.monotonic() < patience:  # an action that overtakes the mended state is refused
            self.announce()
            begun = len(self.commands)
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                latest = self.commands[begun:]
                if len(latest) >= 4 and all(moves for _, moves in latest[-4:]) and not self.causes:
                    return
                time.sleep(0.002)
        self.until(lambda: False, "motion")

    def trial(self, provocation: Provocation) -> float:
        """Seconds from a provocation to the first zero command that no motion follows."""
        self.drive()
        time.sleep(random.uniform(0.0, 0.05))  # no cause waits for a tick of ours
        began = time.monotonic()
        provocation.provoke(self)
        self.until(
            lambda: provocation.cause in self.causes and not self.commands[-1][1], f"stop for '{provocation.name}'"
        )
        time.sleep(_QUIET_S)
        heard = [command for command in self.commands if command[0] >= began]
        last_motion = max((at for at, moves in heard if moves), default=began)
        zero = min(at for at, moves in heard if not moves and at >= last_motion)
        provocation.mend(self)
        return zero - began


def _twist(ahead: float, turn: float) -> Twist:
    message = Twist()
    message.linear.x, message.angular.z = float(ahead), float(turn)
    return message
