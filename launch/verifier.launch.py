"""The verifier as a ROS node, for a robot in the same DDS domain and namespace.

    ros2 launch dsd_ros verifier.launch.py target_model:=Qwen/Qwen2-VL-7B-Instruct device:=cuda dtype:=bfloat16

For robots on other networks use `dsd verifier`, which serves any number of them over websockets.
"""

from launch.actions import DeclareLaunchArgument

from dsd_ros.ros.launching import namespace_and_domain, node, restarted, setting
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    verifier = {
        "model.path": "target_model",
        "model.device": "device",
        "model.dtype": "dtype",
        "documents": "cloud_documents",
        "text_model": "text_model",
    }
    return LaunchDescription(
        [
            *namespace_and_domain(),
            DeclareLaunchArgument("target_model", **setting("verifier_node", "model.path")),
            DeclareLaunchArgument("device", **setting("verifier_node", "model.device")),
            DeclareLaunchArgument("dtype", **setting("verifier_node", "model.dtype")),
            DeclareLaunchArgument("cloud_documents", **setting("verifier_node", "documents")),
            DeclareLaunchArgument("text_model", **setting("verifier_node", "text_model")),
            node("verifier_node", verifier, **restarted()),
        ]
    )
