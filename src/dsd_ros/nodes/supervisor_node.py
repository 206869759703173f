# SPDX-License-Identifier: Apache-2.0
"""The safety supervisor: the only node that publishes ``cmd_vel``.

A thin shell around :class:`dsd_ros.navigation.safety.supervisor.Supervisor`. No model and no torch in this process, and
one thread, so nothing here ever waits. If the process dies, the robot's driver (or the simulator) stops the robot when
``cmd_vel`` falls silent.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from sensor_msgs.msg import BatteryState, CameraInfo, Imu
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.navigation.run.actions import SHIPPED, Action, action_of, read_grammar
from dsd_ros.navigation.safety.causes import STILL, Cause, Motion, Source, names, tilt_of
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.navigation.safety.supervisor import SafetyDecision, Supervisor
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.ros import health, qos
from dsd_ros.ros.camera import LOOK_S, CameraTopic
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.publishers import PublisherWatch, alarm, misfits, type_name
from dsd_ros.ros.running import RCLError, RunnableNode, ask_for_realtime, run_main, steady_timer
from dsd_ros.ros.sensor_ahead import subscribe_obstacle_sensor
from dsd_ros.ros.settings import SupervisorNodeSettings
from dsd_ros.ros.stamps import command_message, command_type, moment_of, pose_of, seconds, twist_of

_CHECK_S = 0.02  # between two checks of every cause
_STATE_PERIOD_S = 0.2  # between unchanged safety states
_COMMAND_PERIOD_S = 0.04  # between unchanged commands
_GRAPH_PERIOD_S = 0.25  # between two looks at who publishes
_DEAF_LOOKS = 120  # 30 s; a node that is dead or frozen is in the graph for 20 s
_DOUBLED_S = 30.0  # likewise
_ONE_PUBLISHES = {"dsd/session_request": "draft node", "dsd/session_reply": "verifier node or bridge"}
_START_S = 60.0  # what has not come within this time after the start is warned of
_DEAF_S = 2.0  # after this long without a picture, subscribe to the camera again


class SupervisorNode(RunnableNode):
    """See the module. Callbacks run one after the other: the executor has one thread."""

    def __init__(self) -> None:
        super().__init__("supervisor_node")
        self._closing = False
        self._settings = settings = declare(self, SupervisorNodeSettings, adopt=self._adopt)
        self._supervisor = Supervisor(settings.timeout, settings.limit, settings.require, settings.fallback)
        self._grammar = read_grammar(settings.grammar)
        self._command_time = self._state_time = self._picture_time = self._imu_time = -math.inf
        self._misfits: list[str] = []  # sentences about publishers of other types
        self._doubles: list[str] = []  # and about two nodes that publish what one should
        self._single: dict[str, float] = {}  # topic -> when it last had one publisher
        self._published: Any = None  # the last decision, as published
        self._unheard = 0  # looks at the graph since a heartbeat of another node
        self._base_frame = FrameSettings.base_frame  # until odometry names the robot's
        self._logged: tuple[Cause, ...] = ()
        self._starting_until = time.monotonic() + _START_S

        self._stamped = settings.enable_stamped_cmd_vel
        self._command = self.create_publisher(command_type(self._stamped), "cmd_vel", qos.COMMAND)
        self._state = self.create_publisher(SafetyState, "dsd/safety_state", qos.LATCHED)
        self._health = health.Health(self, heartbeat=True)
        self._subscribe()
        self.create_service(Trigger, "emergency_stop", self._on_stop_call)
        self.create_service(Trigger, "emergency_stop_reset", self._on_reset_call)
        # A simulator that dies takes /clock with it; this must outlive it.
        steady_timer(self, _CHECK_S, self.guarded("the timer", self._tick))
        steady_timer(self, LOOK_S, self.guarded("the camera's timer", self._resubscribe))
        steady_timer(self, _GRAPH_PERIOD_S, self.guarded("the graph's timer", self._look_around))

    def _adopt(self, settings: SupervisorNodeSettings) -> None:
        self._settings = settings
        self._supervisor.adopt(settings.timeout, settings.limit, settings.fallback)

    def claim_processor(self) -> None:
        """Ask for real-time scheduling of this process if the settings say so."""
        if self._settings.realtime and not ask_for_realtime():
            self.get_logger().info("real-time scheduling is not allowed here; going on without it")

    def close(self) -> None:
        self._closing = True  # callbacks still run, and must not publish after this
        for _ in range(3):
            self._send(STILL)
            time.sleep(0.02)

    def _send(self, motion: Motion) -> None:
        twist = _twist(motion if motion.moving else Motion(self._settings.stop_speed))
        self._command.publish(command_message(twist, self, self._stamped, self._base_frame))

    def callback_failed(self, what: str, error: Exception) -> None:
        """Stop, by name, and go on: this process must not end."""
        super().callback_failed(what, error)
        self._supervisor.on_fault(f"{what} ({type(error).__name__})", time.monotonic())
        if not self._closing:
            self._send(STILL)

    def _subscribe(self) -> None:
        subscribe = self.create_subscription
        own = command_type(self._stamped)
        subscribe(own, "cmd_vel_dsd", self._on_navigation, qos.SENSOR)
        self._joystick, self._joystick_type = self._subscribe_to_joystick(own), own
        subscribe(Bool, "operator/deadman", self._on_deadman, qos.SENSOR)
        for profile in (qos.STATE, qos.SENSOR):  # said once: nothing may be lost, and a best-effort button is heard
            subscribe(Bool, "emergency_stop", self._on_stop_message, profile)
        subscribe(NavAction, "dsd/nav_action", self._on_action, qos.STATE)
        subscribe(Odometry, "odom", self._on_odometry, qos.SENSOR)
        subscribe(Imu, "imu", self._on_imu, qos.SENSOR)
        subscribe(BatteryState, "battery_state", self._on_battery, qos.SENSOR)
        subscribe(String, "dsd/heartbeat", self._on_heartbeat, qos.REPEATED)
        subscribe(DiagnosticArray, "/diagnostics", self._on_diagnostics, qos.STATE)
        settings = self._settings
        require = settings.require
        self._watches = [PublisherWatch(self, "cmd_vel", [self.get_name()], alone=True)]
        for topic, belongs in (
            ("cmd_vel_dsd", require.commands), ("dsd/nav_action", require.commands),
            ("dsd/verified_tokens", require.outcomes), ("dsd/outcome", require.outcomes),
        ):  # fmt: skip
            if names(belongs):
                self._watches.append(PublisherWatch(self, topic, names(belongs)))
        subscribe_obstacle_sensor(self, settings.require, lambda: self._settings, self._on_distance)
        self._camera = CameraTopic(self, settings.image_transport)
        self._pictures = self._subscribe_to_camera()

    def _subscribe_to_joystick(self, kind: type) -> Any:
        return self.create_subscription(kind, "cmd_vel_joy", self._on_operator, qos.SENSOR)

    def _follow_joystick(self) -> None:
        """Subscribe to the type that the joystick has: a process cannot subscribe to two types of one topic."""
        if self._joystick is None:
            with suppress(RCLError):  # the executor still has the old subscription; then the next time
                self._joystick = self._subscribe_to_joystick(self._joystick_type)
            return
        other = Twist if self._joystick_type is TwistStamped else TwistStamped
        offered = {info.topic_type for info in self.get_publishers_info_by_topic("cmd_vel_joy")}
        if type_name(other) in offered and type_name(self._joystick_type) not in offered:
            old, self._joystick, self._joystick_type = self._joystick, None, other
            self.destroy_subscription(old)

    def _look_around(self) -> None:
        """Look for publishers that do not belong, and for those that are not heard since they have another type."""
        now = time.monotonic()
        found = [(watch.topic, watch.strangers(now)) for watch in self._watches]
        self._supervisor.on_strangers(" ".join(alarm(topic, who) for topic, who in found if who)[:500], now)
        self._follow_joystick()
        self._unheard = self._unheard + 1 if self.count_publishers("dsd/heartbeat") > 1 else 0
        if self._unheard > _DEAF_LOOKS:
            self.failure = "The supervisor hears none of the nodes that publish; it ends, to be started again"
        heard = {s.topic_name: type_name(s.msg_type) for s in self.subscriptions}
        self._misfits = [text for topic, kind in heard.items() for text in misfits(self, topic, [kind])]
        self._doubles = list(self._find_doubles(now))
        if self._misfits or self._doubles:
            self.get_logger().warning(" ".join(self._misfits + self._doubles), throttle_duration_sec=10.0)
        self._decide()

    def _find_doubles(self, now: float) -> Iterator[str]:
        """A sentence for each topic that two nodes have published for longer than a dead one is in the graph."""
        for topic, what in _ONE_PUBLISHES.items():
            found = self.get_publishers_info_by_topic(topic)
            if len(found) < 2:
                self._single[topic] = now
            elif now - self._single.setdefault(topic, now) > _DOUBLED_S:
                who = sorted(each.node_name.removeprefix("_").removesuffix("_link") for each in found)
                yield f"{' and '.join(who)} publish {topic}, and this namespace may have one {what}: stop the others."

    def _subscribe_to_camera(self) -> Any:
        """Subscribe to raw messages: only the stamps matter."""
        if self._settings.require.camera == "image":
            topic = self._camera
            return self.create_subscription(topic.kind, topic.name, self._on_picture, topic.profile, raw=True)
        if self._settings.require.camera == "info":
            return self.create_subscription(CameraInfo, "camera/camera_info", self._on_picture, qos.SENSOR, raw=True)
        return None

    def _resubscribe(self) -> None:
        # A best-effort reader can stay deaf for good when a sender dies in mid-picture.
        now, other = time.monotonic(), self._camera.look()
        if self._pictures is not None and (other or now - self._picture_time > _DEAF_S):
            deaf, self._pictures = self._pictures, self._subscribe_to_camera()
            self.destroy_subscription(deaf)
            self._picture_time = now

    # -- events --------------------------------------------------------------------------------

    def _on_navigation(self, message: Twist | TwistStamped) -> None:
        self._supervisor.on_navigation(_motion(twist_of(message)), time.monotonic())
        self._decide(commanded=True)

    def _on_operator(self, message: Twist | TwistStamped) -> None:
        self._supervisor.on_operator(_motion(twist_of(message)), time.monotonic())
        self._decide(commanded=True)

    def _on_deadman(self, message: Bool) -> None:
        self._supervisor.on_deadman(message.data, time.monotonic())
        self._decide()

    def _on_stop_message(self, message: Bool) -> None:
        if message.data:  # false does not lift the stop: that takes the reset service
            self._supervisor.on_emergency_stop("the topic emergency_stop", time.monotonic())
            self._decide()

    def _on_stop_call(self, _: Trigger.Request, answer: Trigger.Response) -> Trigger.Response:
        self._supervisor.on_emergency_stop("the service emergency_stop", time.monotonic())
        self._decide()
        answer.success, answer.message = True, "The robot is stopped until emergency_stop_reset."
        return answer

    def _on_reset_call(self, _: Trigger.Request, answer: Trigger.Response) -> Trigger.Response:
        answer.success = self._supervisor.reset()
        answer.message = "The stop is lifted." if answer.success else "There was no emergency stop."
        self._decide()
        return answer

    def _on_action(self, message: NavAction) -> None:
        moment, observed = moment_of(self), seconds(message.observation_stamp)
        self._supervisor.on_clock(moment)
        action: Action | str
        try:
            action = action_of(message, SHIPPED if message.retracing else self._grammar)  # the way back is our own
        except ValueError as error:
            action = str(error)
        now, stamp = moment.steady, moment.stamp
        self._supervisor.on_action(action, message.verified, observed, stamp, now, message.retracing)
        self._decide()

    def _on_odometry(self, message: Odometry) -> None:
        now = time.monotonic()
        try:
            pose = pose_of(message)
        except OdometryError as error:
            self.get_logger().warning(str(error), throttle_duration_sec=5.0)
            return
        self._base_frame = message.child_frame_id or self._base_frame
        stamp = seconds(message.header.stamp)
        self._supervisor.on_odometry(pose, stamp, now)
        if not self._settings.require.imu and now - self._imu_time > self._settings.timeout.state_s:
            q = message.pose.pose.orientation
            self._supervisor.on_tilt(tilt_of(q.x, q.y, q.z, q.w), stamp, now)

    def _on_imu(self, message: Imu) -> None:
        if message.orientation_covariance[0] == -1.0:  # sensor_msgs: no orientation
            return
        q = message.orientation
        stamp, now = seconds(message.header.stamp), time.monotonic()
        self._imu_time = now
        self._supervisor.on_tilt(tilt_of(q.x, q.y, q.z, q.w), stamp, now)
        self._decide()

    def _on_picture(self, message: bytes) -> None:
        if len(message) < _STAMPED:
            return
        order = "<" if message[1] & 1 else ">"  # CDR: 4 bytes of encapsulation, then the header's stamp
        sec, nanosec = struct.unpack_from(f"{order}iI", message, 4)
        self._picture_time = time.monotonic()
        self._supervisor.on_picture(sec + nanosec * 1e-9, self._picture_time)

    def _on_distance(self, distance: float | None, stamp: float | None) -> None:
        self._supervisor.on_distance(distance, time.monotonic(), stamp)
        self._decide()

    def _on_battery(self, message: BatteryState) -> None:
        self._supervisor.on_battery(message.percentage)
        self._decide()

    def _on_heartbeat(self, message: String) -> None:
        if message.data != self.get_name():
            self._unheard = 0
        self._supervisor.on_heartbeat(message.data, time.monotonic())

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        mine = self.get_namespace().strip("/")
        for status in message.status:
            namespace, _, name = status.name.rpartition("/")
            if namespace == mine:
                well = status.level == DiagnosticStatus.OK
                self._supervisor.on_report(name, "" if well else status.message[:200] or "trouble")
        self._decide()

    # -- the decision --------------------------------------------------------------------------

    def _tick(self) -> None:
        self._supervisor.on_clock(moment_of(self))
        self._decide()

    def _decide(self, commanded: bool = False) -> None:
        """Decide, and publish what has changed or is due. ``commanded``: a command has just come."""
        if self._closing:
            return
        now = time.monotonic()
        decision = self._supervisor.decide(now)
        state = (decision.stopped, decision.source, decision.causes, decision.waived)
        changed = state != self._published
        due = now - self._command_time >= _COMMAND_PERIOD_S
        if decision.speaking and (commanded or changed or due):
            self._command_time = now
            self._send(decision.motion)
        if changed or now - self._state_time >= _STATE_PERIOD_S:
            self._published, self._state_time = state, now
            self._state.publish(self._message(decision))
            self._report(decision)

    def _message(self, decision: SafetyDecision) -> SafetyState:
        message = SafetyState(stopped=decision.stopped, source=int(decision.source))
        message.header.stamp = self.get_clock().now().to_msg()
        message.header.frame_id = self._base_frame
        message.causes = [int(cause) for cause, _ in decision.causes]
        message.sentences = [sentence[:500] for _, sentence in decision.causes]
        message.waived = [int(cause) for cause in decision.waived]
        return message

    def _report(self, decision: SafetyDecision) -> None:
        causes = tuple(cause for cause, _ in decision.causes)
        sentences = " ".join(sentence for _, sentence in decision.causes)
        level = health.WARN if causes else health.OK
        if not _GRAVE.isdisjoint(causes):
            level = health.ERROR
        elif (self._misfits or self._doubles) and not causes:
            level, sentences = health.WARN, " ".join(self._misfits + self._doubles)[:500]
        if not causes and not decision.awaited:
            self._starting_until = -math.inf  # everything has been there once
        calm = time.monotonic() < self._starting_until and _AWAITED.issuperset(causes) and not self._misfits
        if causes and causes != self._logged and level == self._health.level and not calm:
            # Health.report logs a change of level itself.
            self.get_logger().warning(sentences, throttle_duration_sec=1.0)
        self._logged = causes
        values = {
            "source": decision.source.name,
            "stopped": decision.stopped,
            "causes": " ".join(cause.name for cause in causes),
            "not heard": " ".join(self._misfits),
        }
        self._health.report(level, sentences or _WELL[decision.source], values, calm=calm)


_STAMPED = 12  # bytes of a serialized message up to the end of its stamp
_AWAITED = frozenset({  # what a start waits for
    Cause.DEADMAN, Cause.ROBOT_FAULT, Cause.ODOMETRY_STALE, Cause.STATE_STALE, Cause.CAMERA_STALE,
    Cause.OBSTACLE_SENSOR_STALE, Cause.NODE_SILENT, Cause.LINK_LOST,
})  # fmt: skip
_GRAVE = frozenset({Cause.EMERGENCY_STOP, Cause.SUPERVISOR_FAULT, Cause.FOREIGN_PUBLISHER})
_WELL = {Source.NONE: "ready", Source.NAVIGATION: "navigation drives", Source.OPERATOR: "the operator drives"}


def _motion(message: Twist) -> Motion:
    return Motion(message.linear.x, message.linear.y, message.angular.z)


def _twist(motion: Motion) -> Twist:
    message = Twist()
    message.linear.x, message.linear.y = float(motion.vx), float(motion.vy)
    message.angular.z = float(motion.wz)
    return message


def _make() -> SupervisorNode:
    node = SupervisorNode()
    node.claim_processor()
    return node


def main() -> None:
    run_main(_make, events=True)
