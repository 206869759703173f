# SPDX-License-Identifier: Apache-2.0
"""Plays a bag as `ros2 bag play --clock` does: recorded bytes at recorded times, with the recorded QoS, and a clock."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import yaml
from builtin_interfaces.msg import Time
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rosgraph_msgs.msg import Clock

from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.ros.message_types import message_class
from dsd_ros.ros import qos

_CLOCK_S = 0.025  # rosbag2's 40 Hz


class BagPlayer:
    """``rate`` and ``held`` are rosbag2's set_rate and pause, and may change while it plays."""

    def __init__(self, node: Node, folder: Path) -> None:
        self._bag = open_bag(folder)
        self._clock = node.create_publisher(Clock, "/clock", qos.CLOCK)
        about = yaml.safe_load((folder / "metadata.yaml").read_text())["rosbag2_bagfile_information"]
        self._now = self._start = about["starting_time"]["nanoseconds_since_epoch"]
        self.kinds: dict[str, str] = {}
        self._publishers: dict[str, Any] = {}
        for each in about["topics_with_message_count"]:
            topic = each["topic_metadata"]
            self.kinds[topic["name"]] = topic["type"]
            self._publishers[topic["name"]] = node.create_publisher(
                message_class(topic["type"]), topic["name"], _profile(topic["offered_qos_profiles"])
            )
        self.rate = 1.0
        self.held = False
        self.ended = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="player", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def now(self) -> int:
        """The clock, ns."""
        return self._now

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        ticked = float("-inf")
        since = time.monotonic()
        for record in sorted(self._bag.messages(), key=lambda record: record.at):
            while not self._stop.is_set():
                steady = time.monotonic()
                if not self.held:
                    self._now = min(record.at, self._now + int((steady - since) * 1e9 * self.rate))
                since = steady
                if steady - ticked >= _CLOCK_S:
                    ticked = steady
                    self._clock.publish(Clock(clock=Time(sec=self._now // 10**9, nanosec=self._now % 10**9)))
                if self._now >= record.at and not self.held:
                    break
                time.sleep(min(0.002, (record.at - self._now) * 1e-9 / self.rate) if not self.held else 0.002)
            if self._stop.is_set():
                return
            self._publishers[record.topic].publish(bytes(record.data))
        self.ended.set()


def _profile(offered: list[dict[str, Any]]) -> QoSProfile:
    """As rosbag2 adapts its offer to the recorded ones: best effort or volatile unless all were more."""
    return QoSProfile(
        depth=max([10, *(each["depth"] for each in offered)]),
        reliability=ReliabilityPolicy.BEST_EFFORT
        if any(each["reliability"] == "best_effort" for each in offered)
        else ReliabilityPolicy.RELIABLE,
        durability=DurabilityPolicy.TRANSIENT_LOCAL
        if offered and all(each["durability"] == "transient_local" for each in offered)
        else DurabilityPolicy.VOLATILE,
    )
