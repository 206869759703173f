"""The verifier as a ROS node, for a robot in the same DDS domain and namespace.

    ros2 launch dsd_ros verifier.launch.py target_model:=Qwen/Qwen2-VL-7B-Instruct device:=cuda dtype:=bfloat16

For robots elsewhere there is `dsd verifier`, which serves any number of them over websockets. Nodes, arguments and
parameter files are those of dsd_ros.ros.bringup, which `dsd` reads, too.
"""

from dsd_ros.ros.launching import describe
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    return describe("verifier")
