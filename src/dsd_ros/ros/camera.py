# SPDX-License-Identifier: Apache-2.0
"""Which topic the camera's pictures come on; the newest picture; the pictures of recent decodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cachetools import LRUCache
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from rclpy.qos import ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image

from dsd_ros.limits import MAX_HISTORY
from dsd_ros.navigation.run.records import ClockWatch
from dsd_ros.ros import qos
from dsd_ros.ros.images import Picture
from dsd_ros.ros.running import steady_timer
from dsd_ros.ros.settings import CameraSettings
from dsd_ros.ros.stamps import clock_trouble, moment_of, seconds

CAMERA = "camera/image_raw"
LOOK_S = 0.5  # between two looks at which of the camera's topics is published
_SILENT_S = 2.0  # resubscribe after this long without a picture
_CLOCK_ERROR_S = 0.5  # between two machines' clocks, and ticks of a simulated one


class CameraTopic:
    """The camera's topic: raw, or compressed as image_transport names it, below the raw one's resolved name.

    :param transport: raw, compressed, or auto: the one that has a publisher, raw where both have.
    """

    def __init__(self, node: Node, transport: str) -> None:
        self._node, self._auto = node, transport == "auto"
        raw = node.resolve_topic_name(CAMERA)
        self._names = {Image: raw, CompressedImage: node.resolve_topic_name(f"{raw}/compressed")}
        self.kind: type[Picture] = CompressedImage if transport == "compressed" else Image
        # As this package's cameras: a best-effort reader that is replaced amid a picture of many datagrams can hang in
        # Fast DDS 2.14 (`take` reads an empty sample for ever, and holds the interpreter).
        self.profile = qos.CAMERA

    @property
    def name(self) -> str:
        """The topic to subscribe to, with its namespace."""
        return self._names[self.kind]

    @property
    def type_name(self) -> str:
        """Its type, e.g. sensor_msgs/msg/Image."""
        return f"sensor_msgs/msg/{self.kind.__name__}"

    def look(self) -> bool:
        """Whether the topic or its QoS has changed; call this every LOOK_S or so."""
        kinds = self._names if self._auto else [self.kind]
        offers = {kind: self._node.get_publishers_info_by_topic(self._names[kind]) for kind in kinds}
        there = next((kind for kind, publishers in offers.items() if publishers), None)
        if there is None:
            return False
        reliable = all(each.qos_profile.reliability == ReliabilityPolicy.RELIABLE for each in offers[there])
        before = self.kind, self.profile
        self.kind, self.profile = there, qos.CAMERA if reliable else qos.SENSOR
        return before != (self.kind, self.profile)


class Camera:
    """Keeps the newest picture of the camera, unconverted. ``transport`` as for :class:`CameraTopic`."""

    def __init__(self, node: Node, transport: str = CameraSettings.image_transport) -> None:
        self._node = node
        self._topic = CameraTopic(node, transport)
        self._changed = threading.Condition()
        self._newest: Picture | None = None
        self._arrived = float("-inf")
        self._offset = 0.0  # of the newest picture's stamp from the clock when it arrived, s
        self._repeated = False  # it has the stamp of the picture before
        self._clock = ClockWatch(moment_of(node))
        self._jumps = 0.0  # by how much the clock was set back in all, s, negative
        self.received = 0
        self._subscription: Any = None
        self._subscribe()
        steady_timer(node, LOOK_S, self._look, MutuallyExclusiveCallbackGroup())

    def _subscribe(self) -> None:
        """Subscribe, in place of the present subscription."""
        group, topic = MutuallyExclusiveCallbackGroup(), self._topic
        with self._changed:
            old = self._subscription
            self._subscription = self._node.create_subscription(
                topic.kind, topic.name, self._on_image, topic.profile, callback_group=group
            )
            if old is not None:
                self._node.destroy_subscription(old)

    def _look(self) -> None:
        if self._topic.look():
            self._node.get_logger().info(f"pictures come from {self._topic.name}")
            self._subscribe()

    @property
    def silence(self) -> float:
        """Seconds since the last picture; infinite before the first."""
        return time.monotonic() - self._arrived

    def fresh(self, not_before: float, timeout: float, cancelled: Callable[[], bool]) -> Picture | None:
        """Wait for a picture stamped at or after ``not_before`` (s); None after ``timeout`` s or when cancelled.

        With ``not_before`` 0: a picture that arrived within the last ``timeout`` seconds. When the clock is set back
        meanwhile, ``not_before`` moves with it. A picture from the future does not count: its clock is another one.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self._now()
            before = self._jumps
            while not cancelled():
                now, remaining = self._now(), deadline - time.monotonic()
                image, least = self._newest, not_before + self._jumps - before
                if image is not None and not_before <= 0.0:
                    if self.silence <= timeout:
                        return image
                elif image is not None and least <= seconds(image.header.stamp) <= now - self.silence + _CLOCK_ERROR_S:
                    return image
                if remaining <= 0.0:
                    break
                self._changed.wait(min(remaining, 0.1))
        if not cancelled() and self.silence > max(timeout, _SILENT_S):
            # After this process was suspended, or a sender died in mid-picture, a best-effort reader can stay silent
            # for good while all other topics work; a new one recovers.
            self._subscribe()
        return None

    def complaint(self, not_before: float, waited: float) -> str:
        """Why :meth:`fresh` found no picture within ``waited`` s."""
        clock = "let the camera, this node and its callers use the same clock (NTP, or use_sim_time for all)."
        with self._changed:
            now, offset, image, silence = self._now(), self._offset, self._newest, min(self.silence, 9999.0)
        if trouble := clock_trouble(self._node):
            return trouble
        if image is None or silence > max(waited, _CLOCK_ERROR_S) or not_before <= 0.0:
            pass
        elif not seconds(image.header.stamp):
            return (
                f"The camera's pictures have no time (stamp 0, {now:.1f} s behind this node's clock), so none is known "
                "to be fresh: have the camera's driver stamp them."
            )
        elif self._repeated:
            return f"The camera repeats a picture stamped {now - seconds(image.header.stamp):.1f} s ago: restart it."
        elif abs(offset) > _CLOCK_ERROR_S:
            way = "ahead of" if offset > 0.0 else "behind"
            return f"The camera's pictures are stamped {abs(offset):.1f} s {way} this node's clock: {clock}"
        elif not_before > now + _CLOCK_ERROR_S:
            return f"The request wants a picture of {not_before - now:.1f} s ahead of this node's clock: {clock}"
        return f"No fresh picture came from the camera within {waited:.1f} s; the last one came {silence:.1f} s ago."

    def _now(self) -> float:
        """The node's time; forgets the picture when the clock was set back: its stamp is from the future now."""
        moment = moment_of(self._node)
        jump = self._clock.jump(moment)
        if jump < 0.0:
            self._newest, self._jumps = None, self._jumps + jump
        return moment.stamp

    def _on_image(self, message: Picture) -> None:
        with self._changed:
            now, stamp = self._now(), message.header.stamp
            self._offset = seconds(stamp) - now
            self._repeated = self._newest is not None and self._newest.header.stamp == stamp
            self._newest = message
            self._arrived = time.monotonic()
            self.received += 1
            self._changed.notify_all()


