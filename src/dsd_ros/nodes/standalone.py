"""A DDS channel for programs that are no node of their own, such as benches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor

from dsd_ros.nodes.dds_channel import DdsChannel


@contextmanager
def dds_channel(node_name: str, match_timeout: float = 30.0) -> Iterator[DdsChannel]:
    """A channel to the verifier node of this ROS domain, spun by a thread of its own until the block ends.

    :param match_timeout: how long a send waits for a verifier to appear, s.
    """
    context = rclpy.Context()
    rclpy.init(context=context)
    node = rclpy.create_node(node_name, context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            try:
                executor.spin_once(timeout_sec=0.1)
            except ExternalShutdownException:
                return

    thread = threading.Thread(target=spin, name=f"spin {node_name}", daemon=True)
    channel = DdsChannel(node, match_timeout)
    thread.start()
    try:
        yield channel
    finally:
        stop.set()
        thread.join(timeout=1.0)
        channel.close()
        executor.shutdown(timeout_sec=0.3)
        node.destroy_node()
        rclpy.shutdown(context=context)
