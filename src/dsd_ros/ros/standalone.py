# SPDX-License-Identifier: Apache-2.0
"""ROS for programs that are not nodes, such as benches: a node that spins in a thread, and a DDS channel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import rclpy
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.signals import SignalHandlerOptions

from dsd_ros.ros.dds_channel import DdsChannel
from dsd_ros.ros.transport import use_udp


class SpinningNode:
    """A node that spins in its own thread; create its subscriptions before :meth:`start`.

    rclpy starts and ends with it, and leaves signals to the program.
    """

    def __init__(self, name: str, namespace: str | None = None) -> None:
        use_udp(os.environ)
        rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
        self.node = rclpy.create_node(name, namespace=namespace)
        self.executor = SingleThreadedExecutor()
        self.executor.add_node(self.node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        self.executor.shutdown(timeout_sec=0.2)
        for waitable in list(self.node.waitables):
            if isinstance(waitable, ActionClient):
                waitable.destroy()  # rclpy does not, and the participant would stay
        self.node.destroy_node()
        rclpy.shutdown()

    def _spin(self) -> None:
        while not self._stop.is_set():
            self.executor.spin_once(timeout_sec=0.1)


@contextmanager
def dds_channel(node_name: str, match_timeout: float = 30.0) -> Iterator[DdsChannel]:
    """A channel to the verifier node of this ROS domain, in its own ROS context.

    :param match_timeout: longest wait of a send for a verifier to appear, s.
    """
    use_udp(os.environ)
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
