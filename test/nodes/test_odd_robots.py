# SPDX-License-Identifier: Apache-2.0
"""The navigation node with robots whose odometry or clock is odd, over DDS; a thread plays robot and supervisor."""

from __future__ import annotations

import math
import threading
import time

import pytest
from builtin_interfaces.msg import Duration
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.callback_groups import ReentrantCallbackGroup
from ros_rig import GoalClient
from rosgraph_msgs.msg import Clock

from dsd_msgs.msg import SafetyState
from dsd_msgs.srv import Decode
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import to_stamp

FORWARD, LEFT, STOP = (f"So. Action: {action}" for action in ("forward 50 cm", "turn left 45 degrees", "stop"))


class OddRobot:
    """Slows down with a time constant ``coast`` (s). ``length``: of its orientation. ``clock``: it publishes /clock.

    ``simulated``: the node takes its time from there.
    """

    def __init__(self, rig, coast=0.05, twist=True, length=1.0, clock=False, simulated=False) -> None:
        self.coast, self.twist, self.length, self.clock = coast, twist, length, clock
        self.x = self.yaw = self.vx = self.wz = 0.0
        self.command = (0.0, 0.0)
        self.shift, self.began = 100_000.0, time.monotonic()
        self.script: list[str] = []
        self.asked: list[tuple[float, float]] = []  # speed and turn rate when a picture was asked for
        self.on_tick = lambda: None
        node = self.node = rig.node
        node.create_subscription(Twist, "cmd_vel_dsd", self._on_command, qos.COMMAND)
        node.create_service(Decode, "dsd/decode", self._on_decode, callback_group=ReentrantCallbackGroup())
        self._odometry = node.create_publisher(Odometry, "odom", qos.STATE)
        self._safety = node.create_publisher(SafetyState, "dsd/safety_state", qos.LATCHED)
        self._clock = node.create_publisher(Clock, "/clock", qos.CLOCK) if clock else None
        self.client = GoalClient(rig)
        rig.host("navigation_node", use_sim_time=simulated)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        rig.at_end(self.close)
        rig.until(self.client.ready)
        rig.until_active("navigation_node")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> float:
        if not self.clock:
            return self.node.get_clock().now().nanoseconds * 1e-9
        return time.monotonic() - self.began + self.shift

    def run(self, *script: str, **goal):
        self.script = list(script)
        handle = self.client.send(**{"time_limit": Duration(sec=40)} | goal)
        return self.client.result(handle)()[1]

    def _on_command(self, message: Twist) -> None:
        self.command = (message.linear.x, message.angular.z)

    def _on_decode(self, request, answer):
        self.asked.append((self.vx, self.wz))
        answer.success = answer.verified = True
        answer.text = self.script.pop(0) if self.script else STOP
        answer.observation_stamp = to_stamp(self.now())
        return answer

    def _run(self) -> None:
        dt, tick = 0.02, 0
        while not self._stop.wait(dt):
            slow, fast = min(1.0, dt / self.coast), min(1.0, 10 * dt / self.coast)
            vx, wz = self.command
            self.vx += (vx - self.vx) * (slow if abs(vx) < abs(self.vx) else fast)
            self.wz += (wz - self.wz) * (slow if abs(wz) < abs(self.wz) else fast)
            self.yaw += self.wz * dt
            self.x += self.vx * dt
            self.on_tick()
            if self._clock is not None:
                self._clock.publish(Clock(clock=to_stamp(self.now())))
            message = Odometry()
            message.header.stamp = to_stamp(self.now())
            message.pose.pose.position.x = self.x
            turned = message.pose.pose.orientation
            turned.z, turned.w = self.length * math.sin(self.yaw / 2), self.length * math.cos(self.yaw / 2)
            if self.twist:
                message.twist.twist.linear.x, message.twist.twist.angular.z = self.vx, self.wz
            self._odometry.publish(message)
            if tick % 10 == 0:
                self._safety.publish(SafetyState())
            tick += 1


def test_pictures_are_taken_at_rest_when_the_driver_publishes_no_twist(rig):
    robot = OddRobot(rig, coast=0.5, twist=False)
    result = robot.run(FORWARD, LEFT, FORWARD)
    assert result.outcome == RunOutcome.ARRIVED, result.message
    assert max(vx for vx, _ in robot.asked) < 0.06  # 0.42 when a twist alone is believed
    assert max(abs(wz) for _, wz in robot.asked) < math.radians(5)  # 28


def test_an_orientation_of_length_0_is_no_odometry(rig):
    robot = OddRobot(rig, length=0.0)
    result = robot.run(LEFT)
    assert result.outcome == RunOutcome.ODOMETRY_LOST and "orientation has length 0 instead of 1" in result.message
    assert robot.yaw == 0.0 and not robot.asked


def test_a_clock_that_is_set_while_the_robot_comes_to_rest_only_delays_the_run(rig):
    robot = OddRobot(rig, clock=True, simulated=True)
    moved = threading.Event()

    def on_tick() -> None:
        if robot.command[0] > 0.2:
            moved.set()
        elif robot.command[0] == 0.0 and moved.is_set():  # at once after braking began
            moved.clear()
            robot.shift -= 900.0

    robot.on_tick = on_tick
    began = time.monotonic()
    result = robot.run(FORWARD, FORWARD)
    assert result.outcome == RunOutcome.ARRIVED, result.message
    assert abs(robot.shift) > 1000.0 and time.monotonic() - began < 25.0
    assert robot.x == pytest.approx(1.0, abs=0.25)


def test_simulated_time_that_never_comes_refuses_a_goal(rig):
    robot = OddRobot(rig, simulated=True)
    result = robot.run(LEFT)
    assert result.outcome == RunOutcome.BAD_GOAL and "no time has come on /clock" in result.message
    assert robot.yaw == 0.0
