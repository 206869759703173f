# SPDX-License-Identifier: Apache-2.0
"""Both views in one process share camera and drawing, and neither ends with the other."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from rclpy.serialization import deserialize_message
from ros_rig import CameraRig
from sensor_msgs.msg import Image

from dsd_ros.observe.ros.sight import Sight
from dsd_ros.observe.view import web
from dsd_ros.observe.view.overlay import PANEL_HEIGHT
from dsd_ros.ros import qos
from dsd_ros.ros.images import to_bgr
from dsd_ros.ros.polled import PacedThread, RateTimer


@pytest.mark.skipif(not web.available(), reason="rerun-sdk is not installed (requirements/view.txt)")
def test_both_views_in_one_process(rig):
    node = rig.node
    # As launch does: what is meant for view_node reaches every node of its process.
    options = ["--ros-args", "-p", "visual:=true", "-p", "web_port:=0", "-p", "data_port:=0"]
    command = [sys.executable, "-m", "dsd_ros.ros.entry", "view_node", *options]
    view = rig.group.start("view_node", command)
    rig.start("simulator_node", seed=0)
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
    assert "web view at" in levels["view_node"][1]
    (server,) = map(int, Path(f"/proc/{view.pid}/task/{view.pid}/children").read_text().split())
    os.kill(server, signal.SIGKILL)
    rig.until(lambda: levels["view_node"][0] == DiagnosticStatus.ERROR, what="word of the end")
    pictures.clear()
    rig.until(lambda: len(pictures) > 3, what="pictures without the web view")
    assert view.running and levels["visual_node"][0] == DiagnosticStatus.OK


def test_a_picture_is_drawn_once_for_both(rig):
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
        alone = sight.frame(336, panel=False)
        assert np.shares_memory(alone, sight.frame(336, panel=True))
        assert np.array_equal(to_bgr(message)[:-PANEL_HEIGHT], alone) and alone.shape == (224, 336, 3)
        assert (alone[100] == 90).all() and message.header.frame_id == "front_camera_optical_frame"
        assert sight.frame(168, panel=False).shape == (112, 168, 3)
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
