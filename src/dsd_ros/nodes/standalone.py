"""A DDS channel for programs that are no node of their own, such as benches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import rclpy

from dsd_ros.nodes.dds_channel import DdsChannel


@contextmanager
def dds_channel(node_name: str, match_timeout: float = 30.0) -> Iterator[DdsChannel]:
    """A channel to the verifier node of this ROS domain, in a ROS context of its own.

    :param match_timeout: how long a send waits for a verifier to appear, s.
    """
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node(node_name, context=context)
    channel = DdsChannel(node, match_timeout)
    try:
        yield channel
    finally:
        channel.close()
        node.destroy_node()
        rclpy.shutdown(context=context)
