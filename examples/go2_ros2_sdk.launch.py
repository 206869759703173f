# SPDX-License-Identifier: Apache-2.0
"""The robot's nodes beside go2_ros2_sdk, which drives the Go2 over WebRTC.

    ros2 launch go2_robot_sdk robot.launch.py teleop:=false nav2:=false
    ros2 launch examples/go2_ros2_sdk.launch.py verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token

The GroupAction keeps the arguments of this robot from whatever else the launch file includes.
"""

from launch.actions import GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

from dsd_ros.paths import share_directory
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    robot = PythonLaunchDescriptionSource(str(share_directory() / "launch" / "robot.launch.py"))
    arguments = {"stack": "go2_ros2_sdk", "speed": "0.4"}
    return LaunchDescription([GroupAction([IncludeLaunchDescription(robot, launch_arguments=arguments.items())])])
