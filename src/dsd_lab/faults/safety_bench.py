# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench safety`: provokes every cause of a stop and times the supervisor until the last command is zero."""

from __future__ import annotations

import array
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from sensor_msgs.msg import BatteryState, CameraInfo, Image, Imu, Range
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_lab.report import BenchError, check_range, header, table
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
)


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
        self.stop_client = node.create_client(Trigger, "emergency_stop")
        self.reset_client = node.create_client(Trigger, "emergency_stop_reset")
        self._publishers = {name: node.create_publisher(*given) for name, given in _TOPICS.items()}
        node.create_subscription(Twist, "cmd_vel", self._on_command, qos.STATE)
        node.create_subscription(SafetyState, "dsd/safety_state", self._on_state, qos.LATCHED)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        for period, names in _PERIODS:
            node.create_timer(period, lambda names=names: self._publish(names), clock=steady)

    # -- what it publishes ---------------------------------------------------------------------

    def announce(self, age: float = 0.05, **changes: Any) -> None:
        """Announce an action about a picture ``age`` seconds old: 75 cm ahead, verified."""
        now = self._node.get_clock().now()
        message = NavAction(**{"kind": NavAction.FORWARD, "distance": 0.75, "verified": True} | changes)
        message.header.stamp = now.to_msg()
        message.observation_stamp = to_stamp(now.nanoseconds * 1e-9 - age)
        self._publishers["action"].publish(message)

    def report(self, node: str, level: bytes) -> None:
        """Report a node's health in /diagnostics."""
        status = DiagnosticStatus(name=node, level=level, message="not as it should be")
        self._publishers["diagnostics"].publish(DiagnosticArray(status=[status]))

    def intrude(self, present: bool) -> None:
        """Publish cmd_vel beside the supervisor, or end that."""
        if present:
            self._intruder = self._node.create_publisher(Twist, "cmd_vel", qos.COMMAND)
        else:
            self._node.destroy_publisher(self._intruder)

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
        provocation.undo(self)
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


