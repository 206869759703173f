# SPDX-License-Identifier: Apache-2.0
"""The robot's nodes on the DDS network of a Go2, with the messages of unitree_ros2; our go2_node is the driver.

    source ~/unitree_ros2/setup.sh
    ros2 launch examples/unitree_ros2.launch.py verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token

The GroupAction keeps the arguments of this robot from whatever else the launch file includes.
"""

from launch.actions import GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource

from dsd_ros.paths import share_directory
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    robot = PythonLaunchDescriptionSource(str(share_directory() / "launch" / "robot.launch.py"))
    arguments = {"stack": "unitree_ros2", "speed": "0.4"}
    return LaunchDescription([GroupAction([IncludeLaunchDescription(robot, launch_arguments=arguments.items())])])
