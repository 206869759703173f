# SPDX-License-Identifier: Apache-2.0
"""The presets for other software on the robot (stack:=...), each against a stand-in of that software."""

from __future__ import annotations

import math
import sys
import threading
import time
from pathlib import Path

import pytest
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from ros_rig import GoalClient
from unitree_go.msg import WirelessController

from dsd_msgs.msg import SafetyState
from dsd_ros.bringup.systems import DEMO_INSTRUCTION, DEMO_SEED, plan
from dsd_ros.navigation.safety.causes import Cause, Source
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import pose_of

ROOT = Path(__file__).resolve().parents[2]


class Teleop:
    """teleop_twist_joy's node: it repeats the stick's position, also while that rests."""

    def __init__(self, rig, topic: str) -> None:
        self.stick = Twist()
        self._publisher = rig.node.create_publisher(Twist, topic, 10)
        self._stop = threading.Event()
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        rig.at_end(lambda: (self._stop.set(), thread.join()))

    def push(self, vx: float = 0.0, wz: float = 0.0) -> None:
        self.stick = Twist()
        self.stick.linear.x, self.stick.angular.z = vx, wz

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._publisher.publish(self.stick)


class Robot:
    """A system with a preset, and what it says."""

    def __init__(self, rig, stack: str) -> None:
        self.rig = rig
        self.poses: list[tuple[float, float, float]] = []
        self.safety: list[SafetyState] = []
        rig.node.create_subscription(Odometry, "odom", self._on_odometry, qos.SENSOR)
        rig.node.create_subscription(SafetyState, "dsd/safety_state", self.safety.append, qos.LATCHED)
        self.client = GoalClient(rig)
        example = {"stack": stack, "speed": "0.4", "transport": "dds"}  # examples/*.launch.py
        for start in (*plan("robot", example), *plan("verifier")):
            rig.group.start_planned(start)

    def _on_odometry(self, message: Odometry) -> None:
        pose = pose_of(message)
        self.poses.append((pose.x, pose.y, pose.yaw))

    def until_ready(self) -> None:
        self.rig.until_active()
        self.rig.until(lambda: self.client.ready() and self.poses)
        free = {Cause.NO_ACTION}
        self.rig.until(lambda: self.safety and set(self.safety[-1].causes) <= free, what="the supervisor content")

    def moved_from(self, pose) -> bool:
        x, y, yaw = self.poses[-1]
        turned = abs(math.remainder(yaw - pose[2], math.tau))
        return math.hypot(x - pose[0], y - pose[1]) > 0.05 or turned > math.radians(5)

    def stands(self) -> bool:
        before = self.poses[-1]
        count = len(self.poses)
        self.rig.until(lambda: len(self.poses) > count + 8)
        return self.poses[-1] == pytest.approx(before, abs=1e-3)

    def source(self) -> Source:
        return Source(self.safety[-1].source)


def test_beside_go2_ros2_sdk_the_robot_drives_stops_and_obeys_the_joystick(rig):
    pytest.importorskip("go2_interfaces", reason="go2_ros2_sdk's messages are not built")
    moves: list[Twist] = []
    rig.node.create_subscription(Twist, "standin/moves", moves.append, 10)
    rig.group.start(
        "go2_driver_node", [sys.executable, str(ROOT / "test" / "support" / "go2_ros2_sdk.py"), str(DEMO_SEED)]
    )
    teleop = Teleop(rig, "cmd_vel")  # as its teleop_twist_joy has it
    robot = Robot(rig, "go2_ros2_sdk")
    robot.until_ready()

    start = robot.poses[-1]
    handle = robot.client.send()
    rig.until(lambda: robot.moved_from(start), what="the robot moving by a verified action")
    rig.until(lambda: robot.source() is Source.NAVIGATION and moves and max(map(speed, moves[-3:])) > 0.0)
    robot.client.cancel(handle)
    cancelled = time.monotonic()
    rig.until(lambda: speed(moves[-1]) == 0.0, what="a Move of zero, since the driver throws zero Twists away")
    assert time.monotonic() - cancelled < 1.0
    rig.until(robot.stands)

    second = robot.client.send()
    rig.until(lambda: robot.source() is Source.NAVIGATION and speed(moves[-1]) > 0.0, what="navigation driving again")
    teleop.push(wz=-0.4)
    rig.until(lambda: robot.source() is Source.OPERATOR)
    rig.until(lambda: [moves[-1].linear.x, moves[-1].angular.z] == [0.0, -0.4], what="the joystick's own command")
    teleop.push()
    rig.until(lambda: robot.source() is not Source.OPERATOR, what="a resting joystick giving the robot back")
    robot.client.cancel(second)

    rig.node.create_publisher(Twist, "cmd_vel_out", 10)  # as twist_mux would, with teleop:=true
    rig.until(lambda: Cause.FOREIGN_PUBLISHER in robot.safety[-1].causes, what="another publisher noticed")
    assert any("cmd_vel_out has a publisher that does not belong there" in text for text in robot.safety[-1].sentences)
    assert not any("Traceback" in line for line in rig.lines)


def test_beside_unitree_ros2_the_robot_drives_stops_and_obeys_its_remote_control(rig):
    commands: list[Twist] = []
    rig.node.create_subscription(Twist, "cmd_vel", commands.append, 10)
    remote = rig.node.create_publisher(WirelessController, "wirelesscontroller", 10)
    rig.start("go2_standin_node", seed=DEMO_SEED, instruction=DEMO_INSTRUCTION)
    robot = Robot(rig, "unitree_ros2")
    robot.until_ready()

    start = robot.poses[-1]
    handle = robot.client.send()
    rig.until(lambda: robot.moved_from(start), what="the robot moving by a verified action")
    robot.client.cancel(handle)
    rig.until(robot.stands)

    second = robot.client.send()
    rig.until(lambda: robot.source() is Source.NAVIGATION and speed(commands[-1]) > 0.0)

    def steered() -> bool:
        remote.publish(WirelessController(rx=0.5))  # to the right
        time.sleep(0.05)
        return robot.source() is Source.OPERATOR and commands[-1].angular.z == pytest.approx(-0.4)

    rig.until(steered, what="the remote control's command")
    robot.client.cancel(second)
    remote.publish(WirelessController())
    rig.until(lambda: speed(commands[-1]) == 0.0 and robot.source() is not Source.OPERATOR, what="a released stick")
    rig.until(robot.stands)
    assert not any("Traceback" in line for line in rig.lines)


def speed(move: Twist) -> float:
    return max(abs(move.linear.x), abs(move.linear.y), abs(move.angular.z))
