# SPDX-License-Identifier: Apache-2.0
"""A stand-in for go2_ros2_sdk's driver node (7f005bb, WebRTC, one robot), with a simulated robot behind it.

Topics, types, frames and quality of service are those of go2_driver_node.py and ros2_publisher.py; the pictures have
the simulator's size, not 1280 x 720, and there is no lidar. As there, a zero Twist is thrown away, velocities are
rounded to 0.01, and the robot itself keeps the last Move for a second. `standin/moves` has every Move it was sent.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import rclpy
from geometry_msgs.msg import TransformStamped, Twist
from go2_interfaces.msg import IMU, Go2State
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.qos import QoSHistoryPolicy, QoSProfile, QoSReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image, JointState
from tf2_msgs.msg import TFMessage

from dsd_ros.robot.go2.protocol import HOLD_S
from dsd_ros.robot.sim.driver import SimulatedDriver
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.ros.images import from_rgb

LEGS = [f"{leg}_{joint}_joint" for leg in ("FL", "FR", "RL", "RR") for joint in ("hip", "thigh", "calf")]
RELIABLE = QoSProfile(depth=10)
BEST_EFFORT = QoSProfile(
    reliability=QoSReliabilityPolicy.BEST_EFFORT, history=QoSHistoryPolicy.KEEP_LAST, depth=1
)  # fmt: skip


class Go2DriverNode(Node):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__("go2_driver_node")
        self.simulator = Simulator(World.from_seed(seed, "find the silver bottle"))
        self.robot = SimulatedDriver(self.simulator, HOLD_S)
        publish = self.create_publisher
        self.joints = publish(JointState, "joint_states", RELIABLE)
        self.states = publish(Go2State, "go2_states", RELIABLE)
        self.odometry = publish(Odometry, "odom", RELIABLE)
        self.imu = publish(IMU, "imu", RELIABLE)
        self.image = publish(Image, "camera/image_raw", BEST_EFFORT)
        self.info = publish(CameraInfo, "camera/camera_info", BEST_EFFORT)
        self.transforms = publish(TFMessage, "/tf", RELIABLE)
        self.moves = publish(Twist, "standin/moves", RELIABLE)
        self.create_subscription(Twist, "cmd_vel_out", self.on_command, RELIABLE)
        self.create_timer(0.05, self.publish_pose)
        self.create_timer(0.05, self.publish_state)
        self.create_timer(1.0, self.publish_joints)
        threading.Thread(target=self.film, daemon=True).start()

    def now(self) -> Any:
        return self.get_clock().now().to_msg()

    def on_command(self, message: Twist) -> None:
        x, y, z = message.linear.x, message.linear.y, message.angular.z
        if x != 0.0 or y != 0.0 or z != 0.0:
            move = Twist()
            move.linear.x, move.linear.y, move.angular.z = round(x, 2), round(y, 2), round(z, 2)
            self.robot.move(move.linear.x, move.linear.y, move.angular.z)
            self.moves.publish(move)

    def publish_pose(self) -> None:
        self.robot.advance()
        state = self.robot.state()
        message = Odometry()
        message.header.stamp, message.header.frame_id, message.child_frame_id = self.now(), "odom", "base_link"
        pose = message.pose.pose
        pose.position.x, pose.position.y = state.position[:2]
        pose.position.z = state.position[2] + 0.07
        q = pose.orientation
        q.w, q.x, q.y, q.z = state.orientation
        transform = TransformStamped(header=message.header, child_frame_id="base_link")
        place = transform.transform.translation
        place.x, place.y, place.z = pose.position.x, pose.position.y, pose.position.z
        transform.transform.rotation = q
        self.transforms.publish(TFMessage(transforms=[transform]))
        self.odometry.publish(message)

    def publish_state(self) -> None:
        state = self.robot.state()
        place, velocity = list(state.position), list(state.velocity)
        self.states.publish(Go2State(mode=3, position=place, body_height=state.body_height, velocity=velocity))
        turning, pushing = list(state.gyroscope), list(state.accelerometer)
        imu = IMU(quaternion=list(state.orientation), gyroscope=turning, accelerometer=pushing, rpy=list(state.rpy))
        self.imu.publish(imu)

    def publish_joints(self) -> None:
        message = JointState(name=LEGS, position=[0.0] * 12)
        message.header.stamp = self.now()
        self.joints.publish(message)

    def film(self) -> None:
        while rclpy.ok():
            image = from_rgb(self.simulator.render())
            image.header.stamp, image.header.frame_id = self.now(), "front_camera"
            self.image.publish(image)
            self.info.publish(CameraInfo(header=image.header, height=image.height, width=image.width))
            time.sleep(1 / 15)


if __name__ == "__main__":
    rclpy.init()
    rclpy.spin(Go2DriverNode(int(sys.argv[1])))
