# SPDX-License-Identifier: Apache-2.0
"""Topics of large messages take no room before a message comes."""

from __future__ import annotations

import os
from pathlib import Path

import rclpy

from dsd_ros.ros.dds_channel import AGGREGATION, DECODING, DdsChannel

_MOST_BYTES = 1 << 30  # of address space; a Jetson has 8 GB, and a fork needs room for all of it


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_a_link_sets_no_large_memory_aside(ros_domain):
    rclpy.init()
    node = rclpy.create_node("link")
    before = _address_space()
    links = [DdsChannel(node, topics=topics) for topics in (DECODING, AGGREGATION)]
    taken = _address_space() - before
    for link in links:
        link.close()
    node.destroy_node()
    rclpy.shutdown()
    assert taken < _MOST_BYTES
