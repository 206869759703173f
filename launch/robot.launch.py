"""What runs on the robot: its driver, the safety supervisor, navigation, the draft, and the bridge to a verifier.

    ros2 launch dsd_ros robot.launch.py verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token

Nodes, arguments and parameter files are those of dsd_ros.ros.bringup, which `dsd` reads, too.
"""

from dsd_ros.ros.launching import describe
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    return describe("robot")
