"""Distance to the nearest obstacle ahead, from a range finder, laser scan or depth camera."""

from __future__ import annotations

import math
from collections.abc import Callable

from rclpy.node import Node
from sensor_msgs.msg import CameraInfo, Image, LaserScan, Range

from dsd_ros.navigation.depth import DepthCorridor, DepthError, DepthView, Intrinsics, read_depth
from dsd_ros.navigation.safety import Requirements, SafetyLimits, nearest_ahead, range_reading
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import seconds

# Takes metres (infinite: nothing ahead; None: unknown) and a stamp in seconds, or None.
OnDistance = Callable[[float | None, float | None], None]


def subscribe_obstacle_sensor(
    node: Node, required: Requirements, limits: SafetyLimits, view: DepthView, on_distance: OnDistance
) -> None:
    """Subscribe to the sensor that ``required.obstacle`` names, and report every distance."""
    if required.obstacle == "range":

        def on_range(message: Range) -> None:
            on_distance(range_reading(message.range, message.min_range, message.max_range), None)

        node.create_subscription(Range, "range", on_range, qos.SENSOR)
    elif required.obstacle == "scan":

        def on_scan(scan: LaserScan) -> None:
            cone, limits_m = math.radians(limits.obstacle_cone_deg), (scan.range_min, scan.range_max)
            on_distance(nearest_ahead(scan.ranges, scan.angle_min, scan.angle_increment, *limits_m, cone), None)

        node.create_subscription(LaserScan, "scan", on_scan, qos.SENSOR)
    elif required.obstacle == "depth":
        camera = _DepthCamera(node, limits, view, on_distance)
        node.create_subscription(CameraInfo, "depth/camera_info", camera.on_info, qos.SENSOR)
        node.create_subscription(Image, "depth/image_raw", camera.on_image, qos.CAMERA)


class _DepthCamera:
    """Reports nothing until the camera's info has arrived."""

    def __init__(self, node: Node, limits: SafetyLimits, view: DepthView, on_distance: OnDistance) -> None:
        self._node, self._limits, self._view = node, limits, view
        self._on_distance = on_distance
        self._corridor: DepthCorridor | None = None

    def on_info(self, message: CameraInfo) -> None:
        k = message.k
        camera = Intrinsics(k[0], k[4], k[2], k[5], message.width, message.height)
        if self._corridor is not None and self._corridor.camera == camera:
            return
        self._corridor = None
        try:
            self._corridor = DepthCorridor(self._view, camera, 2.0 * self._limits.obstacle_distance)
        except DepthError as error:
            self._warn(error)
            return
        if self._corridor.blind:
            self._warn("The depth camera does not see the way ahead: check depth.camera_height and camera_pitch_deg.")

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