KEPT_FRAMES = 4 * MAX_HISTORY  # some decodes never lead to an action
KEPT_BYTES = 256 << 20

Stamp = tuple[int, int]  # seconds and nanoseconds


class RecentFrames:
    """Pictures of recent decodes by stamp, bounded in number and bytes: a prompt's history. Not thread-safe."""

    def __init__(self, count: int = KEPT_FRAMES, size: int = KEPT_BYTES) -> None:
        # Each picture counts as at least a fair share of the size, which also bounds the number.
        self._kept: LRUCache[Stamp, np.ndarray] = LRUCache(size, lambda image: max(image.nbytes, size // count))

    def remember(self, stamp: Stamp, image: np.ndarray) -> None:
        """Keep a picture, RGB uint8 (height, width, 3), evicting the least recently used."""
        if image.nbytes <= self._kept.maxsize:
            self._kept[stamp] = image

    def history(self, stamps: Sequence[Stamp], actions: Sequence[str], most: int) -> list[tuple[np.ndarray, str]]:
        """The last ``most`` steps whose pictures are still kept, oldest first, with their actions."""
        if most < 1:
            return []
        steps = [
            (image, action)
            for stamp, action in zip(stamps, actions, strict=True)
            if (image := self._kept.get(stamp)) is not None
        ]
        return steps[-most:]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
