# SPDX-License-Identifier: Apache-2.0
"""The verifier as a ROS node, for a robot in the same DDS domain and namespace.

    ros2 launch dsd_ros verifier.launch.py target_model:=Qwen/Qwen2-VL-7B-Instruct token_file:=/etc/dsd/token

For robots on other networks use `dsd verifier`, which serves any number of them over websockets.
"""

from launch.actions import OpaqueFunction
from launch_ros.actions import Node

from dsd_ros.bringup.launching import group, node, restarted
from launch import LaunchContext, LaunchDescription


def nodes(context: LaunchContext) -> list[Node]:
    values = context.launch_configurations
    return [node("verifier_node", values, **restarted(values))]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([group("verifier", OpaqueFunction(function=nodes))])
