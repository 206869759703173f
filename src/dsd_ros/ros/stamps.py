# SPDX-License-Identifier: Apache-2.0
"""Convert times, durations, poses and velocities between ROS messages and plain values."""

from __future__ import annotations

import math
import time

from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import Quaternion, Twist, TwistStamped
from nav_msgs.msg import Odometry
from rclpy.clock import ROSClock
from rclpy.node import Node

from dsd_ros.navigation.run.controller import Pose, Velocity
from dsd_ros.navigation.run.records import Moment
from dsd_ros.navigation.safety.odometry import checked_pose, checked_twist

_LONGEST_S = 2.0**31 - 1.0  # of a Duration, about 68 years


def seconds(value: Time | Duration) -> float:
    """A stamp or duration in seconds (float64 resolves 0.3 microseconds of today's stamps)."""
    return float(value.sec + value.nanosec * 1e-9)


def to_stamp(value: float) -> Time:
    """The stamp of a time in seconds, not before 0."""
    nanoseconds = max(0, round(value * 1e9))
    return Time(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def to_duration(value: float) -> Duration:
    """A duration of so many seconds, negative ones too."""
    nanoseconds = round(max(-_LONGEST_S, min(value, _LONGEST_S)) * 1e9)
    return Duration(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def quaternion(yaw: float) -> Quaternion:
    return Quaternion(x=0.0, y=0.0, z=math.sin(yaw / 2), w=math.cos(yaw / 2))


def pose_of(odometry: Odometry) -> Pose:
    """The robot's pose; OdometryError if the message holds no valid one."""
    place, q = odometry.pose.pose.position, odometry.pose.pose.orientation
    return checked_pose((place.x, place.y), (q.x, q.y, q.z, q.w))


def velocity_of(odometry: Odometry) -> Velocity:
    """The twist, its speed without direction; OdometryError if it is not valid."""
    twist = odometry.twist.twist
    return checked_twist(twist.linear.x, twist.linear.y, twist.angular.z)


def moment_of(node: Node) -> Moment:
    """Now, by the steady clock and by the node's."""
    return Moment(time.monotonic(), node.get_clock().now().nanoseconds * 1e-9)


def clock_trouble(node: Node) -> str:
    """Why the node has no time yet; empty when it has."""
    clock = node.get_clock()
    if not isinstance(clock, ROSClock) or not clock.ros_time_is_active or clock.now().nanoseconds:
        return ""
    return "use_sim_time is set, and no time has come on /clock: start the simulator, or set use_sim_time to false."


def to_twist(velocity: Velocity) -> Twist:
    message = Twist()
    message.linear.x = float(velocity.vx)
    message.angular.z = float(velocity.wz)
    return message


def command_type(stamped: bool) -> type[Twist | TwistStamped]:
    """The type of velocity commands (``enable_stamped_cmd_vel``)."""
    chosen: type[Twist | TwistStamped] = TwistStamped if stamped else Twist
    return chosen


def command_message(twist: Twist, node: Node, stamped: bool, frame: str = "") -> Twist | TwistStamped:
    """A velocity command as it is published; a stamp is the node's time."""
    if not stamped:
        return twist
    message = TwistStamped(twist=twist)
    message.header.stamp, message.header.frame_id = node.get_clock().now().to_msg(), frame
    return message


def twist_of(command: Twist | TwistStamped) -> Twist:
    """The velocities of a command. Its age runs from its arrival, by a steady clock; its stamp does not count."""
    return command.twist if isinstance(command, TwistStamped) else command
