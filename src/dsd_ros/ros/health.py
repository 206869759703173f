# SPDX-License-Identifier: Apache-2.0
"""A node's status in /diagnostics, published every second and on every change of level, and its heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from std_msgs.msg import String

from dsd_ros.logs import LogLimit
from dsd_ros.navigation.safety.causes import STARTING
from dsd_ros.ros import qos
from dsd_ros.ros.running import steady_timer
from dsd_ros.shown import shown

HEARD = "heard"  # record_node's value: topics whose publishers are all matched, separated by ", "
HEARTBEAT_S = 0.1  # between two heartbeats; /diagnostics is too slow to stop a robot by

OK = DiagnosticStatus.OK
WARN = DiagnosticStatus.WARN
ERROR = DiagnosticStatus.ERROR


class Health:
    """Publishes a node's status. Thread-safe.

    :param heartbeat: also publish the node's name on ``dsd/heartbeat``, from the executor, so that a blocked executor
        silences it.
    """

    def __init__(self, node: Node, hardware: str = "", heartbeat: bool = False) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._lasting = LogLimit()
        self._status = DiagnosticStatus(
            level=DiagnosticStatus.STALE, name=node.get_fully_qualified_name().lstrip("/"), message=STARTING,
            hardware_id=hardware,
        )  # fmt: skip
        self._publisher = node.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._timer = steady_timer(node, 1.0, self.publish, MutuallyExclusiveCallbackGroup())
        if heartbeat:
            self._heart = node.create_publisher(String, "dsd/heartbeat", qos.STATE)
            self._beat = steady_timer(
                node,
                HEARTBEAT_S,
                lambda: self._heart.publish(String(data=node.get_name())),
                MutuallyExclusiveCallbackGroup(),
            )

    @property
    def level(self) -> bytes:
        with self._lock:
            return bytes(self._status.level)

    def report(
        self,
        level: bytes,
        message: str,
        values: Mapping[str, object] | None = None,
        news: bool = False,
        calm: bool = False,
    ) -> None:
        """Set the status. A change of level is published and logged immediately.

        A status other than OK that lasts, or that ``news`` says is new, is logged again, at most once a minute
        unless it is new. ``calm``: what is awaited at a start is logged as information, not as a warning.
        """
        message = shown(message)
        with self._lock:
            changed = level != self._status.level
            self._status.level = level
            self._status.message = message
            self._status.values = [KeyValue(key=key, value=shown(value)) for key, value in (values or {}).items()]
            log = self._lasting.due(now=changed or news) and (changed or level != OK)
        if not log:
            return
        logger = self._node.get_logger()  # rclpy requires a separate call site per severity
        if level == OK or calm:
            logger.info(message)
        elif level == WARN:
            logger.warning(message)
        else:
            logger.error(message)
        if changed:
            self.publish()

    def publish(self) -> None:
        with self._lock:
            array = DiagnosticArray(status=[self._status])
            array.header.stamp = self._node.get_clock().now().to_msg()
            self._publisher.publish(array)
