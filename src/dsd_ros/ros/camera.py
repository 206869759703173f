"""The newest camera picture, and the pictures of recent decodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cachetools import LRUCache
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from sensor_msgs.msg import Image

from dsd_ros.ros import qos
from dsd_ros.ros.stamps import seconds
from dsd_ros.wire.messages import MAX_HISTORY

_SILENT_S = 2.0  # resubscribe after this long without a picture


class Camera:
    """Keeps the newest Image of ``camera/image_raw``, unconverted."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = threading.Condition()
        self._newest: Image | None = None
        self._arrived = float("-inf")
        self.received = 0
        self._subscription = self._subscribe()

    def _subscribe(self) -> Any:
        group, take = MutuallyExclusiveCallbackGroup(), self._on_image
        return self._node.create_subscription(Image, "camera/image_raw", take, qos.CAMERA, callback_group=group)

    @property
    def silence(self) -> float:
        """Seconds since the last picture; infinite before the first."""
        return time.monotonic() - self._arrived

    def fresh(self, not_before: float, timeout: float, cancelled: Callable[[], bool]) -> Image | None:
        """Wait for a picture stamped at or after ``not_before`` (s); None after ``timeout`` s or when cancelled.

        With ``not_before`` 0: a picture that arrived within the last ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not cancelled():
                image, remaining = self._newest, deadline - time.monotonic()
                if image is not None:
                    recent = not_before > 0.0 or self.silence <= timeout
                    if recent and seconds(image.header.stamp) >= not_before:
                        return image
                if remaining <= 0.0:
                    break
                self._changed.wait(min(remaining, 0.1))
        if not cancelled() and self.silence > max(timeout, _SILENT_S):
            # After this process was suspended, or a sender died in mid-picture, a best-effort reader can stay silent
            # for good while all other topics work; a new one recovers.
            deaf, self._subscription = self._subscription, self._subscribe()
            self._node.destroy_subscription(deaf)
        return None

    def _on_image(self, message: Image) -> None:
        with self._changed:
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
