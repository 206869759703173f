# SPDX-License-Identifier: Apache-2.0
"""Both views in one process share camera and drawing, and neither ends with the other."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message
from ros_rig import CameraRig, repeating
from sensor_msgs.msg import Image
from std_msgs.msg import Header
from visualization_msgs.msg import MarkerArray

from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, RoundStats, SafetyState
from dsd_ros.navigation.safety.causes import WAITING
from dsd_ros.observe.ros.sight import Sight
from dsd_ros.observe.view.overlay import PANEL_HEIGHT
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import world_markers
from dsd_ros.ros.images import to_bgr
from dsd_ros.ros.polled import PacedThread, RateTimer


def start_view(rig: Any, *options: str) -> tuple[Any, list[str]]:
    """The node, and the list that gets its page's address."""
    page: list[str] = []

    def read(line: str) -> None:
        page.extend(re.findall(r"live page at (http://\S+/)", line))

    command = [sys.executable, "-m", "dsd_ros.ros.entry", "view_node", "--ros-args", "-p", "web_port:=0", *options]
    return rig.group.start("view_node", command, on_line=read), page


def events_of(page: str, stop: Callable[[list[dict[str, Any]]], bool], limit_s: float = 60.0) -> list[dict[str, Any]]:
    """What a browser gets that opens the page now, until ``stop`` says that it is enough."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + limit_s
    with urllib.request.urlopen(f"{page}events", timeout=20) as stream:
        for line in stream:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if stop(found):
                    return found
            assert time.monotonic() < deadline, Counter(event["k"] for event in found)
    raise AssertionError("the page's server has ended")


def newest(events: list[dict[str, Any]], kind: str) -> Any:
    return next((event["v"] for event in reversed(events) if event["k"] == kind), None)


def test_both_views_in_one_process(rig):
    node = rig.node
    # As launch does: what is meant for view_node reaches every node of its process.
    _, page = start_view(rig, "-p", "visual:=true")
    rig.host("simulator_node", seed=0)
    pictures, levels = [], {}

    def on_health(message: DiagnosticArray) -> None:
        levels.update((status.name, (status.level, status.message)) for status in message.status)

    node.create_subscription(Image, "dsd/visual/image", pictures.append, qos.NEWEST_STATE)
    node.create_subscription(DiagnosticArray, "/diagnostics", on_health, qos.STATE)
    rig.until(lambda: len(pictures) > 3, what="pictures")
    rig.until(lambda: {"view_node", "visual_node"} <= levels.keys(), what="both nodes' health")
    rig.until(lambda: {"view_node", "visual_node"} <= set(node.get_node_names()), what="both nodes")
    rig.until(lambda: node.count_subscribers("/camera/image_raw") == 1, what="one subscription to the camera")
    rig.until(lambda: node.count_subscribers("/dsd/reply_progress") == 1, what="one subscription to the replies")
    assert page and page[0] in levels["view_node"][1]


def test_without_a_page_the_pictures_for_rviz_go_on(rig):
    levels: dict[str, Any] = {}
    pictures: list[Image] = []
    # 192.0.2.1 is nobody's address (RFC 5737).
    child, page = start_view(rig, "-p", "visual:=true", "-p", "bind:=192.0.2.1")
    rig.host("simulator_node", seed=0)
    rig.node.create_subscription(Image, "dsd/visual/image", pictures.append, qos.NEWEST_STATE)
    rig.node.create_subscription(
        DiagnosticArray,
        "/diagnostics",
        lambda m: levels.update((s.name, (s.level, s.message)) for s in m.status),
        qos.STATE,
    )
    rig.until(lambda: len(pictures) > 3, what="pictures")
    rig.until(lambda: levels.get("view_node", (0,))[0] == DiagnosticStatus.ERROR, what="word of the address")
    assert child.running and not page and "192.0.2.1" in levels["view_node"][1]


def test_a_page_opened_in_mid_run_and_after_it_shows_all_of_it(rig):
    node, camera = rig.node, CameraRig(rig)
    _, page = start_view(rig)
    latched = node.create_publisher(MarkerArray, "ground_truth/markers", qos.LATCHED)
    latched.publish(world_markers(World.from_seed(3), Header(frame_id="odom")))
    topics = {
        name: node.create_publisher(kind, name, profile)
        for name, kind, profile in (
            ("odom", Odometry, qos.STATE), ("dsd/reply_progress", ReplyProgress, qos.LINK),
            ("dsd/decode_stats", DecodeStats, qos.STATE), ("dsd/nav_action", NavAction, qos.STATE),
            ("dsd/safety_state", SafetyState, qos.LATCHED), ("/diagnostics", DiagnosticArray, qos.STATE),
        )
    }  # fmt: skip
    health = DiagnosticStatus(name="draft_node", message="starting", level=DiagnosticStatus.STALE)
    navigation = DiagnosticStatus(name="navigation_node", message="carrying out: find it", level=DiagnosticStatus.OK)
    other = DiagnosticStatus(name="go2_9/navigation_node", message="STUCK: It is another robot.", level=b"\x01")
    rig.until(lambda: page, what="the page's address")
    rig.until_linked("view_node", *topics.values())

    def pulse() -> None:
        camera.show(np.full((224, 336, 3), 90, np.uint8))
        topics["odom"].publish(Odometry(header=Header(frame_id="odom")))
        topics["/diagnostics"].publish(DiagnosticArray(status=[health, navigation, other]))

    with repeating(pulse):
        round_ = RoundStats(drafted=4, depth=4, accepted=2, gained=["go", " on", "!"], rejected=[" off"])
        taken = Header(stamp=node.get_clock().now().to_msg())
        for done in (False, True):
            topics["dsd/reply_progress"].publish(
                ReplyProgress(
                    header=taken, instruction="find it", text="go on!", rounds=1, last_round=round_, done=done
                )
            )
        topics["dsd/decode_stats"].publish(DecodeStats(mode="fsd", transport="dds", tokens=3, rounds=1, tau=3.0))
        topics["dsd/nav_action"].publish(NavAction(kind=NavAction.FORWARD, distance=0.5, verified=True, step=1))
        topics["dsd/safety_state"].publish(
            SafetyState(stopped=True, causes=[SafetyState.OBSTACLE], sentences=["A chair is near."])
        )
        node.get_logger().warning("the battery is low")
        time.sleep(0.5)
        health.level, health.message = DiagnosticStatus.OK, "session open"
        time.sleep(2.5)  # nobody watches, and things happen
        kinds = {"world", "view", "pose", "reply", "stats", "step", "hold", "link", "log"}
        # What a browser gets before the first beat is the past.
        found = events_of(page[0], lambda events: events[-1]["k"] == "beat")
        assert kinds <= {event["k"] for event in found}
        reply = newest(found, "reply")
        assert reply["text"] == "go on!" and reply["done"] and reply["instruction"] == "find it"
        assert [" off", "rejected", False] in reply["tokens"]
        assert newest(found, "stats")["mode"] == "fsd" and newest(found, "step")["phrase"] == "forward 50 cm"
        assert newest(found, "hold") == {"on": True, "causes": ["OBSTACLE"], "sentences": ["A chair is near."]}
        links = [event["v"]["ok"] for event in found if event["k"] == "link"]
        assert links == [None, True] and newest(found, "log")["text"] == "the battery is low"
        assert any(thing["kind"] == "walls" for thing in newest(found, "world"))
        assert not newest(found, "end")["outcome"]
        assert found[-1]["v"]["silent"] < 2.0
        pictures = [event["t"] for event in found if event["k"] == "view"]
        assert pictures and all(later - one > 0.3 for one, later in pairwise(pictures))  # two a second: nobody watched
        health.level, health.message = DiagnosticStatus.WARN, f"{WAITING}: no answer"
        waits = newest(events_of(page[0], lambda events: (newest(events, "link") or {}).get("waits")), "link")
        assert waits["text"] == health.message and not waits["gone"]
        navigation.message = "ARRIVED: The target is reached."
        ended = events_of(page[0], lambda events: (newest(events, "end") or {}).get("outcome") == "ARRIVED")
        assert newest(ended, "end") == {"outcome": "ARRIVED", "sentence": "The target is reached.", "good": True}
    # The robot's nodes have ended: whoever opens the page now sees the whole run, and that it is over.
    after = events_of(page[0], lambda events: (newest(events, "link") or {}).get("gone") and newest(events, "beat"))
    assert kinds <= {event["k"] for event in after} and newest(after, "end")["outcome"] == "ARRIVED"
    assert "draft_node is silent" in newest(after, "link")["text"]


def test_a_picture_is_received_once_for_both(rig):
    camera, sight = CameraRig(rig), Sight(rig.node)
    picture = np.full((224, 336, 3), 90, np.uint8)

    def seen() -> bool:
        camera.show(picture)
        time.sleep(0.05)
        sight.look(picture=True)
        return sight.number > 0

    try:
        rig.until(seen, what="a picture")
        message = deserialize_message(bytes(sight.message(336)), Image)
        drawn = to_bgr(message)
        assert drawn.shape == (224 + PANEL_HEIGHT, 336, 3)
        assert (drawn[100] == 90).all() and message.header.frame_id == "front_camera_optical_frame"
        assert np.array_equal(sight.picture, picture)  # which the page shows
        assert to_bgr(deserialize_message(bytes(sight.message(168)), Image)).shape == (112 + PANEL_HEIGHT, 168, 3)
    finally:
        sight.close()


def test_a_beat_keeps_its_rate_and_makes_up_for_nothing():
    beat = RateTimer(5.0)
    ticks = [n / 15 + (0.01 if n % 2 else -0.01) for n in range(150)]
    assert sum(map(beat.due, ticks)) in (50, 51)
    assert [beat.due(at) for at in (20.0, 20.01, 20.21)] == [True, False, True]
    fast = RateTimer(15.0)
    assert all(map(fast.due, ticks))


def test_a_pace_ends_while_it_waits():
    class Node:
        failure = None

        def get_name(self) -> str:
            return "node"

    calls = []
    pace = PacedThread(Node(), lambda: calls.append(1) or 3600.0)
    pace.start()
    while not calls:
        time.sleep(0.001)
    pace.close()
    pace.close()
    assert not pace._thread.is_alive() and len(calls) == 1
