# SPDX-License-Identifier: Apache-2.0
"""Publish what a robot base provides, real or simulated: odometry, IMU, frames, camera info, ground truth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import Quaternion, TransformStamped
from nav_msgs.msg import Odometry
from rclpy.node import Node
from sensor_msgs.msg import CameraInfo, Imu
from std_msgs.msg import Bool, ColorRGBA, Float64, Header, String, UInt32
from tf2_msgs.msg import TFMessage
from visualization_msgs.msg import Marker, MarkerArray

from dsd_msgs.srv import CheckArrival
from dsd_ros.robot.driver import RobotState
from dsd_ros.robot.frames import Description, FrameSettings, Placed, Xyz
from dsd_ros.robot.sim.scene import RGB
from dsd_ros.robot.sim.simulator import Simulator, check_arrival
from dsd_ros.robot.sim.world import HEIGHT, World
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import quaternion

# Standard deviations of odometry and IMU, whose covariances are the squares: m, rad, m/s, rad/s, m/s^2.
_POSITION, _TILT, _YAW, _VELOCITY, _ANGULAR_VELOCITY, _ACCELERATION = 0.05, 0.02, 0.05, 0.05, 0.02, 0.2


class BasePublisher:
    """Publishes ``odom``, ``imu``, the robot's frames on ``/tf`` and ``/tf_static``, and ``robot_description``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.frames = FrameSettings()
        self._odometry = node.create_publisher(Odometry, "odom", qos.STATE)
        self._imu = node.create_publisher(Imu, "imu", qos.STATE)
        self._transforms = node.create_publisher(TFMessage, "/tf", qos.TRANSFORMS)
        self._fixed = node.create_publisher(TFMessage, "/tf_static", qos.LATCHED)
        self._description: Any = None

    def describe(self, frames: FrameSettings, placed: tuple[Placed, ...] = (), map_frame: str = "") -> None:
        """Name the frames, and publish the fixed ones and the robot's description.

        :param placed: frames that are elsewhere than the description says, and further ones.
        :param map_frame: publish that it and odom_frame coincide; empty: do not.
        :raises ValueError: for a description that does not fit.
        """
        self.frames = frames
        fixed = [Placed(map_frame, self.frame(frames.odom_frame), (0.0, 0.0, 0.0))] if map_frame else []
        if frames.publish_description:
            description = Description(frames)
            places = {each.child: each for each in (*description.fixed(), *placed)}
            fixed += [
                replace(each, parent=self.frame(each.parent), child=self.frame(each.child)) for each in places.values()
            ]
            if self._description is None:
                self._description = self._node.create_publisher(String, "robot_description", qos.LATCHED)
            self._description.publish(String(data=description.text))
        stamp = self._node.get_clock().now().to_msg()
        if fixed:
            self._fixed.publish(TFMessage(transforms=[_transform(each, stamp) for each in fixed]))

    def frame(self, name: str) -> str:
        """A frame as messages name it."""
        return self.frames.frame_prefix + name

    def publish(self, state: RobotState, stamp: Time) -> None:
        frames = self.frames
        odometry = Odometry(child_frame_id=self.frame(frames.base_frame))
        odometry.header.stamp, odometry.header.frame_id = stamp, self.frame(frames.odom_frame)
        place, linear = odometry.pose.pose.position, odometry.twist.twist.linear
        place.x, place.y, place.z = state.position
        odometry.pose.pose.orientation = _quaternion(state.orientation)
        odometry.pose.covariance = _diagonal(*(_POSITION,) * 3, *(_TILT,) * 2, _YAW)
        linear.x, linear.y, linear.z = state.velocity
        turning = odometry.twist.twist.angular
        turning.x, turning.y, turning.z = *state.gyroscope[:2], state.yaw_rate
        odometry.twist.covariance = _diagonal(*(_VELOCITY,) * 3, *(_ANGULAR_VELOCITY,) * 3)
        self._odometry.publish(odometry)

        imu = Imu(header=Header(stamp=stamp, frame_id=self.frame(frames.imu_frame)))
        imu.orientation = odometry.pose.pose.orientation
        turning, pushing = imu.angular_velocity, imu.linear_acceleration
        turning.x, turning.y, turning.z = state.gyroscope
        pushing.x, pushing.y, pushing.z = state.accelerometer
        imu.orientation_covariance = _diagonal(_TILT, _TILT, _YAW)
        imu.angular_velocity_covariance = _diagonal(*(_ANGULAR_VELOCITY,) * 3)
        imu.linear_acceleration_covariance = _diagonal(*(_ACCELERATION,) * 3)
        self._imu.publish(imu)
        self._transforms.publish(TFMessage(transforms=list(self._base(state, stamp))))

    def _base(self, state: RobotState, stamp: Time) -> Iterator[TransformStamped]:
        """Where the base is."""
        frames, (x, y, z), (w, i, j, k) = self.frames, state.position, state.orientation
        odom, footprint, base = map(self.frame, (frames.odom_frame, frames.footprint_frame, frames.base_frame))
        if not frames.footprint_frame:
            if frames.publish_tf:
                yield _moved(stamp, odom, base, state.position, state.orientation)
            return
        yaw = math.atan2(2 * (w * k + i * j), 1 - 2 * (j * j + k * k))
        c, s = math.cos(yaw / 2), math.sin(yaw / 2)
        if frames.publish_tf:
            yield _moved(stamp, odom, footprint, (x, y, 0.0), (c, 0.0, 0.0, s))
        tilt = (c * w + s * k, c * i + s * j, c * j - s * i, c * k - s * w)  # the rotation that is left without the yaw
        yield _moved(stamp, footprint, base, (0.0, 0.0, z), tilt)


