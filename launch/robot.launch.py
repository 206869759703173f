# SPDX-License-Identifier: Apache-2.0
"""The robot's nodes: driver, safety supervisor, navigation, draft, and the bridge to a verifier in the cloud.

    ros2 launch dsd_ros robot.launch.py verifier:=wss://cloud.example:8765 token_file:=/etc/dsd/token

``node(NAME, {parameter: argument})`` reads config/NAME.yaml, then ``params_file``, then the arguments that are given.
Nodes that a robot at rest can do without are restarted after a crash; the end of a required one ends this group.
"""

from typing import Any

from launch.actions import DeclareLaunchArgument
from launch.conditions import IfCondition
from launch.substitutions import AndSubstitution, LaunchConfiguration, NotSubstitution, OrSubstitution
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from dsd_ros.humble import EqualsSubstitution, NotEqualsSubstitution
from dsd_ros.paths import config_directory
from dsd_ros.ros import launching
from dsd_ros.ros.bringup import REMAPPINGS
from dsd_ros.ros.launching import common_arguments, group, node, required, restarted, setting, stack_argument, switch
from launch import LaunchDescription


def arguments() -> list[Any]:
    return [
        *common_arguments(),
        DeclareLaunchArgument(
            "driver",
            default_value="go2",
            description="go2: drive a Unitree Go2; none: other nodes drive the robot, as with stack:=go2_ros2_sdk",
            choices=["go2", "none"],
        ),
        *stack_argument(),
        *launching.frame_arguments(),
        DeclareLaunchArgument("transport", **setting("draft_node", "transport", "websocket")),
        DeclareLaunchArgument("mode", **setting("draft_node", "decode.mode")),
        DeclareLaunchArgument("temperature", **setting("draft_node", "decode.temperature")),
        DeclareLaunchArgument("speed", **setting("navigation_node", "motion.speed")),
        DeclareLaunchArgument("executor", **setting("navigation_node", "executor")),
        DeclareLaunchArgument("fallback", **setting("navigation_node", "run.fallback")),
        DeclareLaunchArgument("grammar", **setting("navigation_node", "grammar")),
        DeclareLaunchArgument("constrain", **setting("draft_node", "constrain")),
        DeclareLaunchArgument("arrival_check", **setting("navigation_node", "run.arrival_check")),
        DeclareLaunchArgument("history", **setting("draft_node", "history_frames")),
        DeclareLaunchArgument("memory", **setting("navigation_node", "memory.when")),
        DeclareLaunchArgument("memory_documents", **setting("memory_node", "documents")),
        DeclareLaunchArgument("text_model", **setting("verifier_node", "text_model")),
        DeclareLaunchArgument("record", default_value="", description="folder to create for a bag; empty: no bag"),
        DeclareLaunchArgument("visual", **switch("publish what RViz shows")),
        DeclareLaunchArgument("rviz", **switch("open RViz here, and publish what it shows")),
        DeclareLaunchArgument(
            "rviz_config", default_value=str(config_directory() / "dsd.rviz"), description="RViz' configuration file"
        ),
        DeclareLaunchArgument("view", **switch("serve the live page")),
        DeclareLaunchArgument("view_bind", **setting("view_node", "bind")),
        DeclareLaunchArgument("view_open", **setting("view_node", "open_browser")),
        DeclareLaunchArgument("draft_model", **setting("draft_node", "model.path")),
        DeclareLaunchArgument("target_tokenizer", **setting("draft_node", "target_tokenizer")),
        DeclareLaunchArgument("prompt", **setting("draft_node", "model.prompt")),
        DeclareLaunchArgument("quantization", **setting("draft_node", "model.quantization")),
        DeclareLaunchArgument("device", **setting("draft_node", "model.device")),
        DeclareLaunchArgument("verifier", **setting("bridge_node", "url")),
        DeclareLaunchArgument("token_file", **setting("draft_node", "token_file")),
        DeclareLaunchArgument("allow_unauthenticated", **setting("draft_node", "allow_unauthenticated")),
        DeclareLaunchArgument("ca_file", **setting("bridge_node", "ca_file")),
    ]


def generate_launch_description() -> LaunchDescription:
    foreign = EqualsSubstitution(LaunchConfiguration("stack"), "go2_ros2_sdk")  # it has a driver of its own
    driven = AndSubstitution(EqualsSubstitution(LaunchConfiguration("driver"), "go2"), NotSubstitution(foreign))
    remote = EqualsSubstitution(LaunchConfiguration("transport"), "websocket")
    asked = NotEqualsSubstitution(LaunchConfiguration("memory"), "never")
    recorded = NotEqualsSubstitution(LaunchConfiguration("record"), "")
    view = LaunchConfiguration("view")
    visual = OrSubstitution(LaunchConfiguration("visual"), LaunchConfiguration("rviz"))
    run = {"run.fallback": "fallback", "run.arrival_check": "arrival_check"}
    navigation = {"motion.speed": "speed", "executor": "executor", "grammar": "grammar", "memory.when": "memory", **run}
    proof = {"token_file": "token_file", "allow_unauthenticated": "allow_unauthenticated"}
    draft = {
        **proof,
        "transport": "transport",
        "decode.mode": "mode",
        "decode.temperature": "temperature",
        "grammar": "grammar",
        "constrain": "constrain",
        "history_frames": "history",
        "target_tokenizer": "target_tokenizer",
        "model.path": "draft_model",
        "model.prompt": "prompt",
        "model.quantization": "quantization",
        "model.device": "device",
    }
    memory = {**proof, "documents": "memory_documents", "model.path": "text_model"}
    bridge = {"url": "verifier", "token_file": "token_file", "ca_file": "ca_file"}
    web = {"bind": "view_bind", "open_browser": "view_open", "visual": visual}
    nodes = [
        node("go2_node", launching.driver_frames(), condition=IfCondition(driven), **required()),
        launching.state_publisher(driven, **restarted()),
        node("supervisor_node", {"limit.speed": "speed", "fallback": "fallback", "grammar": "grammar"}, **required()),
        node("navigation_node", navigation, **restarted()),
        node("draft_node", draft, **restarted()),
        node("memory_node", memory, condition=IfCondition(asked), **restarted()),
        node("bridge_node", bridge, condition=IfCondition(remote), **restarted()),
        node("record_node", {"directory": "record"}, condition=IfCondition(recorded)),
        node("visual_node", condition=IfCondition(AndSubstitution(visual, NotSubstitution(view)))),
        node("view_node", web, guest="visual_node", condition=IfCondition(view)),  # one process serves both
        Node(
            package="rviz2",
            executable="rviz2",
            namespace=LaunchConfiguration("namespace"),  # its topics are relative and follow the robot's namespace
            arguments=["-d", LaunchConfiguration("rviz_config")],
            parameters=[{"use_sim_time": ParameterValue(LaunchConfiguration("use_sim_time"), value_type=bool)}],
            remappings=REMAPPINGS,
            condition=IfCondition(LaunchConfiguration("rviz")),
        ),
    ]
    return LaunchDescription([group(*arguments(), *nodes)])
