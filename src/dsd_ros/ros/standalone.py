"""ROS for programs that are no node of their own, such as benches: a node that spins by itself, a DDS channel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import rclpy
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from rclpy.signals import SignalHandlerOptions

from dsd_ros.ros.dds_channel import DdsChannel


class SpinningNode:
    """A node in a thread of its own; what it listens to is created before :meth:`start`.

    rclpy is started with it and ended with it, and leaves signals to the program.
    """

    def __init__(self, name: str, namespace: str | None = None) -> None:
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
                waitable.destroy()  # rclpy leaves it, and with it the participant's shared memory
        self.node.destroy_node()
        rclpy.shutdown()

    def _spin(self) -> None:
        while not self._stop.is_set():
            self.executor.spin_once(timeout_sec=0.1)


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
