"""Everything on one machine: the simulated Go2, navigation, the draft and the verifier.

    ros2 launch dsd_ros demo.launch.py seed:=0 mode:=dsd

Nodes, arguments and parameter files are those of dsd_ros.ros.bringup, which `dsd` reads, too.
"""

from dsd_ros.ros.launching import describe
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    return describe("demo")
