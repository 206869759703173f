"""A stand-in that publishes what a healthy robot, its nodes and its operator publish, and listens to ``cmd_vel``."""

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
_TOPICS = {  # name -> type, topic, QoS
    "odometry": (Odometry, "odom", qos.STATE),
    "imu": (Imu, "imu", qos.STATE),
    "camera": (Image, "camera/image_raw", qos.CAMERA),
    "range": (Range, "range", qos.STATE),
    "depth": (Image, "depth/image_raw", qos.CAMERA),
    "depth info": (CameraInfo, "depth/camera_info", qos.CAMERA),
    "battery": (BatteryState, "battery_state", qos.STATE),
    "heartbeat": (String, "heartbeat", qos.STATE),
    "diagnostics": (DiagnosticArray, "/diagnostics", qos.STATE),
    "deadman": (Bool, "operator/deadman", qos.STATE),
    "command": (Twist, "cmd_vel_nav", qos.COMMAND),
    "joystick": (Twist, "cmd_vel_joy", qos.STATE),
    "action": (NavAction, "nav_action", qos.STATE),
    "emergency stop": (Bool, "emergency_stop", qos.STATE),
}
_PERIODS = (
    (0.02, ("odometry", "imu")),
    (0.04, ("command", "joystick")),
    (0.066, ("camera", "depth")),
    (0.05, ("range", "deadman", "battery")),
    (0.1, ("heartbeat",)),
)
# A good action ends these.
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
    undo: Callable[[StandIn], Any]
    setting: str = ""  # which of the bench's settings of the supervisor it needs


class StandIn:
    """Robot, navigation, draft node and operator on one ROS node, which the caller spins."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.muted: set[str] = set()  # names of topics that fall silent
        self.frozen: set[str] = set()  # names of topics whose stamps stand still
        self.speed = (0.4, 0.0)  # m/s ahead, rad/s
        self.joystick: tuple[float, float] | None = None
        self.lean, self.charge, self.held = 0.0, 0.9, True
        self.distance: float | None = 5.0  # of a wall ahead, m; None: the sensor is blind
        self.commands: list[tuple[float, bool]] = []  # (steady time of arrival, whether it moves)
        self.newest = Twist()
        self.state: SafetyState | None = None
        self._stamps: dict[str, Any] = {}
        self._publishers = {name: node.create_publisher(*given) for name, given in _TOPICS.items()}
        self.stop_client = node.create_client(Trigger, "emergency_stop")
        self.reset_client = node.create_client(Trigger, "emergency_stop_reset")
        node.create_subscription(Twist, "cmd_vel", self._on_command, qos.STATE)
        node.create_subscription(SafetyState, "safety_state", self._on_state, qos.LATCHED)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        for period, names in _PERIODS:
            node.create_timer(period, lambda names=names: self._publish(names), clock=steady)

    # -- what it publishes ---------------------------------------------------------------------

    def announce(self, age: float = 0.05, **changes: Any) -> None:
        """Announce an action about a picture ``age`` seconds old: 75 cm ahead, verified."""
        now = self._node.get_clock().now()
        message = NavAction(**{"kind": NavAction.FORWARD, "amount": 75, "verified": True} | changes)
        message.header.stamp = now.to_msg()
        message.observation_stamp = to_stamp(now.nanoseconds * 1e-9 - age)
        self._publishers["action"].publish(message)

    def report(self, node: str, level: bytes) -> None:
        """Report a node's health in /diagnostics."""
        status = DiagnosticStatus(name=node, level=level, message="not as it should be")
        self._publishers["diagnostics"].publish(DiagnosticArray(status=[status]))

    def press_emergency_stop(self, pressed: bool = True) -> None:
        self._publishers["emergency stop"].publish(Bool(data=pressed))

    def call(self, client: Any) -> Trigger.Response:
        """Call a service of the supervisor and wait for the answer."""
        future = client.call_async(Trigger.Request())
        self.until(future.done, "an answer of the supervisor")
        return future.result()

    def _publish(self, names: tuple[str, ...]) -> None:
        for name in names:
            message = None if name in self.muted else self._message(name)
            if message is not None:
                self._publishers[name].publish(message)

    def _message(self, name: str) -> Any:
        """What stands on a topic now; None: nothing."""
        match name:
            case "odometry":
                return self._stamped(name, Odometry())
            case "imu":
                imu = Imu()
                imu.orientation.x, imu.orientation.w = math.sin(self.lean / 2), math.cos(self.lean / 2)
                return self._stamped(name, imu)
            case "camera":
                return self._stamped(name, Image(height=2, width=2, encoding="bgr8", step=6, data=bytes(12)))
            case "depth":
                return self._depth_image() if self._publishers["depth"].get_subscription_count() else None
            case "command":
                return _twist(*self.speed)
            case "joystick":
                return None if self.joystick is None else _twist(*self.joystick)
            case "range":
                distance = math.nan if self.distance is None else self.distance
                return Range(min_range=0.05, max_range=10.0, range=distance)
            case "deadman":
                return Bool(data=self.held)
            case "battery":
                return BatteryState(percentage=self.charge)
        return String(data="draft_node")  # the heartbeat

    def _stamped(self, name: str, message: Any) -> Any:
        if name not in self.frozen or name not in self._stamps:
            self._stamps[name] = self._node.get_clock().now().to_msg()
        message.header.stamp = self._stamps[name]
        return message

    def _depth_image(self) -> Image:
        """A wall ahead, with its camera's figures published beside it."""
        depths = np.full((_DEPTH_HEIGHT, _DEPTH_WIDTH), np.nan, np.float32)
        if self.distance is not None:
            pitch = math.radians(DepthView().camera_pitch_deg)
            down = (np.arange(_DEPTH_HEIGHT) - _DEPTH_HEIGHT / 2) / _DEPTH_FOCAL
            depths[:] = (self.distance / (math.cos(pitch) - math.sin(pitch) * down))[:, None]
        image = Image(height=_DEPTH_HEIGHT, width=_DEPTH_WIDTH, encoding="32FC1")
        image.step, image.data = 4 * _DEPTH_WIDTH, array.array("B", depths.tobytes())
        self._stamped("depth", image)
        info = camera_info(image.header, _DEPTH_WIDTH, _DEPTH_HEIGHT, _DEPTH_FOCAL)
        self._publishers["depth info"].publish(info)
        return image

    # -- what it hears -------------------------------------------------------------------------

    def _on_command(self, message: Twist) -> None:
        self.newest = message
        self.commands.append((time.monotonic(), any((message.linear.x, message.linear.y, message.angular.z))))

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
        """Have navigation drive the robot, with nothing in the way."""
        self.until(lambda: set(self.causes) <= _ENDED_BY_AN_ACTION, "healthy state")
        patience = time.monotonic() + _PATIENCE_S
        while time.monotonic() < patience:  # an action that overtakes the healthy state is refused
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
        time.sleep(random.uniform(0.0, 0.05))  # no cause waits for a tick of this process
        began = time.monotonic()
        provocation.provoke(self)
        self.until(
            lambda: provocation.cause in self.causes and not self.commands[-1][1], f"stop for '{provocation.name}'"
        )
        time.sleep(_QUIET_S)
        heard = [command for command in self.commands if command[0] >= began]
        last_motion = max((at for at, moves in heard if moves), default=began)
        zero = min(at for at, moves in heard if not moves and at >= last_motion)
        provocation.undo(self)
        return zero - began


def _twist(ahead: float, turn: float) -> Twist:
    message = Twist()
    message.linear.x, message.angular.z = float(ahead), float(turn)
    return message
