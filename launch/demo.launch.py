# SPDX-License-Identifier: Apache-2.0
"""The whole system on one machine: a simulated Go2 in its world, the robot's nodes and a verifier.

    ros2 launch dsd_ros demo.launch.py seed:=0 mode:=dsd

The robot's nodes and most arguments come from robot.launch.py.
"""

from pathlib import Path

from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription
from launch.conditions import IfCondition
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.humble import EqualsSubstitution
from dsd_ros.ros.bringup import DEMO_INSTRUCTION, DEMO_SEED
from dsd_ros.ros.launching import common_arguments, group, installed, node, required, restarted, setting
from launch import LaunchDescription


def generate_launch_description() -> LaunchDescription:
    port = str(VerifierSettings.port)
    arguments = [
        *common_arguments(),
        DeclareLaunchArgument("seed", **setting("simulator_node", "seed", str(DEMO_SEED))),
        DeclareLaunchArgument("instruction", **setting("simulator_node", "instruction", DEMO_INSTRUCTION)),
        DeclareLaunchArgument("frame_prefix", **setting("simulator_node", "frame_prefix")),
        DeclareLaunchArgument("transport", **setting("draft_node", "transport")),
        DeclareLaunchArgument("arrival_check", **setting("navigation_node", "run.arrival_check", "service")),
        DeclareLaunchArgument("memory_documents", **setting("memory_node", "documents", "shipped")),
        # Nobody is hurt by a simulated robot that a stranger drives; a robot's own default is false.
        DeclareLaunchArgument("allow_unauthenticated", **setting("draft_node", "allow_unauthenticated", "true")),
        DeclareLaunchArgument("token_file", **setting("draft_node", "token_file")),
        DeclareLaunchArgument("target_model", **setting("verifier_node", "model.path")),
        DeclareLaunchArgument("prompt", **setting("draft_node", "model.prompt")),
        DeclareLaunchArgument("cloud_documents", **setting("verifier_node", "documents")),
        DeclareLaunchArgument("text_model", **setting("verifier_node", "text_model")),
        DeclareLaunchArgument("verifier_port", default_value=port, description="port of dsd verifier"),
    ]
    on_topics = EqualsSubstitution(LaunchConfiguration("transport"), "dds")
    remote = EqualsSubstitution(LaunchConfiguration("transport"), "websocket")
    robot = {"seed": "seed", "instruction": "instruction", "frame_prefix": "frame_prefix"}
    proof = {"token_file": "token_file", "allow_unauthenticated": "allow_unauthenticated"}
    target = {"model.path": "target_model", "model.prompt": "prompt"}
    verifier = {**proof, **target, "documents": "cloud_documents", "text_model": "text_model"}
    processes = [
        node("simulator_node", robot, **required()),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(str(Path(__file__).with_name("robot.launch.py"))),
            launch_arguments={"driver": "none"}.items(),
        ),
        node("verifier_node", verifier, condition=IfCondition(on_topics), **restarted()),
        ExecuteProcess(
            cmd=[
                *(installed("dsd"), "verifier"),
                *("--port", LaunchConfiguration("verifier_port")),
                *("--model", LaunchConfiguration("target_model")),
                *("--prompt", LaunchConfiguration("prompt")),
                *("--documents", LaunchConfiguration("cloud_documents")),
                *("--text-model", LaunchConfiguration("text_model")),
                *("--token-file", LaunchConfiguration("token_file")),
            ],
            name="verifier",
            output="screen",
            condition=IfCondition(remote),
            **restarted(),
        ),
    ]
    return LaunchDescription([group(*arguments, *processes)])
