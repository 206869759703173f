# SPDX-License-Identifier: Apache-2.0
"""Nav2's servers spin, drive_on_heading and navigate_to_pose, as far as a client sees them: a process of its own.

They drive as nav2_behaviors of Jazzy does: at 10 Hz, at constant speed, until the odometry shows the goal, then zero;
abort with TIMEOUT after the time allowance; stop and end at a cancel. Beside them, every node that publishes velocities
in Jazzy's navigation_launch.py, under its name, on its topics, as examples/nav2.yaml sets them.

The topic ``nav2_fault`` sets what is wrong from now on: ok; reject (goals); abort (with COLLISION_AHEAD at once);
silent (no answer to a goal); deaf (goes on in spite of a cancel); still (succeeds without driving).
"""

from __future__ import annotations

import math
import time

import rclpy
from geometry_msgs.msg import Twist
from nav2_msgs.action import DriveOnHeading, NavigateToPose, Spin
from nav_msgs.msg import Odometry
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from std_msgs.msg import String

from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.safety.odometry import checked_pose
from dsd_ros.ros import qos
from dsd_ros.ros.running import ThreadedExecutor
from dsd_ros.ros.stamps import pose_of

_PERIOD_S = 0.1
_COLLISION_AHEAD = {"spin": 703, "drive_on_heading": 723, "navigate_to_pose": 0}
_TIMEOUT = {"spin": 701, "drive_on_heading": 721, "navigate_to_pose": 0}
_SERVERS = {"spin": Spin, "drive_on_heading": DriveOnHeading, "navigate_to_pose": NavigateToPose}
_OTHERS = {  # node -> what it hears, and what it publishes
    "controller_server": ("", "cmd_vel_nav"),
    "velocity_smoother": ("cmd_vel_nav", "cmd_vel_smoothed"),
    "collision_monitor": ("cmd_vel_smoothed", "cmd_vel_dsd"),
    "docking_server": ("", "cmd_vel"),
}
_TURN_RATE, _SPEED = 0.4, 0.3  # rad/s and m/s, where the goal names none


def say(line: str) -> None:
    """Print a line whole: print() writes its end apart, and another thread's line may come between."""
    print(f"{line}\n", end="", flush=True)


class Nav2Standin(Node):
    def __init__(self) -> None:
        super().__init__("behavior_server")
        self._fault = "ok"
        self._pose: Pose | None = None
        self._under_way = 0
        group = ReentrantCallbackGroup()
        self._command = self.create_publisher(Twist, "cmd_vel_nav", qos.COMMAND)
        self._idle = [self.create_publisher(Twist, "cmd_vel_nav", 1) for _ in range(4)]  # each behaviour has its own
        self.create_subscription(Odometry, "odom", self._on_odometry, qos.SENSOR)  # one at a time, for one "ready"
        self.create_subscription(String, "nav2_fault", self._on_fault, qos.STATE, callback_group=group)
        self._servers = [
            ActionServer(
                self, kind, name, lambda goal, name=name: self._execute(name, goal), callback_group=group,
                goal_callback=self._on_goal, cancel_callback=self._on_cancel,
            )
            for name, kind in _SERVERS.items()
        ]  # fmt: skip

    def _on_odometry(self, message: Odometry) -> None:
        if self._pose is None:
            say("ready")
        self._pose = pose_of(message)

    def _on_fault(self, message: String) -> None:
        self._fault = message.data
        say(f"fault: {self._fault}")

    def _on_goal(self, _) -> GoalResponse:
        while self._fault == "silent" and rclpy.ok():
            time.sleep(_PERIOD_S)
        return GoalResponse.REJECT if self._fault == "reject" else GoalResponse.ACCEPT

    def _on_cancel(self, _) -> CancelResponse:
        return CancelResponse.REJECT if self._fault == "deaf" else CancelResponse.ACCEPT

    def _execute(self, name, handle):
        self._under_way += 1
        say(f"{name}: {self._under_way} under way")
        result = _SERVERS[name].Result()
        try:
            result.error_code, end = self._drive(name, handle)
        finally:
            self._command.publish(Twist())  # before the client hears of the end, as Nav2 does
            self._under_way -= 1
        end()
        return result

    def _drive(self, name, handle):
        """Drive until the goal's end; returns the error code, and what sets the goal's state."""
        goal, start = handle.request, self._pose
        assert start is not None
        began, turned, last = time.monotonic(), 0.0, start.yaw
        allowed = math.inf
        if name != "navigate_to_pose":
            allowed = goal.time_allowance.sec + goal.time_allowance.nanosec * 1e-9
        while True:
            pose = self._pose
            turned += math.remainder(pose.yaw - last, math.tau)
            last = pose.yaw
            command = Twist()
            if name == "spin":
                done = abs(turned) >= abs(goal.target_yaw)
                command.angular.z = math.copysign(_TURN_RATE, goal.target_yaw)
            elif name == "drive_on_heading":
                done = math.hypot(pose.x - start.x, pose.y - start.y) >= goal.target.x
                command.linear.x = goal.speed
            else:
                place = goal.pose.pose.position
                q = goal.pose.pose.orientation
                yaw = checked_pose((0.0, 0.0), (q.x, q.y, q.z, q.w)).yaw
                assert goal.pose.header.frame_id and abs(math.remainder(yaw, 7)) < 4
                ahead = (place.x - pose.x) * math.cos(start.yaw) + (place.y - pose.y) * math.sin(start.yaw)
                done = ahead <= 0.02
                command.linear.x = _SPEED
            if handle.is_cancel_requested and self._fault != "deaf":
                return 0, handle.canceled
            if self._fault == "abort" or time.monotonic() - began > allowed:
                return (_COLLISION_AHEAD if self._fault == "abort" else _TIMEOUT)[name], handle.abort
            if done or self._fault == "still":
                return 0, handle.succeed
            self._command.publish(command)
            time.sleep(_PERIOD_S)


def other(name: str) -> Node:
    """A node that hands on what it hears."""
    node = Node(name)
    heard, published = _OTHERS[name]
    publisher = node.create_publisher(Twist, published, 1)
    if heard:
        node.create_subscription(Twist, heard, publisher.publish, 1)
    return node


def main() -> None:
    rclpy.init()
    executor = ThreadedExecutor(8)
    for node in (Nav2Standin(), *map(other, _OTHERS)):
        executor.add_node(node)
    while rclpy.ok():
        executor.spin_once(timeout_sec=0.1)


if __name__ == "__main__":
    main()
