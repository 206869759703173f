# SPDX-License-Identifier: Apache-2.0
"""The verifier as a ROS node, for a robot in the same DDS domain and namespace.

    ros2 launch dsd_ros verifier.launch.py target_model:=Qwen/Qwen2-VL-7B-Instruct token_file:=/etc/dsd/token

For robots on other networks use `dsd verifier`, which serves any number of them over websockets.
"""

from launch.actions import DeclareLaunchArgument

from dsd_ros.ros.launching import common_arguments, group, node, restarted, setting
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    verifier = {
        "model.path": "target_model",
        "model.device": "device",
        "model.dtype": "dtype",
        "model.prompt": "prompt",
        "documents": "cloud_documents",
        "text_model": "text_model",
        "token_file": "token_file",
        "tokens_file": "tokens_file",
        "allow_unauthenticated": "allow_unauthenticated",
    }
    arguments = [
        *common_arguments(),
        DeclareLaunchArgument("target_model", **setting("verifier_node", "model.path")),
        DeclareLaunchArgument("device", **setting("verifier_node", "model.device")),
        DeclareLaunchArgument("dtype", **setting("verifier_node", "model.dtype")),
        DeclareLaunchArgument("prompt", **setting("verifier_node", "model.prompt")),
        DeclareLaunchArgument("cloud_documents", **setting("verifier_node", "documents")),
        DeclareLaunchArgument("text_model", **setting("verifier_node", "text_model")),
        DeclareLaunchArgument("token_file", **setting("verifier_node", "token_file")),
        DeclareLaunchArgument("tokens_file", **setting("verifier_node", "tokens_file")),
        DeclareLaunchArgument("allow_unauthenticated", **setting("verifier_node", "allow_unauthenticated")),
    ]
    return LaunchDescription([group(*arguments, node("verifier_node", verifier, **restarted()))])