def _moved(stamp: Time, parent: str, child: str, xyz: Xyz, wxyz: tuple[float, ...]) -> TransformStamped:
    transform = TransformStamped(header=Header(stamp=stamp, frame_id=parent), child_frame_id=child)
    offset = transform.transform.translation
    offset.x, offset.y, offset.z = xyz
    transform.transform.rotation = _quaternion(wxyz)
    return transform


def _transform(placed: Placed, stamp: Time) -> TransformStamped:
    cr, cp, cy = (math.cos(angle / 2) for angle in placed.rpy)
    sr, sp, sy = (math.sin(angle / 2) for angle in placed.rpy)
    wxyz = (
        cr * cp * cy + sr * sp * sy,
        sr * cp * cy - cr * sp * sy,
        cr * sp * cy + sr * cp * sy,
        cr * cp * sy - sr * sp * cy,
    )
    return _moved(stamp, placed.parent, placed.child, placed.xyz, wxyz)


def _quaternion(wxyz: Sequence[float]) -> Quaternion:
    w, x, y, z = wxyz
    return Quaternion(x=x, y=y, z=z, w=w)


def _diagonal(*deviations: float) -> list[float]:
    """The covariance matrix of independent values, row by row, from their standard deviations."""
    size = len(deviations)
    return [deviations[i // size] ** 2 if i % (size + 1) == 0 else 0.0 for i in range(size * size)]


class GroundTruthPublisher:
    """Publishes the simulator's ground truth, and serves ``dsd/check_arrival``, which judges a run by it.

    :param frame: of the world, which odometry begins in.
    """

    def __init__(self, node: Node, simulator: Simulator, frame: str) -> None:
        self._node, self._simulator = node, simulator
        self._collisions = -1
        self._collision = node.create_publisher(UInt32, "ground_truth/collisions", qos.LATCHED)
        self._distance = node.create_publisher(Float64, "ground_truth/target_distance", qos.STATE)
        self._reached = node.create_publisher(Bool, "ground_truth/reached", qos.STATE)
        self._world = node.create_publisher(MarkerArray, "ground_truth/markers", qos.LATCHED)
        header = Header(stamp=node.get_clock().now().to_msg(), frame_id=frame)
        self._world.publish(world_markers(simulator.world, header))

        node.create_service(CheckArrival, "dsd/check_arrival", self._on_check)

    def _on_check(self, request: CheckArrival.Request, answer: CheckArrival.Response) -> CheckArrival.Response:
        arrival = check_arrival(self._simulator, request.instruction)
        answer.arrived, answer.distance = arrival.arrived, arrival.distance
        answer.message = arrival.message[:512]
        return answer

    def publish(self) -> None:
        simulator = self._simulator
        self._distance.publish(Float64(data=simulator.distance_to_target()))
        self._reached.publish(Bool(data=simulator.reached()))
        if simulator.collisions != self._collisions:
            self._collisions = simulator.collisions
            self._collision.publish(UInt32(data=self._collisions))
            if self._collisions:
                self._node.get_logger().warning(f"collision number {self._collisions}")


def camera_info(header: Header, width: int, height: int, focal: float) -> CameraInfo:
    """CameraInfo of a centred camera without distortion; ``focal`` in pixels, 0: unknown."""
    info = CameraInfo(header=header, height=height, width=width)
    info.distortion_model, info.d = "plumb_bob", [0.0] * 5
    if focal > 0.0:
        cx, cy = width / 2, height / 2
        info.k = [focal, 0.0, cx, 0.0, focal, cy, 0.0, 0.0, 1.0]
        info.r = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
        info.p = [focal, 0.0, cx, 0.0, 0.0, focal, cy, 0.0, 0.0, 0.0, 1.0, 0.0]
    return info


_FADE_S = 2.5  # lifetime of a fading marker that is not sent again
_Pose = tuple[float, float, float]  # x and y in metres, yaw in radians
_Colour = tuple[float, float, float, float]


def world_markers(world: World, header: Header) -> MarkerArray:
    """A simulated world as markers: namespaces "walls", "furniture", "things" and, if any, "goal"; ids from 0."""
    markers = []

    def solid(name: str, number: int, kind: int, pose: _Pose, size: _Pose, rgba: _Colour, text: str = "") -> None:
        marker = marker_at(header, name, number, kind, pose)
        marker.scale.x, marker.scale.y, marker.scale.z = size
        marker.pose.position.z = size[2] / 2
        marker.color, marker.text = ColorRGBA(r=rgba[0], g=rgba[1], b=rgba[2], a=rgba[3]), text
        markers.append(marker)

    hx, hy = world.half_x, world.half_y
    sides = ((hx, 0.0, 0.1, 2 * hy), (-hx, 0.0, 0.1, 2 * hy), (0.0, hy, 2 * hx, 0.1), (0.0, -hy, 2 * hx, 0.1))
    for number, (x, y, wide, deep) in enumerate(sides):
        solid("walls", number, Marker.CUBE, (x, y, 0.0), (wide, deep, 0.3), (0.7, 0.68, 0.62, 0.5))
    for number, item in enumerate(world.furniture):
        size = (2 * item.half_x, 2 * item.half_y, item.height)
        solid("furniture", number, Marker.CUBE, (item.x, item.y, 0.0), size, (0.45, 0.32, 0.2, 0.9))
    for number, thing in enumerate(world.things):
        size, pose = (2 * thing.radius, 2 * thing.radius, HEIGHT[thing.kind]), (thing.x, thing.y, thing.yaw)
        solid("things", number, Marker.CYLINDER, pose, size, (*RGB[thing.colour], 1.0), thing.name)
    if world.target_index is not None:
        pose = (world.target.x, world.target.y, 0.0)
        solid("goal", 0, Marker.CYLINDER, pose, (0.9, 0.9, 0.02), (0.38, 0.83, 0.50, 0.4), world.goal)
    return MarkerArray(markers=markers)


def marker_at(header: Header, name: str, number: int, kind: int, pose: _Pose, fades: bool = False) -> Marker:
    """A marker on the floor; with ``fades`` it vanishes unless sent again."""
    marker = Marker(header=header, ns=name, id=number, type=kind, action=Marker.ADD)
    marker.pose.position.x, marker.pose.position.y = pose[0], pose[1]
    marker.pose.orientation = quaternion(pose[2])
    if fades:
        marker.lifetime = Duration(sec=int(_FADE_S), nanosec=int(_FADE_S % 1 * 1e9))
    return marker
