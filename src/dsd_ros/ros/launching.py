"""A system of the bring-up table as a launch description, for the files under launch/.

Imports launch and launch_ros, which come with an installed ROS 2 and are no wheels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from launch.actions import DeclareLaunchArgument, EmitEvent, ExecuteProcess, LogInfo, OpaqueFunction
from launch.events import Shutdown
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

from dsd_ros.ros.bringup import (
    PER_ROBOT,
    SYSTEMS,
    NodeStart,
    Program,
    System,
    environment_of,
    plan,
    program_command,
    values_of,
)
from dsd_ros.ros.respawn import RULE, Restarts, how_it_ended
from launch import Action, LaunchContext, LaunchDescription


def describe(name: str) -> LaunchDescription:
    """Declared arguments, programs and nodes of a system.

    As the process runner has it, a node whose crash may be recovered is started again, and another one's end
    is the end of all. launch knows one pause between restarts, not a growing one.
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

    def start(context: LaunchContext) -> list[ExecuteProcess]:
        """What is started is known only once the arguments are."""
        given = {name: context.launch_configurations[name] for name in system.defaults()}
        values = values_of(system, given)
        environment = environment_of(system, values)
        programs = [_program(program, values, environment) for program in system.programs if program.wanted(values)]
        return programs + [_node(system, item) for item in plan(system.name, given)]

    return LaunchDescription([*arguments, OpaqueFunction(function=start)])


def _program(program: Program, values: dict[str, str], environment: dict[str, str]) -> ExecuteProcess:
    return ExecuteProcess(
        cmd=program_command(program, values),
        name=program.name,
        output="screen",
        additional_env=environment,
        **_at_the_end(program.name, program.respawn, program.optional),
    )


def _node(system: System, start: NodeStart) -> Node:
    name = start.entry.executable
    defaults = {target: argument.default for argument in system.arguments for target in argument.targets}
    parameters = {
        parameter: _as_typed(value, defaults[f"{name}.{parameter}"]) for parameter, value in start.parameters.items()
    }
    return Node(
        package="dsd_ros",
        executable=name,
        name=name,
        namespace=start.namespace,
        parameters=[
            str(start.entry.parameter_file),
            *(str(guest.parameter_file) for guest in start.guests),
            parameters,
        ],
        remappings=[(topic, topic[1:]) for topic in PER_ROBOT] if start.namespace else [],
        additional_env=start.environment,
        output="screen",
        emulate_tty=True,
        **_at_the_end(name, start.entry.respawn, start.entry.optional),
    )


def _at_the_end(name: str, respawn: bool, optional: bool = False) -> dict[str, Any]:
    """What launch is to do when a process has ended: start it again, end all, or nothing."""
    restarts = Restarts()

    def on_exit(event: Any, context: LaunchContext) -> list[Action] | None:
        if context.is_shutdown:
            return None
        if respawn and restarts.after(event.returncode, time.monotonic()) is not None:
            return None
        if optional:
            return [LogInfo(msg=f"{name} {how_it_ended(event.returncode)}; the others go on")]
        how = restarts.sentence if respawn else how_it_ended
        reason = f"{name} {how(event.returncode)}; ending the others"
        return [LogInfo(msg=reason), EmitEvent(event=Shutdown(reason=reason))]

    handler: Callable[..., Any] = on_exit
    if not respawn:
        return {"on_exit": handler}
    # The pause is also what a shutdown has to overtake launch's own restart.
    return {"on_exit": handler, "respawn": True, "respawn_delay": 2 * RULE.first_pause_s}


def _as_typed(value: str, default: str) -> Any:
    """A value as the type of its argument's default; launch would guess text like "1" to be a number."""
    if default in ("false", "true"):
        return value == "true"
    for kind in (int, float):
        try:
            kind(default)
        except ValueError:
            continue
        return kind(value)
    return ParameterValue(value, value_type=str)
