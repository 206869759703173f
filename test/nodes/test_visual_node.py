# SPDX-License-Identifier: Apache-2.0
"""RViz' topics: the shipped configuration matches the live graph, and nothing is done without subscribers."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import yaml
from builtin_interfaces.msg import Time
from nav_msgs.msg import Path
from rclpy.qos import DurabilityPolicy, QoSCompatibility, QoSProfile, ReliabilityPolicy, qos_check_compatible
from sensor_msgs.msg import Image
from std_msgs.msg import Header
from visualization_msgs.msg import Marker, MarkerArray

from dsd_msgs.msg import AnswerSource, MemoryAnswer, NavAction, ReplyProgress, RoundStats
from dsd_ros.edge.results import RoundRecord
from dsd_ros.nodes.draft_node import ReplyPublisher, shortened
from dsd_ros.observe.ros import visual_messages
from dsd_ros.observe.view.overlay import ACCEPTED, REJECTED
from dsd_ros.observe.view.state import Overlay, Round, ShownMemory, ShownStep
from dsd_ros.paths import config_directory
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import world_markers
from dsd_ros.ros.images import to_rgb
from dsd_ros.ros.settings import VisualNodeSettings

# Display class of RViz 2 (rviz_default_plugins of Jazzy) -> the type it subscribes to.
DISPLAYS = {
    "rviz_default_plugins/Grid": None,
    "rviz_default_plugins/TF": "tf2_msgs/msg/TFMessage",
    "rviz_default_plugins/RobotModel": "std_msgs/msg/String",
    "rviz_default_plugins/Path": "nav_msgs/msg/Path",
    "rviz_default_plugins/MarkerArray": "visualization_msgs/msg/MarkerArray",
    "rviz_default_plugins/Odometry": "nav_msgs/msg/Odometry",
    "rviz_default_plugins/Image": "sensor_msgs/msg/Image",
}
OTHERS = {
    "rviz_common/Displays", "rviz_common/Views", "rviz_common/Time", "rviz_default_plugins/MoveCamera",
    "rviz_default_plugins/Select", "rviz_default_plugins/FocusCamera", "rviz_default_plugins/Measure",
    "rviz_default_plugins/TF", "rviz_default_plugins/Orbit",
}  # fmt: skip
HEADER = Header(frame_id="odom")


def configuration():
    return yaml.safe_load((config_directory() / "dsd.rviz").read_text())


def subscriptions():
    """(display's name, topic, type, QoS) of every display that subscribes, /tf and /tf_static included."""
    found = []
    for display in configuration()["Visualization Manager"]["Displays"]:
        kind = DISPLAYS[display["Class"]]
        topic = display.get("Topic", display.get("Description Topic"))
        if topic is not None:
            profile = QoSProfile(
                depth=topic["Depth"],
                reliability=ReliabilityPolicy[topic["Reliability Policy"].upper().replace(" ", "_")],
                durability=DurabilityPolicy[topic["Durability Policy"].upper().replace(" ", "_")],
            )
            found.append((display["Name"], topic["Value"], kind, profile))
        elif kind is not None:  # TF, as tf2 listens
            found.append((display["Name"], "tf", kind, QoSProfile(depth=100)))
            static = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
            found.append((display["Name"], "tf_static", kind, static))
    return found


def test_every_class_of_the_configuration_is_one_of_rvizs():
    content = configuration()
    manager = content["Visualization Manager"]
    assert {display["Class"] for display in manager["Displays"]} == DISPLAYS.keys()
    other = [*content["Panels"], *manager["Tools"]]
    other += [manager["Transformation"]["Current"], manager["Views"]["Current"]]
    assert {item["Class"] for item in other} <= OTHERS
    names = [display["Name"] for display in manager["Displays"]]
    assert len(set(names)) == len(names)
    assert manager["Global Options"]["Fixed Frame"] == FrameSettings.odom_frame  # there is a map only beside a SLAM


def docks(state: bytes):
    """Area (0 left, 1 right, 3 below) -> width and height, and dock -> visible, of QMainWindow::saveState (Qt 5)."""
    marker, version, kind, count = struct.unpack_from(">iibi", state)
    assert (marker, version, kind & 0xFF) == (0xFF, 0, 0xFD)
    at, areas, visible = 13, {}, {}
    for _ in range(count):
        area, width, height, kind, _, items = struct.unpack_from(">iiibbi", state, at)
        assert kind & 0xFF == 0xFC
        areas[area], at = (width, height), at + 18
        for _ in range(items):
            kind, length = struct.unpack_from(">bi", state, at)
            assert kind & 0xFF == 0xFB
            name = state[at + 5 : at + 5 + length].decode("utf-16-be")
            visible[name] = bool(state[at + 5 + length] & 1)
            at += 5 + length + 1 + 16
    return areas, visible


@pytest.mark.parametrize(("width", "height"), [(1500, 980), (1366, 768)])
def test_the_map_is_large_and_the_robots_view_is_legible_beside_it(width, height):
    content = configuration()
    window, displays = content["Window Geometry"], content["Visualization Manager"]["Displays"]
    assert (window["Width"], window["Height"]) == (1500, 980)
    areas, visible = docks(bytes.fromhex(window["QMainWindow State"]))
    images = {display["Name"] for display in displays if display["Class"].endswith("/Image")}
    panels = {panel["Name"] for panel in content["Panels"]}
    assert visible == dict.fromkeys(panels | images, True)
    assert not window["Hide Left Dock"] and not window["Hide Right Dock"]
    assert not any(window[name]["collapsed"] for name in panels | images)
    (left, _), (right, _), (_, below) = areas[0], areas[1], areas[3]
    assert right >= 1.4 * VisualNodeSettings.overlay_width  # the overlay's text, enlarged
    assert width - left - right > max(left, right) and height - below > 0.8 * height
    assert all(display["Enabled"] and display["Value"] for display in displays)


def test_the_configuration_against_the_live_graph(rig):
    wanted = subscriptions()
    rig.host("visual_node")
    rig.host("simulator_node", seed=0)
    node = rig.node

    def offered(topic):
        return node.get_publishers_info_by_topic(f"/{topic}")

    rig.until(lambda: all(offered(topic) for _, topic, _, _ in wanted), what="all topics")
    for name, topic, kind, profile in wanted:
        for publisher in offered(topic):
            assert publisher.topic_type == kind, f"{name}: {topic}"
            verdict, reason = qos_check_compatible(publisher.qos_profile, profile)
            assert verdict != QoSCompatibility.ERROR, f"{name}: {topic}: {reason}"
    # Without subscribers the camera and the rest are left alone.
    assert node.count_subscribers("/dsd/reply_progress") == 0
    assert node.count_subscribers("/dsd/visual/image") == 0

    pictures, markers, walked, intended = [], [], [], []
    node.create_subscription(Image, "dsd/visual/image", pictures.append, qos.CAMERA)
    node.create_subscription(MarkerArray, "dsd/visual/markers", markers.append, qos.STATE)
    node.create_subscription(Path, "dsd/visual/path_walked", walked.append, qos.LATCHED)
    node.create_subscription(Path, "dsd/visual/path_intended", intended.append, qos.LATCHED)
    rig.until(lambda: pictures and walked, what="a picture and a path")
    tell = node.create_publisher(ReplyProgress, "dsd/reply_progress", qos.STATE)
    act = node.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
    last = RoundStats(drafted=3, accepted=2, gained=["I ", "see ", "it."], rejected=["no "])
    progress = ReplyProgress(instruction="find it", text="I see it.", last_round=last)
    progress.header.stamp = Time(sec=5)
    action = NavAction(kind=NavAction.FORWARD, distance=0.5, verified=True, step=1)

    def shown():
        tell.publish(progress)
        act.publish(action)
        drawn = to_rgb(pictures[-1])
        return all(np.abs(drawn.astype(int) - colour).max(axis=-1).min() < 12 for colour in (ACCEPTED, REJECTED))

    rig.until(shown, what="tokens in the picture")
    assert pictures[-1].header.frame_id == FrameSettings.camera_frame
    rig.until(lambda: intended and len(intended[-1].poses) > 2, what="an intended path")
    begin, end = intended[-1].poses[0].pose.position, intended[-1].poses[-1].pose.position
    assert math.dist((begin.x, begin.y), (end.x, end.y)) == pytest.approx(0.5, abs=1e-6)
    names = {marker.ns for array in markers for marker in array.markers}
    rig.until(lambda: {m.ns for a in markers for m in a.markers} >= {"intended", "steps", "reply"}, what=str(names))
    remember = node.create_publisher(MemoryAnswer, "dsd/memory_answer", qos.LATCHED)
    red = AnswerSource(sentence="The Viola is red.", side=AnswerSource.CLOUD, document="chairs.md")
    remember.publish(MemoryAnswer(goal="go to my chair", answer="The Viola is red. Go: find it", sources=[red]))
    text = "The Viola is red. [chairs.md, cloud]\nGo: find it"
    rig.until(lambda: any(m.text == text for a in markers for m in a.markers if m.ns == "memory"), what="the answer")
    assert walked[-1].header.frame_id == intended[-1].header.frame_id == "odom"


def test_markers_have_stable_ids_and_what_is_momentary_fades():
    steps = [ShownStep(n, "forward 25 cm", 0.25, 0.0, n != 2, (0.1 * n, 0.0, 0.0)) for n in (1, 2, 3)]
    lasting = visual_messages.step_markers(steps, HEADER)
    assert [(m.ns, m.id, m.lifetime.sec) for m in lasting] == [("steps", n, 0) for n in (1, 2, 3)]
    assert lasting[1].color != lasting[0].color  # not verified
    overlay = Overlay(action="forward 25 cm", causes=("the camera is silent",))
    momentary = visual_messages.present_markers(overlay, steps[-1], (0.0, 0.0, 0.0), HEADER)
    assert [(m.ns, m.id) for m in momentary] == [("intended", 0), ("reply", 0), ("safety", 0)]
    assert all(m.lifetime.sec + m.lifetime.nanosec > 0 for m in momentary)
    assert len(momentary[0].points) >= 2
    stop = ShownStep(4, "stop", 0.0, 0.0, True, (0.0, 0.0, 0.0))
    assert len(visual_messages.present_markers(overlay, stop, (0.0,) * 3, HEADER)[0].points) == 2


def test_memorys_answer_stands_over_the_robot_with_its_sources_or_the_robots_question():
    told = (("It is the Viola.", "owner.md, robot"), ("The Viola is red.", "chairs.md, cloud"), ("Go: find it", ""))
    overlay = Overlay(memory=ShownMemory("bring me to my chair", told, "find it"))
    (known,) = visual_messages.present_markers(overlay, None, (1.0, 2.0, 0.0), HEADER)
    assert (known.ns, known.type) == ("memory", Marker.TEXT_VIEW_FACING)
    assert known.text == "It is the Viola. [owner.md, robot]\nThe Viola is red. [chairs.md, cloud]\nGo: find it"
    question = "I do not know which chair is yours."
    overlay = Overlay(memory=ShownMemory("bring me to my chair", (("I do not know.", ""),), "", question))
    (unknown,) = visual_messages.present_markers(overlay, None, (1.0, 2.0, 0.0), HEADER)
    assert unknown.text == question and unknown.color != known.color
    assert unknown.lifetime.sec + unknown.lifetime.nanosec > 0


def test_a_world_as_markers():
    world = World.from_seed(24, "find the silver bottle")
    markers = world_markers(world, HEADER).markers
    keys = [(marker.ns, marker.id) for marker in markers]
    assert len(set(keys)) == len(keys)
    goal = next(marker for marker in markers if marker.ns == "goal")
    assert (goal.pose.position.x, goal.pose.position.y) == (world.target.x, world.target.y)
    assert goal.text == "silver bottle"
    assert sum(marker.ns == "things" for marker in markers) == len(world.things)
    assert all(marker.scale.x > 0 and marker.color.a > 0 for marker in markers)
    assert all(marker.action == Marker.ADD for marker in markers)


def test_progress_contains_each_rounds_tokens():
    told = []
    publisher = type("Publisher", (), {"publish": lambda self, message: told.append(message)})()
    pieces = lambda tokens: f"<{tokens[0]}>" * (40 if tokens == [9] else 1)  # noqa: E731
    progress = ReplyPublisher(publisher, pieces, header=HEADER, instruction="find it", mode="dsd")
    record = RoundRecord(
        3, 1, 0.1, 0.2, 0.05, 10, 20, gained=(1, 2), rejected=(8, 9), exit_layers=(2, 4), exit_seconds=(0.1, 0.15),
        began_seconds=0.5, length=3,
    )  # fmt: skip
    progress.publish("a b", 2, record)
    message = told[0]
    assert (message.instruction, message.mode, message.rounds) == ("find it", "dsd", 1)
    seen = Round.of(message.last_round)
    assert seen.gained == ("<1>", "<2>") and seen.rejected[0] == "<8>"
    assert len(seen.rejected[1].encode()) <= 64
    assert seen.exits == ((2, pytest.approx(0.1)), (4, pytest.approx(0.15)))
    assert seen.began == 0.5 and message.last_round.length == 3
    assert shortened("ä" * 40) == "ä" * 32


def test_actions_become_steps():
    left = NavAction(kind=NavAction.TURN_LEFT, angle=math.radians(30), step=2, verified=True)
    assert ShownStep.of(left, (1.0, 2.0, 0.0)).phrase == "turn left 30 degrees"
    assert ShownStep.of(left, (1.0, 2.0, 0.0)).turn == pytest.approx(math.radians(30))
    assert ShownStep.of(NavAction(kind=9), (0.0, 0.0, 0.0)).phrase == "unknown action"
