# SPDX-License-Identifier: Apache-2.0
"""Distance to the nearest obstacle ahead, from a range finder, laser scan or depth camera."""

from __future__ import annotations

import math
from collections.abc import Callable

from rclpy.node import Node
from sensor_msgs.msg import CameraInfo, Image, LaserScan, Range

from dsd_ros.navigation.safety.causes import DepthView, Requirements, nearest_ahead, range_reading
from dsd_ros.navigation.safety.depth import DepthCorridor, DepthError, Intrinsics, read_depth
from dsd_ros.ros import qos
from dsd_ros.ros.settings import SupervisorNodeSettings
from dsd_ros.ros.stamps import seconds

_CONE = math.radians(40.0)  # width of the sector of a scan that counts as ahead

# Takes metres (infinite: nothing ahead; None: unknown) and a stamp in seconds, or None.
OnDistance = Callable[[float | None, float | None], None]


def subscribe_obstacle_sensor(
    node: Node, required: Requirements, settings: Callable[[], SupervisorNodeSettings], on_distance: OnDistance
) -> None:
    """Subscribe to the sensor that ``required.obstacle`` names, and report every distance.

    :param settings: returns the present ones, for ``limit`` and ``depth``.
    """
    if required.obstacle == "range":

        def on_range(message: Range) -> None:
            on_distance(range_reading(message.range, message.min_range, message.max_range), None)

        node.create_subscription(Range, "range", on_range, qos.SENSOR)
    elif required.obstacle == "scan":

        def on_scan(scan: LaserScan) -> None:
            limits_m = scan.range_min, scan.range_max
            on_distance(nearest_ahead(scan.ranges, scan.angle_min, scan.angle_increment, *limits_m, _CONE), None)

        node.create_subscription(LaserScan, "scan", on_scan, qos.SENSOR)
    elif required.obstacle == "depth":
        camera = _DepthCamera(node, settings, on_distance)
        node.create_subscription(CameraInfo, "depth/camera_info", camera.on_info, qos.SENSOR)
        node.create_subscription(Image, "depth/image_raw", camera.on_image, qos.SENSOR)


class _DepthCamera:
    """Reports nothing until the camera's info has arrived."""

    def __init__(self, node: Node, settings: Callable[[], SupervisorNodeSettings], on_distance: OnDistance) -> None:
        self._node, self._settings, self._on_distance = node, settings, on_distance
        self._made_for: tuple[DepthView, float] | None = None
        self._corridor: DepthCorridor | None = None

    def on_info(self, message: CameraInfo) -> None:
        k = message.k
        camera = Intrinsics(k[0], k[4], k[2], k[5], message.width, message.height)
        wanted = self._settings().depth, 2.0 * self._settings().limit.obstacle_distance
        if self._corridor is not None and self._corridor.camera == camera and self._made_for == wanted:
            return
        self._corridor, self._made_for = None, wanted
        try:
            self._corridor = DepthCorridor(wanted[0], camera, wanted[1])
        except DepthError as error:
            self._warn(error)
            return
        if self._corridor.blind:
            self._warn("The depth camera does not see the way ahead: check depth.camera_height and camera_pitch.")

    def on_image(self, message: Image) -> None:
        if self._corridor is None:
            return
        try:
            shape, order = (message.height, message.width, message.step), bool(message.is_bigendian)
            depths = read_depth(memoryview(message.data), message.encoding, *shape, order)
            distance = self._corridor.nearest(depths)
        except DepthError as error:
            self._warn(error)
            return
        self._on_distance(distance, seconds(message.header.stamp))

    def _warn(self, what: object) -> None:
        self._node.get_logger().warning(str(what), throttle_duration_sec=5.0)
