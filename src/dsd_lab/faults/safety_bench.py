# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench safety`: provokes every cause of a stop and times the supervisor until the last command is zero."""

from __future__ import annotations

import array
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from sensor_msgs.msg import BatteryState, CameraInfo, Image, Imu, Range
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_lab.parts import parts
from dsd_lab.report import check_range, header, table
from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.bringup.processes import ProcessGroup, use_own_ros_domain
from dsd_ros.bringup.systems import Start
from dsd_ros.navigation.safety.causes import MOST_UNVERIFIED, REFUSALS, Cause, DepthView
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import camera_info
from dsd_ros.ros.running import ask_for_realtime, end_realtime
from dsd_ros.ros.stamps import to_stamp
from dsd_ros.ros.standalone import SpinningNode

_PATIENCE_S = 60.0
_ASK_AGAIN_S = 5.0  # a service's answer takes milliseconds
_QUIET_S = 0.15  # no motion may follow the zero for so long
_DEPTH_WIDTH, _DEPTH_HEIGHT, _DEPTH_FOCAL = 168, 112, 97.0  # pixels
_TOPICS = {  # name -> type, topic, QoS; a supervisor that hears the last has found those before it
    "emergency stop": (Bool, "emergency_stop", qos.STATE),
    "odometry": (Odometry, "odom", qos.STATE),
    "imu": (Imu, "imu", qos.STATE),
    "camera": (Image, "camera/image_raw", qos.CAMERA),
    "range": (Range, "range", qos.STATE),
    "depth": (Image, "depth/image_raw", qos.CAMERA),
    "depth info": (CameraInfo, "depth/camera_info", qos.CAMERA),
    "battery": (BatteryState, "battery_state", qos.STATE),
    "heartbeat": (String, "dsd/heartbeat", qos.STATE),
    "diagnostics": (DiagnosticArray, "/diagnostics", qos.STATE),
    "deadman": (Bool, "operator/deadman", qos.STATE),
    "command": (Twist, "cmd_vel_dsd", qos.COMMAND),
    "joystick": (Twist, "cmd_vel_joy", qos.STATE),
    "action": (NavAction, "dsd/nav_action", qos.STATE),
}
_PERIODS = (
    (0.02, ("odometry", "imu")),
    (0.04, ("command", "joystick")),
    (0.066, ("camera", "depth")),
    (0.05, ("range", "deadman", "battery")),
    (0.1, ("heartbeat",)),
    (0.5, ("diagnostics",)),
)


class SafetyBenchError(RuntimeError):
    """The supervisor did not do what it must; one sentence."""


class Provocation(NamedTuple):
    """One way to stop the robot, and the cause that must be named."""

    name: str
    cause: Cause
    provoke: Callable[[StandIn], Any]
    setting: str = ""  # which of SETTINGS it needs


