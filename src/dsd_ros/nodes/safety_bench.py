"""Provokes every cause of a stop on a running supervisor and times it until the last command is zero.

A :class:`StandIn` says over DDS all that a healthy robot, its nodes and its operator say, and listens to
``cmd_vel``. Used by `dsd bench safety` and by the tests.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import BatteryState, Image, Imu, Range
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.navigation.safety import Cause
from dsd_ros.nodes import qos
from dsd_ros.nodes.bringup import SUPERVISOR, NodeStart
from dsd_ros.nodes.processes import ProcessGroup
from dsd_ros.nodes.realtime import ask_for_realtime, end_realtime
from dsd_ros.nodes.stamps import to_stamp

# What a supervisor under test is to watch.
PARAMETERS = {
    "require.deadman": "true",
    "require.obstacle": "range",
    "require.heartbeats": "draft_node",
    "require.link": "draft_node",
}
LIMIT_S = 0.5  # from cause to zero
_PATIENCE_S = 20.0
_QUIET_S = 0.15  # no motion may follow the zero for so long
_OK, _WARN = DiagnosticStatus.OK, DiagnosticStatus.WARN


class SafetyBenchError(RuntimeError):
    """The supervisor did not do what it must; one sentence."""


@dataclass(frozen=True)
class Provocation:
    """One way to stop the robot: how it is done and undone, and the cause that must be named."""

    name: str
    cause: Cause
    provoke: Callable[[StandIn], Any]
    mend: Callable[[StandIn], Any]


class StandIn:
    """Robot, navigation, draft node and operator on one ROS node, which somebody else spins."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.muted: set[str] = set()
        self.frozen: set[str] = set()  # those whose stamps stand still
        self.speed = (0.4, 0.0)  # m/s ahead, rad/s
        self.joystick: tuple[float, float] | None = None
        self.lean, self.distance, self.charge, self.held = 0.0, 5.0, 0.9, True
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

    def _say_operator(self) -> None:
        if "range" not in self.muted:
            self._range.publish(Range(min_range=0.05, max_range=10.0, range=self.distance))
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
                raise SafetyBenchError(
                    f"There was no {what} within {_PATIENCE_S:.0f} s; causes then: {names}."
                )
            time.sleep(0.002)

    # -- trials --------------------------------------------------------------------------------

    def drive(self) -> None:
        """Have the robot driven by navigation, with nothing in the way."""
        self.until(lambda: set(self.causes) <= _ENDED_BY_AN_ACTION, "healthy state")
        for _ in range(3):  # an action that overtakes the mended state is refused
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
            lambda: provocation.cause in self.causes and not self.commands[-1][1],
            f"stop for '{provocation.name}'",
        )
        time.sleep(_QUIET_S)
        heard = [command for command in self.commands if command[0] >= began]
        last_motion = max((at for at, moves in heard if moves), default=began)
        zero = min(at for at, moves in heard if not moves and at >= last_motion)
        provocation.mend(self)
        return zero - began


def _mute(what: str, name: str, cause: Cause) -> Provocation:
    return Provocation(name, cause, lambda s: s.muted.add(what), lambda s: s.muted.clear())


def _set(name: str, cause: Cause, **values: Any) -> Provocation:
    """Set attributes of the stand-in, and back to what they were before."""

    def provoke(standin: StandIn) -> None:
        before.update({key: getattr(standin, key) for key in values})
        for key, value in values.items():
            setattr(standin, key, value)

    def mend(standin: StandIn) -> None:
        for key, value in before.items():
            setattr(standin, key, value)

    before: dict[str, Any] = {}
    return Provocation(name, cause, provoke, mend)


def _freeze(what: str, name: str, cause: Cause) -> Provocation:
    return Provocation(name, cause, lambda s: s.frozen.add(what), lambda s: s.frozen.clear())


def _announce(name: str, cause: Cause, **changes: Any) -> Provocation:
    return Provocation(name, cause, lambda s: s.announce(**changes), lambda s: None)


