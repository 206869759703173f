# SPDX-License-Identifier: Apache-2.0
"""A shipped bag, played as `ros2 bag play --clock` does, drives the real nodes to the recorded replies, and RViz."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from bag_player import BagPlayer
from builtin_interfaces.msg import Duration, Time

from dsd_msgs.srv import Decode
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.replay import history_of
from dsd_ros.observe.bag.run import read_run
from dsd_ros.observe.ros.message_types import message_class
from dsd_ros.paths import config_directory
from dsd_ros.ros import qos

BAGS = Path(__file__).parents[1] / "bags"
OVERLAY = "sensor_msgs/msg/Image"  # drawn by visual_node on the played pictures
EARLY_S = 0.15  # a reply is asked for so much before its picture is due


def rviz_topics() -> dict[str, bool]:
    """What RViz subscribes to with the shipped configuration, and whether it is latched."""
    displays = yaml.safe_load((config_directory() / "dsd.rviz").read_text())["Visualization Manager"]["Displays"]
    topics = [display.get("Topic", display.get("Description Topic")) for display in displays]
    found = {f"/{each['Value'].lstrip('/')}": "Transient" in each["Durability Policy"] for each in topics if each}
    return found | {"/tf": False, "/tf_static": True}


def stamp(at: int) -> Time:
    return Time(sec=at // 10**9, nanosec=at % 10**9)


def test_a_played_bag_gives_the_recorded_replies(rig):
    run = read_run(open_bag(BAGS / "straight"))
    player = BagPlayer(rig.node, BAGS / "straight")
    rig.host("verifier_node", use_sim_time=True)
    rig.host("draft_node", use_sim_time=True)
    rig.host("visual_node", use_sim_time=True)
    heard: dict[str, list[Any]] = {}
    for topic, latched in rviz_topics().items():
        kind = message_class(player.kinds.get(topic, OVERLAY))
        profile = qos.LATCHED if latched else qos.SENSOR
        rig.node.create_subscription(kind, topic, heard.setdefault(topic, []).append, profile)
    assert [topic.rpartition("/")[2] for topic in heard if topic not in player.kinds] == ["image"]
    rig.until_active()
    rig.until_known_to("dsd/decode")
    client = rig.node.create_client(Decode, "dsd/decode")
    rig.until(client.service_is_ready)
    player.rate = 20.0
    player.start()
    try:
        for step in run.steps:
            due = step.stamp - int(EARLY_S * 1e9)
            rig.until(lambda due=due: player.now >= due - int(2e9), what="the bag near a step")
            player.rate = 1.0
            rig.until(lambda due=due: player.now >= due, what="the bag at a step")
            request = Decode.Request(
                instruction=step.instruction, not_before=stamp(step.stamp), timeout=Duration(sec=60)
            )
            history = history_of(run, step)
            request.history_stamps = [stamp(at) for at, _ in history]
            request.history_actions = [action for _, action in history]
            future = client.call_async(request)
            player.rate = 0.3  # pictures come 0.06 s apart: a busy machine must not be late for the one that is meant
            rig.until(lambda due=due: player.now >= due + int(0.5e9), what="the picture of a step")
            player.held = True  # a reply may take longer here than it did there
            rig.until(future.done, what=f"the reply of step {step.number}")
            player.held, player.rate = False, 1.0
            answer = future.result()
            assert answer.success, answer.message
            assert answer.observation_stamp == stamp(step.stamp)
            assert (answer.text, answer.stats.tokens) == (step.text, len(step.tokens))
    finally:
        player.close()
    rig.until(lambda: all(heard.values()), what=f"what RViz shows: {[t for t, got in heard.items() if not got]}")
    assert not any("Traceback" in line for line in rig.lines)