def _mute(topic: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    return Provocation(name, cause, lambda s: s.muted.add(topic), lambda s: s.muted.clear(), setting)


def _freeze(topic: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    return Provocation(name, cause, lambda s: s.frozen.add(topic), lambda s: s.frozen.clear(), setting)


def _set(name: str, cause: Cause, setting: str = "", **values: Any) -> Provocation:
    """Set attributes of the stand-in, and restore them."""
    before: dict[str, Any] = {}

    def provoke(standin: StandIn) -> None:
        before.update({key: getattr(standin, key) for key in values})
        vars(standin).update(values)

    return Provocation(name, cause, provoke, lambda s: vars(s).update(before), setting)


def _announce(name: str, cause: Cause, setting: str = "", times: int = 1, **changes: Any) -> Provocation:
    def provoke(standin: StandIn) -> None:
        for _ in range(times):
            standin.announce(**changes)

    return Provocation(name, cause, provoke, lambda s: None, setting)


def _report(node: str, name: str, cause: Cause, setting: str = "") -> Provocation:
    warn, ok = DiagnosticStatus.WARN, DiagnosticStatus.OK
    return Provocation(name, cause, lambda s: s.report(node, warn), lambda s: s.report(node, ok), setting)


def _emergency(name: str, provoke: Callable[[StandIn], Any]) -> Provocation:
    return Provocation(name, Cause.EMERGENCY_STOP, provoke, lambda s: s.call(s.reset_client))


PROVOCATIONS = (
    _emergency("emergency stop, topic", StandIn.press_emergency_stop),
    _emergency("emergency stop, service", lambda s: s.call(s.stop_client)),
    _set("deadman released", Cause.DEADMAN, held=False),
    _mute("deadman", "deadman silent", Cause.DEADMAN),
    _set("tilt", Cause.TILT, lean=0.7),
    _set("operator takes over, at zero", Cause.OPERATOR, joystick=(0.0, 0.0)),
    _mute("odometry", "odometry silent", Cause.ODOMETRY_STALE),
    _freeze("odometry", "odometry frozen", Cause.ODOMETRY_STALE),
    _mute("imu", "imu silent", Cause.STATE_STALE),
    _mute("camera", "camera silent", Cause.CAMERA_STALE),
    _freeze("camera", "camera frozen", Cause.CAMERA_STALE),
    _set("obstacle ahead", Cause.OBSTACLE, distance=0.1),
    _mute("range", "range sensor silent", Cause.OBSTACLE_SENSOR_STALE),
    _set("battery low", Cause.LOW_BATTERY, charge=0.05),
    _mute("heartbeat", "heartbeat missed", Cause.NODE_SILENT),
    _report("draft_node", "link lost", Cause.LINK_LOST),
    _report("go2_node", "robot reports a fault", Cause.ROBOT_FAULT),
    _announce("action not verified", Cause.UNVERIFIED_ACTION, verified=False),
    _announce("action unknown", Cause.UNPARSABLE_ACTION, distance=0.33),
    _announce("reply too old", Cause.STALE_REPLY, age=7.0),
    _announce("motion after stop", Cause.MOTION_REFUSED, kind=NavAction.STOP, distance=0.0),
    _set("turning instead of driving", Cause.MOTION_REFUSED, speed=(0.0, 1.2)),
    _set("too fast", Cause.MOTION_REFUSED, speed=(0.8, 0.0)),
    _mute("command", "navigation silent", Cause.COMMAND_STALE),
    Provocation(
        "a second publisher of cmd_vel", Cause.FOREIGN_PUBLISHER, lambda s: s.intrude(True), lambda s: s.intrude(False)
    ),
    _set("obstacle in the depth image", Cause.OBSTACLE, "depth", distance=0.1),
    _set("depth camera covered", Cause.OBSTACLE_SENSOR_STALE, "depth", distance=None),
    _mute("depth", "depth camera silent", Cause.OBSTACLE_SENSOR_STALE, "depth"),
    _freeze("depth", "depth camera frozen", Cause.OBSTACLE_SENSOR_STALE, "depth"),
    _announce(
        "one unverified action too many", Cause.UNVERIFIED_ACTION, "draft_only",
        MOST_UNVERIFIED + 1, verified=False,
    ),
    _announce(
        "a way back that is not allowed", Cause.UNVERIFIED_ACTION, "draft_only", verified=False, retracing=True
    ),
    _report("draft_node", "link lost, fallback draft_only", Cause.LINK_LOST, "draft_only"),
)  # fmt: skip


def measure_safety(
    trials: int,
    causes: Sequence[str] | None = None,
    progress: Callable[[float, str], object] | None = None,
    load: int = 0,
    realtime: bool = True,
) -> dict[str, Any]:
    """Start a supervisor and provoke every cause ``trials`` times: seconds from cause to zero, for each provocation.

    ``causes``: names of those to provoke; None: all. ``load``: busy loops beside it. ``realtime``: whether it asks for
    real-time scheduling. Call it from the main thread. SafetyBenchError, ValueErrors.
    """
    check_range("trials", trials, 1, 10_000)
    check_range("load", load, 0, 64)
    known = {provocation.cause.name for provocation in PROVOCATIONS}
    for name in causes or ():
        if name not in known:
            raise BenchError(f"unknown cause {name!r}; choose from {', '.join(sorted(known))}")
    wanted = [p for p in PROVOCATIONS if causes is None or p.cause.name in causes]
    use_own_ros_domain()
    rows = []
    with _standin() as standin, _busy(load):
        for setting, differing in SETTINGS.items():
            group_of = [p for p in wanted if p.setting == setting]
            if not group_of:
                continue
            parameters = PARAMETERS | differing | {"realtime": str(realtime).lower()}
            with ProcessGroup(lambda name, line: None) as group:
                standin.state = None
                group.start_planned(Start("supervisor_node", parameters))
                for provocation in group_of:
                    times = [standin.trial(provocation) for _ in range(trials)]
                    if progress is not None:
                        progress((len(rows) + 1) / len(wanted), f"{provocation.name}: worst {max(times):.3f} s")
                    row = {"provocation": provocation.name, "cause": provocation.cause.name, "trials": len(times)}
                    figures = {"median_s": statistics.median(times), "worst_s": max(times)}
                    rows.append(row | {name: round(value, 4) for name, value in figures.items()})
    worst = max(row["worst_s"] for row in rows)
    code = ("dsd_ros/navigation", "dsd_ros/nodes/supervisor_node.py")
    return {**header("safety", code), "load": load, "realtime": realtime, "worst_s": worst, "rows": rows}


def render(report: dict[str, Any]) -> str:
    """The report as a table."""
    rows = [["provocation", "cause", "median s", "worst s"]]
    rows += [[r["provocation"], r["cause"], f"{r['median_s']:.3f}", f"{r['worst_s']:.3f}"] for r in report["rows"]]
    verdict = f"worst of all: {report['worst_s']:.3f} s; at most {LIMIT_S} s is wanted"
    return "\n".join([*table(rows, left=2), verdict, report["machine"]])


@contextmanager
def _standin() -> Iterator[StandIn]:
    """A stand-in on a node of its own, spinning in a thread."""
    ros = SpinningNode("safety_bench")
    standin = StandIn(ros.node)
    ros.start()
    # This is the clock: its delay would count as the supervisor's.
    ask_for_realtime(inherited=False)
    try:
        yield standin
    finally:
        end_realtime()
        ros.close()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Processes that do nothing but use a core each."""
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", _BUSY], start_new_session=True))  # noqa: PERF401  # all are killed
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


# It ends by itself when the bench is gone.
_BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""
