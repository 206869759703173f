"""The verifier as a ROS node, for robots in the same DDS domain.

    ros2 launch dsd_ros cloud.launch.py target_model:=Qwen/Qwen2-VL-7B-Instruct device:=cuda dtype:=bfloat16

Nodes, arguments and parameter files are those of dsd_ros.nodes.bringup, which `dsd` reads, too.
"""

from dsd_ros.nodes.launching import describe
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    return describe("cloud")
