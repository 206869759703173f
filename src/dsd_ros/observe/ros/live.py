# SPDX-License-Identifier: Apache-2.0
"""Collect what the views show from the topics of a running system."""

from __future__ import annotations

import contextlib
import struct
import time

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.serialization import deserialize_message

from dsd_msgs.msg import DecodeStats, MemoryAnswer, NavAction, ReplyProgress, SafetyState
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.observe.view.run_state import LINK_NODES, NAVIGATION, RunState
from dsd_ros.ros import qos
from dsd_ros.ros.camera import LOOK_S, CameraTopic
from dsd_ros.ros.images import RawImage, read_image, read_pose
from dsd_ros.ros.polled import Polled, take, take_raw
from dsd_ros.ros.settings import CameraSettings

_HEARD_NAMES = tuple(name.encode() for name in (*LINK_NODES, NAVIGATION))
_POLL_S = 0.19  # minimum interval between two polls of everything but pictures; people read no faster
_DEAF_S = 3.0  # resubscribe to a camera that is silent for this long


class Live(RunState):
    """The current state of the robot in the node's namespace. Call :meth:`poll` for every frame drawn.

    :param image_transport: raw, compressed or auto, as for CameraTopic.
    """

    def __init__(self, node: Node, image_transport: str = CameraSettings.image_transport) -> None:
        super().__init__(node.get_namespace())
        self._subscriptions = subscriptions = Polled(node)
        # Best effort: acknowledging odometry would wake both sides 50 times a second.
        self._odometry = subscriptions.subscribe(Odometry, "odom", qos.SENSOR)
        self._health = subscriptions.subscribe(DiagnosticArray, "/diagnostics", qos.STATE)
        self._rest = [
            (subscriptions.subscribe(kind, topic, profile), on_message)
            for kind, topic, profile, on_message in (
                (MemoryAnswer, "dsd/memory_answer", qos.LATCHED, self.on_memory),
                (ReplyProgress, "dsd/reply_progress", qos.PROPOSALS, self.on_progress),
                (DecodeStats, "dsd/decode_stats", qos.STATE, self.on_stats),
                (NavAction, "dsd/nav_action", qos.STATE, self.on_action),
                (SafetyState, "dsd/safety_state", qos.LATCHED, self.on_safety),
            )
        ]
        self._topic, self._looked = CameraTopic(node, image_transport), float("-inf")
        self._camera: object = None
        self._polled = float("-inf")
        self._saw = 0.0  # when the last picture arrived, monotonic s
        self.frame = "odom"  # frame_id of the odometry
        self.heard = 0.0  # when anything came last, monotonic s

    def close(self) -> None:
        self._subscriptions.close()

    def poll(self) -> None:
        """Process the messages since the last call, at most every _POLL_S."""
        now = time.monotonic()
        if now - self._polled < _POLL_S:
            return
        self._polled = now
        for sent in take_raw(self._odometry):
            self.heard = now
            with contextlib.suppress(struct.error, RuntimeError, OdometryError):  # damaged
                self.pose, self.frame = read_pose(sent)
                self.walk.add(self.pose)
        for subscription, on_message in self._rest:
            for message in take(subscription):
                on_message(message)
        for sent in take_raw(self._health):
            if any(name in sent for name in _HEARD_NAMES):  # most are from other nodes
                self.heard = now
                with contextlib.suppress(RuntimeError):  # damaged
                    self.on_health(deserialize_message(sent, DiagnosticArray), now)
        self.show_link(now)

    def picture(self) -> RawImage | None:
        """The newest picture since the last call, if any. Subscribes to the camera on the first call."""
        now = time.monotonic()
        other = False
        if now - self._looked >= LOOK_S:
            self._looked, other = now, self._topic.look()
        if self._camera is not None and (other or now - self._saw > _DEAF_S):
            self.rest_camera()  # a best-effort reader can stall when a sender dies in mid-picture
        if self._camera is None:
            self._camera = self._subscriptions.subscribe(self._topic.kind, self._topic.name, self._topic.profile)
            self._saw = now
        pictures = take_raw(self._camera)
        if not pictures:
            return None
        self._saw = self.heard = now
        return read_image(pictures[-1], self._topic.kind)

    def rest_camera(self) -> None:
        """Unsubscribe from the camera until the next call of :meth:`picture`."""
        if self._camera is not None:
            self._subscriptions.unsubscribe(self._camera)
            self._camera = None
