# SPDX-License-Identifier: Apache-2.0
"""The whole system on one machine: a simulated Go2 in its world, the robot's nodes and a verifier.

    ros2 launch dsd_ros demo.launch.py seed:=0 mode:=dsd

The robot's nodes and most arguments come from robot.launch.py.
"""

from pathlib import Path
from typing import Any

from launch.actions import ExecuteProcess, IncludeLaunchDescription, OpaqueFunction, Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource

from dsd_ros.bringup.launching import group, node, restarted
from dsd_ros.bringup.systems import for_verifier, verifier_command
from launch import LaunchContext, LaunchDescription


def processes(context: LaunchContext) -> list[Any]:
    values = context.launch_configurations
    again = restarted(values)
    robot = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(Path(__file__).with_name("robot.launch.py"))),
        launch_arguments={"driver": "none"}.items(),
    )
    if values["transport"] == "dds":
        verifier = node("verifier_node", for_verifier(values), **again)
    else:
        verifier = ExecuteProcess(cmd=verifier_command(values), name="verifier", output="screen", **again)
    return [node("simulator_node", values, on_exit=Shutdown()), robot, verifier]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([group("demo", OpaqueFunction(function=processes))])
