# SPDX-License-Identifier: Apache-2.0
"""The robot's nodes: driver, safety supervisor, navigation, draft, and the bridge to a verifier in the cloud.

    ros2 launch dsd_ros robot.launch.py verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token

An argument that is empty leaves its parameter to the parameter files; `--show-args` lists all.
Nodes that a robot at rest can do without are restarted; the end of a required one ends the launch.
"""

from launch.actions import OpaqueFunction, Shutdown
from launch_ros.actions import Node

from dsd_ros.bringup.launching import group, node, restarted
from dsd_ros.bringup.systems import REMAPPINGS
from launch import LaunchContext, LaunchDescription


def nodes(context: LaunchContext) -> list[Node]:
    values = context.launch_configurations
    on = {name for name, value in values.items() if value.lower() == "true"}
    required, again = {"on_exit": Shutdown()}, restarted(values)
    started = [
        node("supervisor_node", values, **required),
        node("navigation_node", values, **again),
        node("draft_node", values, **again),
    ]
    if values["driver"] == "go2" and values["stack"] != "go2_ros2_sdk":  # that stack has a driver of its own
        started.insert(0, node("go2_node", values, **required))
    if "serve" in on:
        started.append(node("serve_node", values, **again))
    if values["memory"] != "never":
        started.append(node("memory_node", values, **again))
    if values["transport"] == "websocket":
        started.append(node("bridge_node", values, **again))
    if values["record"]:
        started.append(node("record_node", values))
    if on & {"visual", "rviz"}:
        started.append(node("visual_node", values))
    if "view" in on:
        started.append(node("view_node", values))
    if "rviz" in on:
        started.append(
            Node(
                package="rviz2",
                executable="rviz2",
                namespace=values["namespace"],  # its topics are relative and follow the robot's namespace
                arguments=["-d", values["rviz_config"]],
                parameters=[{"use_sim_time": "use_sim_time" in on}],
                remappings=REMAPPINGS,
            )
        )
    return started


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([group("robot", OpaqueFunction(function=nodes))])
