"""Convert times, poses, velocities and action kinds between ROS messages and plain values."""

from __future__ import annotations

import math

from builtin_interfaces.msg import Time
from geometry_msgs.msg import Quaternion, Twist
from nav_msgs.msg import Odometry

from dsd_msgs.msg import NavAction
from dsd_ros.navigation.actions import ActionKind
from dsd_ros.navigation.controller import Pose, Velocity

ACTION_KINDS = {
    NavAction.STOP: ActionKind.STOP,
    NavAction.FORWARD: ActionKind.FORWARD,
    NavAction.TURN_LEFT: ActionKind.TURN_LEFT,
    NavAction.TURN_RIGHT: ActionKind.TURN_RIGHT,
}


def seconds(stamp: Time) -> float:
    """A stamp in seconds (float64 resolves 0.3 microseconds)."""
    return float(stamp.sec + stamp.nanosec * 1e-9)


def to_stamp(value: float) -> Time:
    """The stamp of a time in seconds, not before 0."""
    nanoseconds = max(0, round(value * 1e9))
    return Time(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def quaternion(yaw: float) -> Quaternion:
    return Quaternion(x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2))


def yaw_of(q: Quaternion) -> float:
    return math.atan2(2.0 * (q.w * q.z + q.x * q.y), 1.0 - 2.0 * (q.y * q.y + q.z * q.z))


def pose_of(odometry: Odometry) -> Pose:
    position = odometry.pose.pose.position
    return Pose(position.x, position.y, yaw_of(odometry.pose.pose.orientation))


def velocity_of(odometry: Odometry) -> Velocity:
    twist = odometry.twist.twist
    return Velocity(math.hypot(twist.linear.x, twist.linear.y), twist.angular.z)


def to_twist(velocity: Velocity) -> Twist:
    message = Twist()
    message.linear.x = float(velocity.vx)
    message.angular.z = float(velocity.wz)
    return message