class StandIn:
    """Robot, navigation, draft node and operator on one ROS node, which the caller spins."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.state: SafetyState | None = None
        self.muted: set[str] = set()  # names of topics that fall silent
        self.frozen: set[str] = set()  # names of topics whose stamps stand still
        self._reported: set[str] = set()  # nodes whose health is not as it should be
        self._intruder: Any = None  # a publisher of cmd_vel beside the supervisor
        self.restore()
        self.commands: list[tuple[float, bool]] = []  # (steady time of arrival, whether it moves)
        self.newest = Twist()
        self._stamps: dict[str, Any] = {}
        self.stop_client = node.create_client(Trigger, "emergency_stop")
        self.reset_client = node.create_client(Trigger, "emergency_stop_reset")
        self._publishers = {name: node.create_publisher(*given) for name, given in _TOPICS.items()}
        node.create_subscription(Twist, "cmd_vel", self._on_command, qos.STATE)
        node.create_subscription(SafetyState, "dsd/safety_state", self._on_state, qos.LATCHED)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        for period, names in _PERIODS:
            node.create_timer(period, lambda names=names: self._publish(names), clock=steady)

    def change(self, **values: Any) -> None:
        """Change what the robot and its operator are like."""
        vars(self).update(values)

    def restore(self) -> None:
        """Undo whatever was provoked."""
        self.muted.clear()
        self.frozen.clear()
        self.speed = (0.4, 0.0)  # m/s ahead, rad/s
        self.joystick: tuple[float, float] | None = None
        self.lean, self.charge, self.held = 0.0, 0.9, True
        self.distance: float | None = 5.0  # of a wall ahead, m; None: the sensor is blind
        for node in self._reported.copy():
            self.report(node, DiagnosticStatus.OK)
        if self._intruder is not None:
            self._node.destroy_publisher(self._intruder)
            self._intruder = None
        if Cause.EMERGENCY_STOP in self.causes:
            self.call(self.reset_client)

    # -- what it publishes ---------------------------------------------------------------------

    def announce(self, age: float = 0.05, **changes: Any) -> None:
        """Announce an action about a picture ``age`` seconds old: 75 cm ahead, verified."""
        now = self._node.get_clock().now()
        message = NavAction(**{"kind": NavAction.FORWARD, "distance": 0.75, "verified": True} | changes)
        message.header.stamp = now.to_msg()
        message.observation_stamp = to_stamp(now.nanoseconds * 1e-9 - age)
        self._publishers["action"].publish(message)

    def report(self, node: str, level: bytes = DiagnosticStatus.WARN) -> None:
        """Report a node's health in /diagnostics."""
        (self._reported.discard if level == DiagnosticStatus.OK else self._reported.add)(node)
        self._publishers["diagnostics"].publish(self._health(node))

    def _health(self, node: str) -> DiagnosticArray:
        level = DiagnosticStatus.WARN if node in self._reported else DiagnosticStatus.OK
        return DiagnosticArray(status=[DiagnosticStatus(name=node, level=level, message="not as it should be")])

    def intrude(self) -> None:
        """Publish cmd_vel beside the supervisor."""
        self._intruder = self._node.create_publisher(Twist, "cmd_vel", qos.COMMAND)

    def press_emergency_stop(self, pressed: bool = True) -> None:
        self._publishers["emergency stop"].publish(Bool(data=pressed))

    def call(self, client: Any) -> Trigger.Response:
        """Call a service of the supervisor, again if need be, and wait for the answer.

        A service's node drops its answer while it has not discovered the client. Asking twice does no harm.
        """
        self.until(client.service_is_ready, f"service {client.srv_name}")
        asked = [(time.monotonic(), client.call_async(Trigger.Request()))]

        def answered() -> bool:
            if time.monotonic() - asked[-1][0] > _ASK_AGAIN_S:
                asked.append((time.monotonic(), client.call_async(Trigger.Request())))
            return any(future.done() for _, future in asked)

        self.until(answered, "answer of the supervisor")
        return next(future.result() for _, future in asked if future.done())

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
            case "diagnostics":
                return self._health("draft_node")
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
            pitch = DepthView().camera_pitch
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
        self.until(lambda: set(self.causes) <= REFUSALS, "healthy state")
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
        self.until(lambda: False, f"motion (action's readers: {self._publishers['action'].get_subscription_count()})")

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
        self.restore()
        return zero - began


def _twist(ahead: float, turn: float) -> Twist:
    message = Twist()
    message.linear.x, message.angular.z = float(ahead), float(turn)
    return message


# What a supervisor under test watches.
PARAMETERS = {
    "require.deadman": "true",
    "require.obstacle": "range",
    "require.heartbeats": "draft_node",
    "require.link": "draft_node",
    "require.commands": "",  # the stand-in plays several nodes
}
# What differs where a provocation needs it.
SETTINGS = {"": {}, "depth": {"require.obstacle": "depth"}, "draft_only": {"fallback": "draft_only"}}
LIMIT_S = 0.5  # from cause to zero


