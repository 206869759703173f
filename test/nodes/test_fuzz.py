# SPDX-License-Identifier: Apache-2.0
"""No message that DDS can deliver ends a node, or makes a callback fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import fuzz
import pytest
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.serialization import serialize_message
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import BatteryState, CameraInfo, Image, Imu, LaserScan, Range
from std_msgs.msg import Bool, String

from dsd_lab.faults.safety_bench import PARAMETERS, StandIn
from dsd_lab.robot.go2_standin_node import Go2StandinNode
from dsd_lab.robot.simulator_node import FaultySimulatorNode
from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, SafetyState
from dsd_ros.navigation.run.run import NavigationRun
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.nodes.bridge_node import BridgeNode
from dsd_ros.nodes.draft_node import DraftNode
from dsd_ros.nodes.go2_node import Go2Node
from dsd_ros.nodes.memory_node import MemoryNode
from dsd_ros.nodes.navigation_node import NavigationNode
from dsd_ros.nodes.serve_node import ServeNode
from dsd_ros.nodes.supervisor_node import SupervisorNode
from dsd_ros.nodes.verifier_node import VerifierNode
from dsd_ros.nodes.visual_node import VisualNode
from dsd_ros.observe.ros import live
from dsd_ros.observe.ros.sight import Sight
from dsd_ros.ros import qos
from dsd_ros.ros.dds_channel import VerifierTopics
from dsd_ros.ros.images import ImageMessageError
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.stamps import moment_of
from dsd_ros.ros.topic_node import TopicNode

FEW, MANY = 3_000, 100_000


@pytest.fixture
def heard(ros_domain, monkeypatch) -> Iterator[list[Any]]:
    """Every subscription and service that nodes of this process make; a callback that raises fails the test."""
    made: list[Any] = []
    for name in ("create_subscription", "create_service"):
        create = getattr(TopicNode, name)

        def keep(self: Any, *given: Any, create: Callable[..., Any] = create, **options: Any) -> Any:
            made.append(create(self, *given, **options))
            return made[-1]

        monkeypatch.setattr(TopicNode, name, keep)

    def failed(self: Any, what: str, error: Exception) -> None:
        raise AssertionError(f"{self.get_name()}, {what}") from error

    monkeypatch.setattr(TopicNode, "callback_failed", failed)
    monkeypatch.setattr(SupervisorNode, "callback_failed", failed)
    yield made
    if rclpy.ok():
        rclpy.shutdown()


def started(**parameters: object) -> None:
    given = [word for name, value in parameters.items() for word in ("-p", f"{name.replace('__', '.')}:={value}")]
    rclpy.init(args=["--ros-args", *given], signal_handler_options=SignalHandlerOptions.NO)


def said(kind: type, raw: bool, rng: random.Random) -> Any:
    return fuzz.damaged_message(kind, rng) if raw else fuzz.message(kind, rng)


SENSORS = [("range", "image"), ("scan", "info"), ("depth", "none")]


@pytest.mark.parametrize(
    ("obstacle", "camera", "count"),
    [(*each, FEW) for each in SENSORS] + [pytest.param(*each, MANY // 3, marks=pytest.mark.slow) for each in SENSORS],
)
def test_nothing_that_the_supervisor_hears_fails_in_it(heard, obstacle, camera, count):
    started(require__obstacle=obstacle, require__camera=camera)
    node = SupervisorNode()
    topics = [each for each in heard if hasattr(each, "msg_type")]
    assert len(topics) >= 12
    rng = random.Random(count)
    for number in range(count):
        topic = topics[number % len(topics)]
        topic.callback(said(topic.msg_type, topic.raw, rng))
    for _ in range(count // 10):
        node._on_operator(fuzz.message(rng.choice((Twist, TwistStamped)), rng))
    causes = {cause for cause, _ in node._supervisor.decide(time.monotonic()).causes}
    assert Cause.SUPERVISOR_FAULT not in causes
    # Good odometry counts again.
    good = Odometry()
    good.header.stamp = node.get_clock().now().to_msg()
    good.pose.pose.orientation.w = 1.0
    node._on_odometry(good)
    time.sleep(0.15)  # after a stall, queued inputs are not taken for fresh
    node._decide()
    good.header.stamp.nanosec ^= 1
    node._on_odometry(good)
    assert Cause.ODOMETRY_STALE not in {cause for cause, _ in node._supervisor.decide(time.monotonic()).causes}
    node.destroy_node()


NODES = {
    "navigation": NavigationNode, "draft": DraftNode, "serve": ServeNode, "memory": MemoryNode,
    "verifier": VerifierNode, "bridge": BridgeNode, "go2": Go2Node, "simulator": FaultySimulatorNode,
    "standin": Go2StandinNode, "visual": VisualNode,
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_nothing_that_another_node_hears_fails_in_it(heard, name):
    started(**({"autostart": "false"} if issubclass(NODES[name], ManagedNode) else {}))
    node = NODES[name]()
    if name == "go2":
        node.load()
    elif name in ("bridge", "verifier"):
        VerifierTopics(node, lambda message: None)
    elif name == "navigation":
        node._run = NavigationRun(node._settings.run, node._settings.motion, moment_of(node))
    rng = random.Random(name)
    topics = [each for each in heard if hasattr(each, "msg_type")]
    services = [each for each in heard if hasattr(each, "srv_type") and "dsd_msgs" in each.srv_type.__module__]
    for number in range(500):
        if topics:
            topic = topics[number % len(topics)]
            topic.callback(said(topic.msg_type, topic.raw, rng))
        if name == "navigation":
            node._tick()
        if services and number < 50:
            service = services[number % len(services)]
            asked, answer = service.srv_type.Request, service.srv_type.Response
            service.callback(fuzz.message(asked, rng), answer())
    assert node.failure is None and (topics or services or name == "visual")
    node.close()
    node.destroy_node()


def test_the_views_draw_on_whatever_they_see(ros_domain, monkeypatch):
    monkeypatch.setattr(live, "_POLL_S", 0.0)
    started()
    node = rclpy.create_node("viewer")
    sight = Sight(node)
    rng = random.Random(7)
    sent = {
        kind: node.create_publisher(kind, topic, profile)
        for kind, topic, profile in (
            (Odometry, "odom", qos.STATE), (ReplyProgress, "dsd/reply_progress", qos.STATE),
            (DecodeStats, "dsd/decode_stats", qos.STATE), (NavAction, "dsd/nav_action", qos.STATE),
            (SafetyState, "dsd/safety_state", qos.LATCHED), (DiagnosticArray, "/diagnostics", qos.STATE),
            (Image, "camera/image_raw", qos.CAMERA),
        )
    }  # fmt: skip
    good = Image(height=4, width=6, step=18, encoding="bgr8", data=bytes(72))
    pose = Odometry()
    pose.pose.pose.orientation.w = 1.0
    sight.look(True)
    end = time.monotonic() + 10.0
    while min(publisher.get_subscription_count() for publisher in sent.values()) < 1 and time.monotonic() < end:
        time.sleep(0.02)
    drawn = 0
    for number in range(300):
        for kind, publisher in sent.items():
            with suppress(RuntimeError):  # DDS takes no empty message
                publisher.publish(said(kind, rng.random() < 0.5, rng))
        if number % 3 == 0:
            sent[Image].publish(serialize_message(good))
            sent[Odometry].publish(pose)
        try:
            sight.look(True)
        except ImageMessageError:
            continue
        drawn += len(sight.message(336)) > 0 if sight.number else 0
    assert drawn > 20 and sight.live.pose is not None
    sight.close()
    node.destroy_node()
    rclpy.shutdown()


TOPICS: list[tuple[type, str, Any]] = [
    (Odometry, "odom", qos.STATE), (Imu, "imu", qos.STATE), (Image, "camera/image_raw", qos.CAMERA),
    (Range, "range", qos.STATE), (BatteryState, "battery_state", qos.STATE), (String, "dsd/heartbeat", qos.STATE),
    (DiagnosticArray, "/diagnostics", qos.STATE), (Bool, "operator/deadman", qos.STATE),
    (Twist, "cmd_vel_dsd", qos.STATE),
    (Twist, "cmd_vel_joy", qos.STATE), (NavAction, "dsd/nav_action", qos.STATE), (LaserScan, "scan", qos.STATE),
    (CameraInfo, "depth/camera_info", qos.STATE),
]  # fmt: skip


def test_the_supervisor_outlives_a_storm_on_its_topics(rig):
    given = {name.replace(".", "__"): value for name, value in PARAMETERS.items()}
    hosted = rig.host("supervisor_node", **given)
    standin = StandIn(rig.node)
    standin.drive()
    rng = random.Random(11)
    sent = [(kind, rig.node.create_publisher(kind, topic, profile)) for kind, topic, profile in TOPICS]
    for number in range(2_000):
        kind, publisher = sent[number % len(sent)]
        with suppress(RuntimeError):  # DDS takes no empty message
            publisher.publish(said(kind, rng.random() < 0.3, rng))
        time.sleep(0.0005)
    assert hosted.node.failure is None
    assert not any("failed" in line or "Traceback" in line for line in rig.lines), rig.lines[-5:]
    for _, publisher in sent:
        rig.node.destroy_publisher(publisher)
    standin.call(standin.reset_client)
    for name in ("draft_node", "go2_node"):  # some of the storm was in their name
        standin.report(name, DiagnosticStatus.OK)
    standin.drive()
