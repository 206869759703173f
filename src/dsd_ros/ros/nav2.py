# SPDX-License-Identifier: Apache-2.0
"""Motions of a run as goals of Nav2's action servers."""

from __future__ import annotations

import math
import threading
from typing import Any

from action_msgs.msg import GoalStatus
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Point
from rclpy.action import ActionClient
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.task import Future
from std_msgs.msg import Bool

from dsd_ros.navigation.run.executor import GoalEnd, GoalExecutor, MotionGoal, Nav2Settings, Order
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import quaternion

_GOAL_ENDS = {
    GoalStatus.STATUS_SUCCEEDED: GoalEnd.SUCCEEDED,
    GoalStatus.STATUS_CANCELED: GoalEnd.CANCELLED,
    GoalStatus.STATUS_ABORTED: GoalEnd.FAILED,
}


class Nav2:
    """Action clients of Nav2's servers, which carry out what ``executor`` hands out.

    :meth:`carry_out` may be called in callbacks of ``group`` only: rclpy's ActionClient loses an answer that another
    thread takes before the asking one has noted the request. ``frame``: the odometry's.
    """

    def __init__(self, node: Node, settings: Nav2Settings, group: CallbackGroup, changed: threading.Condition) -> None:
        try:
            from nav2_msgs.action import DriveOnHeading, NavigateToPose, Spin
        except ImportError as error:
            raise ValueError(
                f"executor is nav2, and Nav2's messages cannot be imported ({error}): install nav2_msgs "
                "(apt-get install ros-$ROS_DISTRO-nav2-msgs) and source it, or set executor to own."
            ) from None
        self._kinds = {"spin": Spin, "drive_on_heading": DriveOnHeading, "navigate_to_pose": NavigateToPose}
        self.executor = GoalExecutor()
        self.frame = "odom"
        self._node, self._forward, self._changed = node, settings.forward, changed
        self._clients = {
            name: ActionClient(node, self._kinds[name], name, callback_group=group)
            for name in dict.fromkeys(("spin", settings.forward, "navigate_to_pose"))
        }
        self._alarm = node.create_publisher(Bool, "emergency_stop", qos.STATE)
        self._handle: Any = None  # of the goal that Nav2 has accepted
        self._asked = True  # for its result

    def carry_out(self) -> None:
        """Send what is due: a goal, the request for its result, its cancel, or an emergency stop."""
        executor = self.executor
        if executor.take_alarm():
            self._node.get_logger().error(f"{executor.lost} The robot is stopped until emergency_stop_reset.")
            self._alarm.publish(Bool(data=True))
        if executor.goal is None:
            return
        number, client = executor.number, self._clients[executor.goal.server(self._forward)]
        order = executor.take_order(client.server_is_ready())
        if order is Order.SEND:
            future = client.send_goal_async(self._message(executor.goal))
            future.add_done_callback(lambda done: self._on_answer(number, done))
        if self._handle is not None and not self._asked:
            self._asked = True
            self._handle.get_result_async().add_done_callback(lambda done: self._on_result(number, done))
        if order is Order.CANCEL and self._handle is not None:
            self._handle.cancel_goal_async()

    def destroy(self) -> None:
        for client in self._clients.values():
            client.destroy()

    def _message(self, goal: MotionGoal) -> Any:
        allowed = Duration(sec=math.ceil(goal.time_allowance))
        name = goal.server(self._forward)
        message = self._kinds[name].Goal()
        if name == "spin":
            message.target_yaw, message.time_allowance = goal.amount, allowed
        elif name == "drive_on_heading":
            message.target, message.speed, message.time_allowance = Point(x=goal.amount), goal.speed, allowed
        else:
            message.pose.header.frame_id = self.frame  # no stamp: the newest transform to the map
            message.pose.pose.position = Point(x=goal.target.x, y=goal.target.y)
            message.pose.pose.orientation = quaternion(goal.target.yaw)
        return message

    def _on_answer(self, number: int, future: Future) -> None:
        with self._changed:
            handle = future.result()
            if number != self.executor.number or handle is None:
                return
            self._handle, self._asked = (handle, False) if handle.accepted else (None, True)
            self.executor.on_answer(number, handle.accepted)

    def _on_result(self, number: int, future: Future) -> None:
        with self._changed:
            answer = future.result()
            if answer is None:
                return  # the time-out will notice
            end, why = _GOAL_ENDS.get(answer.status, GoalEnd.FAILED), ""
            if end is GoalEnd.FAILED:  # Humble's results have no error code, and a navigator may leave it 0
                code, said = getattr(answer.result, "error_code", 0), getattr(answer.result, "error_msg", "")
                why = f"Nav2 aborted the goal (error {code}{': ' if said else ''}{said[:200]})"
                self._node.get_logger().warning(why)
            self.executor.on_result(number, end, why)
