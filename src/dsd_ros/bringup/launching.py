# SPDX-License-Identifier: Apache-2.0
"""What the files under launch/ share: the arguments of a system, and a node with its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.actions import DeclareLaunchArgument, GroupAction, SetEnvironmentVariable
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from dsd_ros.bringup.systems import RESPAWN_DELAY_S, Start, arguments_of, files, given, remappings

Values = Mapping[str, str]


def group(system: str, *actions: Any) -> GroupAction:
    """The arguments of a system and actions; what is set inside stays inside, so others may include the file."""
    declared = [
        DeclareLaunchArgument(
            each.name, default_value=each.default, description=each.help, choices=list(each.choices) or None
        )
        for each in arguments_of(system)
    ]
    lines = [  # output is a pipe: lines come when they are printed
        SetEnvironmentVariable("PYTHONUNBUFFERED", "1"),
        SetEnvironmentVariable("RCUTILS_LOGGING_BUFFERED_STREAM", "1"),
    ]
    return GroupAction([*declared, *lines, *actions])


def node(name: str, values: Values, **options: Any) -> Node:
    """A node of this package. Its parameters, each over those before: its own file under config/, those of Nav2, the
    stack and ``params_file``, and the arguments that are not empty.

    :param values: of the launch arguments.
    :param options: of launch_ros' Node, e.g. ``on_exit``.
    """
    own = {
        key: ParameterValue(value, value_type=str) if isinstance(value, str) else value
        for key, value in given(name, values).items()
    }
    return Node(
        package="dsd_ros",
        executable=name,
        name=name,
        namespace=values["namespace"],
        parameters=[*map(str, Start(name, files=files(values)).parameter_files), *([own] if own else [])],
        remappings=remappings(values),
        ros_arguments=["--log-level", values["log_level"]],
        output="screen",
        **options,
    )


def restarted(values: Values) -> dict[str, Any]:
    """Options of a process that a robot at rest can do without, as Nav2's: it is started again when it ends."""
    return {"respawn": values["use_respawn"].lower() == "true", "respawn_delay": RESPAWN_DELAY_S}
