# SPDX-License-Identifier: Apache-2.0
"""Where points of the camera's pictures are, by its info and, where one shows the same, the depth picture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node
from sensor_msgs.msg import CameraInfo, Image

from dsd_ros.navigation.run.actions import Point
from dsd_ros.navigation.run.points import PointUnknown, locate
from dsd_ros.navigation.run.settings import PointSettings
from dsd_ros.navigation.safety.depth import DepthError, Intrinsics, read_depth
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import seconds

_KEPT = 256  # depth pictures: those of the last seconds
_COLUMNS = 160  # of each that is kept
_SAME_S = 0.05  # between the stamps of a picture and of its depths


class PointFinder:
    """See the module. ``settings``: returns the present ones."""

    def __init__(self, node: Node, settings: Callable[[], PointSettings]) -> None:
        self._node, self._settings = node, settings
        self._camera: Intrinsics | None = None
        self._depths: deque[tuple[float, np.ndarray]] = deque(maxlen=_KEPT)
        group = MutuallyExclusiveCallbackGroup()
        node.create_subscription(CameraInfo, "camera/camera_info", self._on_info, qos.SENSOR, callback_group=group)
        if settings().depth:
            node.create_subscription(Image, "depth/image_raw", self._on_depth, qos.SENSOR, callback_group=group)

    def locate(self, point: Point, picture: Point, stamp: float) -> tuple[float, float]:
        """Metres and radians to the left of a point in the picture of this stamp. PointUnknown."""
        if self._camera is None:
            raise PointUnknown(f"where the point {point} is cannot be told without camera/camera_info.")
        then = min(self._depths.copy(), key=lambda each: abs(each[0] - stamp), default=None)
        depths = then[1] if then is not None and abs(then[0] - stamp) <= _SAME_S else None
        return locate(point, picture, self._camera, self._settings(), depths)

    def _on_info(self, message: CameraInfo) -> None:
        k = message.k
        self._camera = Intrinsics(k[0], k[4], k[2], k[5], message.width, message.height)

    def _on_depth(self, message: Image) -> None:
        try:
            shape, order = (message.height, message.width, message.step), bool(message.is_bigendian)
            depths = read_depth(memoryview(message.data), message.encoding, *shape, order)
        except DepthError as error:
            self._node.get_logger().warning(str(error), throttle_duration_sec=5.0)
            return
        stride = max(1, message.width // _COLUMNS)
        self._depths.append((seconds(message.header.stamp), depths[::stride, ::stride].copy()))
