# SPDX-License-Identifier: Apache-2.0
"""Who else publishes: strangers stop the robot by name, other types are warned of, and every reliability is heard."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.qos import ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from ros_rig import OdometryRig
from std_msgs.msg import Bool

from dsd_lab.faults.safety_bench import PARAMETERS, StandIn
from dsd_msgs.msg import Outcome, SafetyState, VerifiedTokens
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.nodes.supervisor_node import SupervisorNode
from dsd_ros.ros import qos
from dsd_ros.ros.publishers import PublisherWatch
from dsd_ros.ros.settings import stamped_by_default

GIVEN = {name.replace(".", "__"): value for name, value in PARAMETERS.items()}


def states(rig: Any) -> list[SafetyState]:
    heard: list[SafetyState] = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", heard.append, qos.LATCHED)
    return heard


def test_a_stranger_on_any_topic_of_motion_stops_the_robot_by_name(rig):
    rig.host("supervisor_node", **GIVEN)
    standin = StandIn(rig.node)
    standin.drive()
    for kind, topic in (
        (Outcome, "dsd/outcome"), (VerifiedTokens, "dsd/verified_tokens"), (Twist, "cmd_vel"),
    ):  # fmt: skip
        stranger = rig.node.create_publisher(kind, topic, qos.COMMAND)
        rig.until(lambda: Cause.FOREIGN_PUBLISHER in standin.causes, what=f"a stranger on {topic}")
        sentence = standin.state.sentences[standin.causes.index(Cause.FOREIGN_PUBLISHER)]
        assert topic in sentence and "/test_rig" in sentence and standin.state.stopped
        rig.node.destroy_publisher(stranger)
        rig.until(lambda: Cause.FOREIGN_PUBLISHER not in standin.causes, what="the stranger gone")
    standin.drive()


def test_commands_and_actions_of_other_nodes_than_those_named_do_not_move_the_robot(rig):
    rig.host("supervisor_node", **GIVEN | {"require__commands": "navigation_node"})
    standin = StandIn(rig.node)
    rig.until(lambda: Cause.FOREIGN_PUBLISHER in standin.causes)
    sentence = standin.state.sentences[standin.causes.index(Cause.FOREIGN_PUBLISHER)]
    assert "cmd_vel_dsd" in sentence and "dsd/nav_action" in sentence and "/test_rig" in sentence
    rig.until_linked("supervisor_node", *(standin._publishers[name] for name in ("command", "action")))
    standin.announce()
    standin.call(standin.reset_client)  # which is answered after the action came
    heard = states(rig)
    rig.until(lambda: len(heard) > 5, what="further states")
    assert not any(moves for _, moves in standin.commands)


def test_the_nodes_that_belong_can_be_named(rig):
    rig.host("supervisor_node", **GIVEN | {"require__commands": "navigation_node,/test_rig"})
    StandIn(rig.node).drive()


def test_a_node_whose_name_dds_has_lost_is_still_itself_and_an_unknown_process_is_a_warning():
    """As after a node was frozen for longer than DDS keeps it."""
    warned: list[str] = []
    found: list[Any] = []
    node = SimpleNamespace(
        get_namespace=lambda: "/", resolve_topic_name=lambda topic: f"/{topic}",
        get_publishers_info_by_topic=lambda _: found,
        get_logger=lambda: SimpleNamespace(warning=lambda text, **_: warned.append(text)),
    )  # fmt: skip
    watch = PublisherWatch(node, "cmd_vel_dsd", ["navigation_node"])

    def look(now: float, **names: str) -> list[str]:
        found[:] = [
            SimpleNamespace(endpoint_gid=[*process.encode().ljust(12), *range(4)], node_name=name, node_namespace="/")
            for process, name in names.items()
        ]
        return watch.strangers(now)

    unnamed = "_NODE_NAME_UNKNOWN_"
    assert look(0.0, a="navigation_node", b="teleop") == ["/teleop"]
    assert look(9.0, a=unnamed) == [] and look(19.0, a=unnamed) == []
    assert look(29.0, a=unnamed, b=unnamed) == ["/teleop"] and not warned
    assert look(30.0, c=unnamed) == [] and look(33.0, c=unnamed) == []
    assert "cmd_vel_dsd" in warned[0]


def test_a_second_publisher_of_cmd_vel_does_not_move_the_simulated_robot(rig):
    rig.host("simulator_node", seed=3)
    odometry = OdometryRig(rig)
    teleop = rig.node.create_publisher(Twist, "cmd_vel", qos.COMMAND)
    rig.until(lambda: odometry.samples and teleop.get_subscription_count())
    drive = Twist()
    drive.angular.z = 0.5

    def turned() -> bool:
        teleop.publish(drive)
        time.sleep(0.02)
        return bool(odometry.velocity.wz > 0.2)

    rig.until(turned, what="motion without a supervisor")
    heard = states(rig)
    troubles: list[str] = []
    rig.node.create_subscription(
        DiagnosticArray, "/diagnostics",
        lambda m: troubles.extend(s.message for s in m.status if s.name == "simulator_node"), 10,
    )  # fmt: skip
    rig.host("supervisor_node", **GIVEN)

    def stands() -> bool:
        teleop.publish(drive)
        time.sleep(0.02)
        return abs(odometry.velocity.wz) < 0.01

    rig.until(stands, what="rest beside a supervisor")
    rig.until(lambda: heard and Cause.FOREIGN_PUBLISHER in heard[-1].causes)
    rig.until(lambda: any("/test_rig" in text for text in troubles), what="the simulator's diagnostic")
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert stands()


def test_the_joystick_may_be_stamped(rig):
    rig.host("supervisor_node", require__deadman="false")
    commands: list[Twist] = []
    rig.node.create_subscription(Twist, "cmd_vel", commands.append, qos.SENSOR)
    context = rclpy.Context()  # a process has one type for a topic
    rclpy.init(args=[], context=context, signal_handler_options=SignalHandlerOptions.NO)
    other = rclpy.create_node("joystick", context=context)
    try:
        for kind, node, speed in ((TwistStamped, other, -0.2), (Twist, rig.node, -0.3), (TwistStamped, other, -0.4)):
            publisher = node.create_publisher(kind, "cmd_vel_joy", qos.STATE)
            message = kind()
            (message if kind is Twist else message.twist).linear.x = speed

            def driven(publisher: Any = publisher, message: Any = message, speed: float = speed) -> bool:
                publisher.publish(message)
                time.sleep(0.05)
                return bool(commands and commands[-1].linear.x == speed)

            rig.until(driven, what=f"the motion of a {kind.__name__}")
            node.destroy_publisher(publisher)
    finally:
        other.destroy_node()
        rclpy.shutdown(context=context)


def test_commands_are_stamped_where_asked_for(rig):
    stamped = {"enable_stamped_cmd_vel": "true"}
    rig.host("simulator_node", **stamped)
    rig.host("supervisor_node", require__deadman="false", **stamped)
    rig.host("navigation_node", **stamped)
    odometry = OdometryRig(rig)
    operator = rig.node.create_publisher(TwistStamped, "cmd_vel_joy", qos.STATE)
    command = TwistStamped()  # a stamp of 0: ages run from the arrival
    command.twist.linear.x = 0.2

    def driven() -> bool:
        operator.publish(command)
        time.sleep(0.05)
        return bool(odometry.samples and odometry.velocity.vx > 0.1)

    rig.until(driven, what="the operator's motion")
    for topic in ("cmd_vel", "cmd_vel_dsd"):
        kinds = lambda: {info.topic_type for info in rig.node.get_publishers_info_by_topic(topic)}  # noqa: B023, E731
        rig.until(lambda: kinds() == {"geometry_msgs/msg/TwistStamped"}, what=f"a stamped {topic}")  # noqa: B023
    rig.until(lambda: abs(odometry.velocity.vx) < 0.01, what="the stop after the operator's silence")
    context = rclpy.Context()
    rclpy.init(args=[], context=context, signal_handler_options=SignalHandlerOptions.NO)
    other = rclpy.create_node("plain", context=context)
    try:
        other.create_publisher(Twist, "cmd_vel", qos.COMMAND)
        wrong = "/plain publishes geometry_msgs/msg/Twist on cmd_vel, which must be geometry_msgs/msg/TwistStamped."
        rig.until(lambda: any("simulator_node" in line and wrong in line for line in rig.lines), what="a warning")
    finally:
        other.destroy_node()
        rclpy.shutdown(context=context)


@pytest.mark.parametrize(
    ("distribution", "stamped"), [("", 0), ("humble", 0), ("jazzy", 0), ("kilted", 1), ("rolling", 1)]
)
def test_commands_are_stamped_as_nav2_has_them(distribution, stamped, monkeypatch):
    monkeypatch.setenv("ROS_DISTRO", distribution)
    assert stamped_by_default() == bool(stamped)


def test_publishers_of_another_type_are_warned_of(rig):
    rig.host("supervisor_node", **GIVEN)
    reports: list[Any] = []
    rig.node.create_subscription(
        DiagnosticArray, "/diagnostics",
        lambda m: reports.extend(s for s in m.status if s.name == "supervisor_node"), 10,
    )  # fmt: skip
    rig.node.create_publisher(Bool, "cmd_vel_joy", qos.STATE)
    rig.until(lambda: any("std_msgs/msg/Bool on /cmd_vel_joy" in line for line in rig.lines), what="a warning")
    rig.until(lambda: any("/test_rig" in value.value for s in reports for value in s.values), what="a diagnostic")


def test_a_second_verifier_is_named(rig, monkeypatch):
    monkeypatch.setattr("dsd_ros.nodes.supervisor_node._DOUBLED_S", 0.3)
    rig.host("supervisor_node", **GIVEN)
    second = rig.node.create_publisher(Bool, "dsd/session_reply", qos.STATE)
    rig.until_linked("supervisor_node", rig.node.create_publisher(Bool, "emergency_stop", qos.STATE))
    assert not any("dsd/session_reply" in line for line in rig.lines)
    rig.node.create_publisher(Bool, "dsd/session_reply", qos.STATE)
    rig.until(lambda: any("test_rig and test_rig publish dsd/session_reply" in line for line in rig.lines))
    rig.node.destroy_publisher(second)


BEST_EFFORT = qos.SENSOR


def test_best_effort_publishers_are_heard(rig):
    rig.host("supervisor_node", **GIVEN)
    heard = states(rig)
    rig.until(lambda: heard and Cause.ODOMETRY_STALE in heard[-1].causes)
    odometry = rig.node.create_publisher(Odometry, "odom", BEST_EFFORT)
    sample = Odometry()
    sample.pose.pose.orientation.w = 1.0

    def fresh() -> bool:
        sample.header.stamp = rig.node.get_clock().now().to_msg()
        odometry.publish(sample)
        time.sleep(0.02)
        return Cause.ODOMETRY_STALE not in heard[-1].causes

    rig.until(fresh, what="best-effort odometry")
    button = rig.node.create_publisher(Bool, "emergency_stop", BEST_EFFORT)

    def stopped() -> bool:
        button.publish(Bool(data=True))
        time.sleep(0.05)
        return Cause.EMERGENCY_STOP in heard[-1].causes

    rig.until(stopped, what="a best-effort emergency stop")


@pytest.fixture
def overridden(ros_domain, monkeypatch):
    """Initialises rclpy with parameters on the command line; shut down at the end."""

    def begin(*parameters: str) -> None:
        words = [word for text in parameters for word in ("-p", text)]
        monkeypatch.setattr(sys, "argv", ["node", "--ros-args", *words])
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)

    yield begin
    if rclpy.ok():
        rclpy.shutdown()


def test_qos_overrides_work_on_subscriptions_and_publishers(overridden):
    overridden(
        "qos_overrides./odom.subscription.reliability:=reliable", "qos_overrides./odom.subscription.depth:=7",
        "qos_overrides./cmd_vel.publisher.reliability:=best_effort", "qos_overrides./dsd/heartbeat.publisher.depth:=3",
    )  # fmt: skip
    node = SupervisorNode()
    odometry = node.get_subscriptions_info_by_topic("odom")[0].qos_profile
    assert odometry.reliability == ReliabilityPolicy.RELIABLE
    assert next(s.qos_profile.depth for s in node.subscriptions if s.topic_name == "/odom") == 7
    assert node.get_publishers_info_by_topic("cmd_vel")[0].qos_profile.reliability == ReliabilityPolicy.BEST_EFFORT
    # Nobody else's profile has changed.
    imu = node.get_subscriptions_info_by_topic("imu")[0].qos_profile
    assert imu.reliability == ReliabilityPolicy.BEST_EFFORT and qos.SENSOR.depth == 1
    node.destroy_node()


@pytest.mark.parametrize("value", ["reliability:=perhaps", "depth:=many"])
def test_a_qos_override_with_a_wrong_value_is_refused(overridden, value):
    overridden(f"qos_overrides./odom.subscription.{value}")
    with pytest.raises((InvalidParameterTypeException, RuntimeError), match="odom|reliability"):
        SupervisorNode()