# A good action lifts these.
_ENDED_BY_AN_ACTION = {
    Cause.UNVERIFIED_ACTION,
    Cause.UNPARSABLE_ACTION,
    Cause.STALE_REPLY,
    Cause.NO_ACTION,
    Cause.MOTION_REFUSED,
}
PROVOCATIONS = (
    Provocation(
        "emergency stop, topic", Cause.EMERGENCY_STOP,
        StandIn.press_emergency_stop, lambda s: s.call(s.reset_client),
    ),
    Provocation(
        "emergency stop, service", Cause.EMERGENCY_STOP,
        lambda s: s.call(s.stop_client), lambda s: s.call(s.reset_client),
    ),
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
    Provocation(
        "link lost", Cause.LINK_LOST,
        lambda s: s.report("draft_node", _WARN), lambda s: s.report("draft_node", _OK),
    ),
    Provocation(
        "robot reports a fault", Cause.ROBOT_FAULT,
        lambda s: s.report("go2_node", _WARN), lambda s: s.report("go2_node", _OK),
    ),
    _announce("action not verified", Cause.UNVERIFIED_ACTION, verified=False),
    _announce("action unknown", Cause.UNPARSABLE_ACTION, amount=33),
    _announce("reply too old", Cause.STALE_REPLY, age=7.0),
    _announce("motion after stop", Cause.MOTION_REFUSED, kind=NavAction.STOP, amount=0),
    _set("turning instead of driving", Cause.MOTION_REFUSED, speed=(0.0, 1.2)),
    _set("too fast", Cause.MOTION_REFUSED, speed=(0.8, 0.0)),
    _mute("command", "navigation silent", Cause.COMMAND_STALE),
)  # fmt: skip


def measure_safety(
    trials: int,
    causes: Sequence[str] | None = None,
    progress: Callable[[str, Sequence[float]], None] | None = None,
) -> list[dict[str, Any]]:
    """Start a supervisor and provoke every cause ``trials`` times. Seconds from cause to zero, a row a provocation.

    :param causes: names of those to provoke; None: all.

    Takes a ROS domain of its own unless one is chosen in the environment. Call it from the main thread.

    :raises SafetyBenchError: when a cause does not stop the robot at all.
    """
    if trials < 1:
        raise ValueError(f"trials is {trials}; use 1 or more")
    known = {provocation.cause.name for provocation in PROVOCATIONS}
    for name in causes or ():
        if name not in known:
            raise ValueError(f"unknown cause {name!r}; choose from {', '.join(sorted(known))}")
    wanted = [p for p in PROVOCATIONS if causes is None or p.cause.name in causes]
    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")
    with ProcessGroup(lambda name, line: None) as group:
        group.start_node(NodeStart(SUPERVISOR, PARAMETERS))
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        node = rclpy.create_node("safety_bench")
        executor = SingleThreadedExecutor()
        executor.add_node(node)
        stop = threading.Event()

        def spin() -> None:
            while not stop.is_set():
                executor.spin_once(timeout_sec=0.1)

        standin = StandIn(node)
        ask_for_realtime()  # this is the clock: what it is late by would count as the supervisor's
        thread = threading.Thread(target=spin, name="safety bench", daemon=True)
        thread.start()
        try:
            rows = []
            for provocation in wanted:
                times = [standin.trial(provocation) for _ in range(trials)]
                if progress is not None:
                    progress(provocation.name, times)
                rows.append(_row(provocation, times))
            return rows
        finally:
            end_realtime()
            stop.set()
            thread.join(timeout=2.0)
            executor.shutdown(timeout_sec=0.5)
            node.destroy_node()
            rclpy.shutdown()


def _row(provocation: Provocation, times: Sequence[float]) -> dict[str, Any]:
    return {
        "provocation": provocation.name,
        "cause": provocation.cause.name,
        "trials": len(times),
        "median_s": round(statistics.median(times), 4),
        "worst_s": round(max(times), 4),
    }


def _twist(ahead: float, turn: float) -> Twist:
    message = Twist()
    message.linear.x, message.angular.z = float(ahead), float(turn)
    return message