PROVOCATIONS = (
    Provocation("emergency stop, topic", Cause.EMERGENCY_STOP, StandIn.press_emergency_stop),
    Provocation("emergency stop, service", Cause.EMERGENCY_STOP, lambda s: s.call(s.stop_client)),
    Provocation("deadman released", Cause.DEADMAN, lambda s: s.change(held=False)),
    Provocation("deadman silent", Cause.DEADMAN, lambda s: s.muted.add("deadman")),
    Provocation("tilt", Cause.TILT, lambda s: s.change(lean=0.7)),
    Provocation("operator takes over, at zero", Cause.OPERATOR, lambda s: s.change(joystick=(0.0, 0.0))),
    Provocation("odometry silent", Cause.ODOMETRY_STALE, lambda s: s.muted.add("odometry")),
    Provocation("odometry frozen", Cause.ODOMETRY_STALE, lambda s: s.frozen.add("odometry")),
    Provocation("imu silent", Cause.STATE_STALE, lambda s: s.muted.add("imu")),
    Provocation("camera silent", Cause.CAMERA_STALE, lambda s: s.muted.add("camera")),
    Provocation("camera frozen", Cause.CAMERA_STALE, lambda s: s.frozen.add("camera")),
    Provocation("obstacle ahead", Cause.OBSTACLE, lambda s: s.change(distance=0.1)),
    Provocation("range sensor silent", Cause.OBSTACLE_SENSOR_STALE, lambda s: s.muted.add("range")),
    Provocation("battery low", Cause.LOW_BATTERY, lambda s: s.change(charge=0.05)),
    Provocation("heartbeat missed", Cause.NODE_SILENT, lambda s: s.muted.add("heartbeat")),
    Provocation("link lost", Cause.LINK_LOST, lambda s: s.report("draft_node")),
    Provocation("robot reports a fault", Cause.ROBOT_FAULT, lambda s: s.report("go2_node")),
    Provocation("action not verified", Cause.UNVERIFIED_ACTION, lambda s: s.announce(verified=False)),
    Provocation("action unknown", Cause.UNPARSABLE_ACTION, lambda s: s.announce(distance=0.33)),
    Provocation("reply too old", Cause.STALE_REPLY, lambda s: s.announce(age=7.0)),
    Provocation("motion after stop", Cause.MOTION_REFUSED, lambda s: s.announce(kind=NavAction.STOP, distance=0.0)),
    Provocation("turning instead of driving", Cause.MOTION_REFUSED, lambda s: s.change(speed=(0.0, 1.2))),
    Provocation("too fast", Cause.MOTION_REFUSED, lambda s: s.change(speed=(0.8, 0.0))),
    Provocation("navigation silent", Cause.COMMAND_STALE, lambda s: s.muted.add("command")),
    Provocation("a second publisher of cmd_vel", Cause.FOREIGN_PUBLISHER, StandIn.intrude),
    Provocation("obstacle in the depth image", Cause.OBSTACLE, lambda s: s.change(distance=0.1), "depth"),
    Provocation("depth camera covered", Cause.OBSTACLE_SENSOR_STALE, lambda s: s.change(distance=None), "depth"),
    Provocation("depth camera silent", Cause.OBSTACLE_SENSOR_STALE, lambda s: s.muted.add("depth"), "depth"),
    Provocation("depth camera frozen", Cause.OBSTACLE_SENSOR_STALE, lambda s: s.frozen.add("depth"), "depth"),
    Provocation(
        "one unverified action too many",
        Cause.UNVERIFIED_ACTION,
        lambda s: [s.announce(verified=False) for _ in range(MOST_UNVERIFIED + 1)],
        "draft_only",
    ),
    Provocation(
        "a way back that is not allowed",
        Cause.UNVERIFIED_ACTION,
        lambda s: s.announce(verified=False, retracing=True),
        "draft_only",
    ),
    Provocation("link lost, fallback draft_only", Cause.LINK_LOST, lambda s: s.report("draft_node"), "draft_only"),
)


def measure_safety(trials: int, progress: Callable[[float, str], object]) -> dict[str, Any]:
    """Start a supervisor and provoke every cause ``trials`` times: seconds from cause to zero, for each provocation.

    Call it from the main thread. SafetyBenchError, BenchError.
    """
    check_range("trials", trials, 1, 10_000)
    use_own_ros_domain()
    rows: list[dict[str, Any]] = []
    with closing(SpinningNode("safety_bench")) as ros:
        standin = StandIn(ros.node)
        ros.start()
        ask_for_realtime(inherited=False)  # this is the clock: its delay would count as the supervisor's
        try:
            for setting, differing in parts(SETTINGS.items()):
                with ProcessGroup(lambda name, line: None) as group:
                    standin.state = None
                    group.start_planned(Start("supervisor_node", PARAMETERS | differing))
                    for provocation in parts((p for p in PROVOCATIONS if p.setting == setting), begun=bool(rows)):
                        times = [standin.trial(provocation) for _ in range(trials)]
                        progress((len(rows) + 1) / len(PROVOCATIONS), f"{provocation.name}: worst {max(times):.3f} s")
                        row = {"provocation": provocation.name, "cause": provocation.cause.name, "trials": len(times)}
                        figures = {"median_s": statistics.median(times), "worst_s": max(times)}
                        rows.append(row | {name: round(value, 4) for name, value in figures.items()})
        finally:
            end_realtime()
    worst = max(row["worst_s"] for row in rows)
    code = ("dsd_ros/navigation", "dsd_ros/nodes/supervisor_node.py")
    return {**header("safety", code), "worst_s": worst, "rows": rows}


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    rows = [["provocation", "cause", "median s", "worst s"]]
    rows += [[r["provocation"], r["cause"], f"{r['median_s']:.3f}", f"{r['worst_s']:.3f}"] for r in report["rows"]]
    verdict = f"worst of all: {report['worst_s']:.3f} s; at most {LIMIT_S} s is wanted"
    return "\n".join([*table(rows, left=2), verdict, report["machine"]])
