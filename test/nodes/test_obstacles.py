# SPDX-License-Identifier: Apache-2.0
"""The sensors stop the simulated robot before a wall; and its faults on demand."""

from __future__ import annotations

import threading
import time

import pytest
from geometry_msgs.msg import Twist
from ros_rig import OdometryRig, Rig
from sensor_msgs.msg import Image, Imu
from std_msgs.msg import Float64, UInt32

from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import qos
from dsd_ros.ros.images import ImageMessageError, to_rgb
from dsd_ros.ros.stamps import seconds, to_stamp

SEED = 0


class Navigation:
    """Drives ahead, 75 cm by 75 cm, whatever is there."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.causes: list[Cause] = []
        self.healthy = False  # nothing speaks against moving
        self.collisions = 0
        self.slowest = 1.0
        node = rig.node
        self._command = node.create_publisher(Twist, "cmd_vel_dsd", qos.COMMAND)
        self._action = node.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
        node.create_subscription(SafetyState, "dsd/safety_state", self._on_state, qos.LATCHED)
        node.create_subscription(UInt32, "ground_truth/collisions", self._on_collision, qos.LATCHED)
        node.create_subscription(Twist, "cmd_vel", self._on_command, qos.STATE)
        self.odometry = OdometryRig(rig)
        self._stop = threading.Event()
        rig.at_end(self._stop.set)

    def drive(self, speed: float = 0.5) -> None:
        """Until the rig is taken down."""
        threading.Thread(target=self._drive, args=(speed,), daemon=True).start()

    def _drive(self, speed: float) -> None:
        twist = Twist()
        twist.linear.x = speed
        announced = -1.0
        while not self._stop.wait(0.04):
            if Cause.OBSTACLE not in self.causes and time.monotonic() - announced > 1.5:
                announced = time.monotonic()
                self._announce()
            self._command.publish(twist)

    def _announce(self) -> None:
        message = NavAction(kind=NavAction.FORWARD, distance=0.75, verified=True)
        now = self._rig.node.get_clock().now()
        message.header.stamp = now.to_msg()
        message.observation_stamp = to_stamp(now.nanoseconds * 1e-9 - 0.01)
        self._action.publish(message)

    def _on_state(self, message: SafetyState) -> None:
        self.causes = [Cause(cause) for cause in message.causes]
        self.healthy = not self.causes

    def _on_collision(self, message: UInt32) -> None:
        self.collisions = message.data

    def _on_command(self, message: Twist) -> None:
        if message.linear.x > 0.0:
            self.slowest = min(self.slowest, message.linear.x)

    @property
    def pose(self) -> tuple[float, float, float]:
        pose = self.odometry.pose
        return pose.x, pose.y, pose.yaw


@pytest.mark.parametrize("sensor", ["depth", "range"])
def test_driven_at_what_stands_there_the_robot_is_stopped_before_it(rig, sensor):
    rig.host("simulator_node", seed=SEED)
    rig.host("supervisor_node", require__obstacle=sensor, require__heartbeats="", require__commands="test_rig")
    navigation = Navigation(rig)
    rig.until(lambda: navigation.odometry.samples)
    rig.until(lambda: navigation.healthy, what="a healthy state")
    simulator = Simulator(World.from_seed(SEED))
    simulator.pose = navigation.pose
    began = simulator.range_ahead()
    assert began > 0.5
    navigation.drive()
    rig.until(lambda: Cause.OBSTACLE in navigation.causes, 60.0, "OBSTACLE")
    rig.until(lambda: navigation.odometry.velocity.vx == 0.0, 10.0)
    simulator.pose = navigation.pose
    left = simulator.range_ahead()
    assert navigation.collisions == 0 and 0.0 < left < began
    assert left == pytest.approx(0.12, abs=0.08)  # the limit; its own last centimetres were slow ones
    assert navigation.slowest < 0.2
    # It stays there.
    time.sleep(0.5)
    assert Cause.OBSTACLE in navigation.causes and navigation.collisions == 0


def test_faults_on_demand(rig):
    pictures: list[Image] = []
    imu: list[Imu] = []
    truth: list[Float64] = []
    node = rig.node
    node.create_subscription(Image, "camera/image_raw", pictures.append, qos.CAMERA)
    node.create_subscription(Imu, "imu", imu.append, qos.STATE)
    node.create_subscription(Float64, "ground_truth/target_distance", truth.append, qos.STATE)
    rig.host("simulator_node")
    rig.until(lambda: pictures and imu)

    def more(found: list, count: int = 5) -> list:
        """What comes from now on."""
        begun = len(found)
        rig.until(lambda: len(found) >= begun + count)
        return found[begun:]

    def falls_silent(found: list) -> None:
        """Whatever was on its way comes; then nothing comes any more while the rest goes on."""
        counts = [len(found)]
        rig.until(lambda: (more(truth, 30), counts.append(len(found)), counts[-1] == counts[-2])[2], what="silence")

    rig.fault("camera freeze")
    falls_silent(pictures)
    rig.fault("camera repeat")
    more(pictures, 1)  # which may be of before the freeze
    repeated = more(pictures)
    assert len({seconds(picture.header.stamp) for picture in repeated}) == 1
    rig.fault("camera garbage")
    more(pictures, 2)
    for picture in more(pictures):
        with pytest.raises(ImageMessageError):
            to_rgb(picture)
    rig.fault("camera ok")
    more(pictures, 2)
    assert to_rgb(more(pictures)[-1]).std() > 5.0

    rig.fault("robot freeze")
    falls_silent(imu)
    assert more(pictures)
    rig.fault("all ok")
    assert more(imu)
    rig.fault("camera spontaneously combusts")
    assert any("is no fault; say camera freeze|repeat|garbage|ok" in line for line in rig.lines)
