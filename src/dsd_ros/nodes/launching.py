"""A system of the bring-up table as a launch description, for the files under launch/.

Imports launch and launch_ros, which come with an installed ROS 2 and are no wheels.
"""

from __future__ import annotations

from typing import Any

from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, Shutdown
from launch.conditions import IfCondition
from launch.substitutions import EqualsSubstitution, LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from dsd_ros.nodes.bringup import SYSTEMS, NodeEntry, Program, System, program_command
from launch import LaunchDescription


def describe(name: str) -> LaunchDescription:
    """Declared arguments and nodes of a system; the end of one node ends all.

    Beside the table's arguments there is ``namespace``, for several robots in one domain.
    """
    system = SYSTEMS[name]
    arguments = [
        DeclareLaunchArgument(
            argument.name,
            default_value=argument.default,
            description=argument.help,
            **({"choices": list(argument.choices)} if argument.choices else {}),
        )
        for argument in system.arguments
    ]
    namespace = DeclareLaunchArgument(
        "namespace", default_value="", description="namespace of the robot, e.g. go2_1"
    )
    nodes = [_node(system, entry) for entry in system.nodes]
    programs = [_program(system, program) for program in system.programs]
    return LaunchDescription([*arguments, namespace, *programs, *nodes])


def _program(system: System, program: Program) -> OpaqueFunction:
    """A program's command line is known only once the arguments are."""

    def start(context: Any) -> list[ExecuteProcess]:
        values = {
            argument.name: LaunchConfiguration(argument.name).perform(context)
            for argument in system.arguments
        }
        if not program.wanted(values):
            return []
        return [
            ExecuteProcess(
                cmd=program_command(program, values),
                name=program.name,
                output="screen",
                on_exit=Shutdown(reason=f"{program.name} ended"),
            )
        ]

    return OpaqueFunction(function=start)


def _node(system: System, entry: NodeEntry) -> Node:
    parameters: dict[str, Any] = {}
    for argument in system.arguments:
        for target in argument.targets:
            node, _, parameter = target.partition(".")
            if node == entry.executable:
                kind = _kind(argument.default)
                parameters[parameter] = ParameterValue(
                    LaunchConfiguration(argument.name), value_type=kind
                )
    condition = None
    if entry.only_with is not None:
        name, value = entry.only_with
        condition = IfCondition(EqualsSubstitution(LaunchConfiguration(name), value))
    return Node(
        package="dsd_ros",
        executable=entry.executable,
        name=entry.executable,
        namespace=LaunchConfiguration("namespace"),
        parameters=[str(entry.parameter_file), parameters],
        output="screen",
        emulate_tty=True,
        condition=condition,
        on_exit=Shutdown(reason=f"{entry.executable} ended"),
    )


def _kind(default: str) -> type:
    for kind in (int, float):
        try:
            kind(default)
        except ValueError:
            continue
        return kind
    return str
