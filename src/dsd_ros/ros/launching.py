# SPDX-License-Identifier: Apache-2.0
"""What the files under launch/ share: arguments and parameters made from the nodes' settings, restarts, and the end.

Each file describes one group of processes. Its arguments stay inside that group: an including file's own
``namespace`` or ``device`` is not touched. Nothing of `launch` is imported before a function needs it: the files are
also read without it (see launch_standin).
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsd_ros.addresses import check_host, check_verifier_address
from dsd_ros.environment import check_domain
from dsd_ros.paths import config_directory, user_path
from dsd_ros.robot.frames import Description, FrameSettings
from dsd_ros.ros.bringup import REMAPPINGS, STACKS
from dsd_ros.ros.processes import FIRST_PAUSE_S, Restarts, how_it_ended
from dsd_ros.ros.settings import NODES, Layer, ManagedSettings, merged, parameter, write_parameters

_NAMESPACE = re.compile(r"(/?[A-Za-z][A-Za-z0-9_]*)(/[A-Za-z][A-Za-z0-9_]*)*")
_ADDRESSES = {"verifier": check_verifier_address, "view_bind": check_host}  # launch arguments that are addresses
SWITCH = ("false", "true", "False", "True")  # Nav2's pages write True
LOG_LEVELS = ("debug", "info", "warn", "error", "fatal")
_GIVEN = "dsd_given"  # launch configuration: the arguments that were given, and not left at their defaults
_GROUP = "DSD_LAUNCH_GROUP"  # environment variable of every process of a group


def setting(node: str, name: str, default: str | None = None) -> dict[str, Any]:
    """Default, description and choices of a launch argument that sets a node's parameter.

    :param default: of this system, where it is not the parameter's own.
    """
    spec = parameter(node, name)
    own = str(spec.default).lower() if spec.kind is bool else str(spec.default)
    options: dict[str, Any] = {"default_value": own if default is None else default, "description": spec.help}
    choices = SWITCH if spec.kind is bool else spec.choices
    return options | ({"choices": list(choices)} if choices else {})


def installed(program: str) -> str:
    """The path of an installed program of this package. It says itself which Python it needs: `ros2 launch` runs in the
    system's, which may lack what the program imports.
    """
    return shutil.which(program, path=f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', '')}") or program


def switch(description: str, default: str = "false") -> dict[str, Any]:
    """Default, description and choices of a launch argument that turns something on."""
    return {"default_value": default, "description": description, "choices": list(SWITCH)}


def node(executable: str, given: Mapping[str, Any] | None = None, guest: str = "", **options: Any) -> Any:
    """A node of this package in the robot's namespace. Its parameters, each overriding those before it: its file under
    config/, the file of the stack, ``params_file``, and the launch arguments that were given.

    :param given: parameter -> name of the launch argument that sets it, or a substitution; empty text sets nothing.
    :param guest: a node that may run in the same process; it has its own file.
    :param options: of launch_ros' Node, e.g. ``condition`` and ``on_exit``.
    """
    from launch.substitutions import LaunchConfiguration
    from launch_ros.actions import Node

    return Node(
        package="dsd_ros",
        executable=executable,
        namespace=LaunchConfiguration("namespace"),
        parameters=[_parameters(executable, dict(given or {}), guest)],
        remappings=REMAPPINGS,
        ros_arguments=["--log-level", LaunchConfiguration("log_level")],
        output="screen",
        **options,
    )


def _parameters(executable: str, given: dict[str, Any], guest: str) -> Any:
    """A substitution that gives the path of a parameter file, written when the node starts."""
    from launch.utilities import normalize_to_list_of_substitutions, perform_substitutions

    from launch import Substitution

    if issubclass(NODES[executable], ManagedSettings):
        given["autostart"] = "autostart"

    class ParameterLayers(Substitution):  # type: ignore[misc]
        """``given``: parameter -> the launch argument that sets it, or a substitution."""

        arguments = {name: argument for name, argument in given.items() if isinstance(argument, str)}
        nodes = tuple(name for name in (executable, guest) if name)

        def __init__(self) -> None:
            super().__init__()
            self.given = given

        def layers(self, context: Any) -> tuple[list[Layer], dict[str, Any]]:
            """What the arguments override, and the values that they set."""
            values = context.launch_configurations
            below: dict[str, Any] = {}
            above: dict[str, Any] = {}
            for name, value in given.items():
                if not isinstance(value, str):
                    said = perform_substitutions(context, normalize_to_list_of_substitutions(value))
                    above |= {name: said} if said else {}
                    continue
                checked = _checked(executable, name, value, values[value])
                if value in values[_GIVEN].split(","):
                    above[name] = checked
                elif checked != parameter(executable, name).default:  # a default of this system
                    below[name] = checked
            if "use_sim_time" in values[_GIVEN].split(","):
                above["use_sim_time"] = values["use_sim_time"].lower() == "true"
            own: list[Layer] = [config_directory() / f"{name[:-5]}.yaml" for name in self.nodes]
            return [*own, *([below] if below else []), *_files(values)], above

        def perform(self, context: Any) -> str:
            """Write the file; it is removed when this process ends."""
            values = context.launch_configurations
            outer = values.get("ros_namespace", "")  # PushROSNamespace of an including file
            path = write_parameters(self.nodes, f"{outer}/{values['namespace']}", *self.layers(context))
            atexit.register(path.unlink, missing_ok=True)
            return str(path)

    return ParameterLayers()


def frame_arguments() -> list[Any]:
    """The arguments that say what the robot's frames are, and who publishes the fixed ones."""
    from launch.actions import DeclareLaunchArgument

    wanted = "run robot_state_publisher for robot_description and the fixed frames, which the driver then leaves to it"
    return [
        DeclareLaunchArgument("frame_prefix", **setting("go2_node", "frame_prefix")),
        DeclareLaunchArgument("description", **setting("go2_node", "description")),
        DeclareLaunchArgument("use_robot_state_pub", **switch(wanted)),
    ]


def driver_frames() -> dict[str, Any]:
    """What these arguments set of go2_node, as in :func:`node`."""
    from launch.substitutions import LaunchConfiguration

    from dsd_ros.humble import IfElseSubstitution

    own = {name: name for name in ("frame_prefix", "description")}
    return own | {"publish_description": IfElseSubstitution(LaunchConfiguration("use_robot_state_pub"), "false", "")}


def state_publisher(driven: Any, **options: Any) -> Any:
    """robot_state_publisher where it is asked for, with the description and the frame prefix that go2_node would use.

    :param driven: substitution: whether go2_node runs.
    """
    from launch.conditions import IfCondition
    from launch.substitutions import AndSubstitution, LaunchConfiguration
    from launch_ros.actions import Node
    from launch_ros.parameter_descriptions import ParameterValue

    from launch import Substitution

    driver = _parameters("go2_node", driver_frames(), "")

    class OfDriver(Substitution):  # type: ignore[misc]
        arguments, given = driver.arguments, driver.given

        def __init__(self, read: Callable[[FrameSettings], str]) -> None:
            super().__init__()
            self.read = read

        def perform(self, context: Any) -> str:
            layers, above = driver.layers(context)
            found, _ = merged("go2_node", context.launch_configurations["namespace"], [*layers, above])
            names = {each.name for each in fields(FrameSettings)} & found.keys()
            return self.read(FrameSettings(**{name: found[name] for name in names}))

    values = {
        "robot_description": ParameterValue(OfDriver(lambda frames: Description(frames).text), value_type=str),
        "frame_prefix": ParameterValue(OfDriver(lambda frames: frames.frame_prefix), value_type=str),
        "use_sim_time": ParameterValue(LaunchConfiguration("use_sim_time"), value_type=bool),
    }
    return Node(
        package="robot_state_publisher",
        executable="robot_state_publisher",
        namespace=LaunchConfiguration("namespace"),
        parameters=[values],
        remappings=REMAPPINGS,
        output="screen",
        condition=IfCondition(AndSubstitution(driven, LaunchConfiguration("use_robot_state_pub"))),
        **options,
    )


def _checked(executable: str, name: str, argument: str, text: str) -> Any:
    """A launch argument's value as the parameter that it sets; ValueError naming the argument."""
    spec = parameter(executable, name)
    value = spec.read(text)
    if not spec.allows(value):
        raise ValueError(f"{argument}:={text} is not allowed: {argument} ({spec.help}) takes {spec.allowed}.")
    return value


def _files(values: Mapping[str, str]) -> list[Layer]:
    """The parameter files that the arguments name: Nav2's, the stack's, then params_file."""
    found: list[Layer] = []
    if values.get("executor") == "nav2":
        found.append(config_directory() / "nav2.yaml")
    if (stack := values.get("stack", "none")) != "none":
        found.append(config_directory() / "stacks" / f"{stack}.yaml")
    if file := values["params_file"]:
        found.append(user_path(file))
    return found


def group(*entities: Any) -> Any:
    """Entities whose arguments and environment stay inside; those of an included group belong to the same group."""
    from launch.actions import GroupAction, OpaqueFunction, SetEnvironmentVariable

    return GroupAction(
        [
            OpaqueFunction(function=_begin),
            SetEnvironmentVariable("PYTHONUNBUFFERED", "1"),  # output is a pipe: lines come when they are printed
            SetEnvironmentVariable("RCUTILS_LOGGING_BUFFERED_STREAM", "1"),
            *entities,
        ]
    )


def _begin(context: Any) -> None:
    values = context.launch_configurations
    values.setdefault(_GIVEN, ",".join(values))


def common_arguments() -> list[Any]:
    """The arguments that every system has, with Nav2's names and meanings, and what they do to all processes."""
    from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
    from launch.conditions import IfCondition
    from launch.substitutions import LaunchConfiguration

    from dsd_ros.humble import NotEqualsSubstitution

    domain = LaunchConfiguration("domain")
    return [
        DeclareLaunchArgument(
            "namespace", default_value="", description="namespace of the robot, for several in one domain, e.g. go2_1"
        ),
        DeclareLaunchArgument("domain", default_value="", description="ROS domain; empty: that of ROS_DOMAIN_ID"),
        DeclareLaunchArgument(
            "params_file", default_value="", description="parameter file (YAML) for all nodes, over those under config/"
        ),
        DeclareLaunchArgument("use_sim_time", **switch("take the time from /clock")),
        DeclareLaunchArgument("autostart", **switch("configure and activate the lifecycle nodes", "true")),
        DeclareLaunchArgument(
            "use_respawn", **switch("restart nodes that crash, where a robot at rest allows", "true")
        ),
        DeclareLaunchArgument(
            "log_level", default_value="info", description="least severe log lines shown", choices=list(LOG_LEVELS)
        ),
        DeclareLaunchArgument(
            "end_scope",
            default_value="group",
            description="what the end of a node that is needed ends. group: the nodes of this launch file and of those "
            "that it includes; launch: everything that `ros2 launch` has started",
            choices=["group", "launch"],
        ),
        OpaqueFunction(function=_check),
        SetEnvironmentVariable("ROS_DOMAIN_ID", domain, condition=IfCondition(NotEqualsSubstitution(domain, ""))),
        SetEnvironmentVariable(_GROUP, LaunchConfiguration(_GROUP)),
    ]


def _check(context: Any) -> None:
    given = context.launch_configurations
    namespace, domain, file = given["namespace"], given["domain"], given["params_file"]
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise ValueError(f"'{namespace}' is no namespace; use letters, digits and _, as in go2_1.")
    check_domain(domain)
    if file and not user_path(file).is_file():
        raise ValueError(f"params_file:={file} is no file; give the path of a ROS 2 parameter file (YAML).")
    for name, check in _ADDRESSES.items():
        if name in given:
            try:
                check(given[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    if _GROUP not in given:  # not included by another file of this package
        given[_GROUP] = f"{os.getpid()}-{next(_numbers)}"
        _groups[given[_GROUP]] = _Group(given["use_respawn"].lower() == "true", given["end_scope"] == "launch")


@dataclass
class _Group:
    """What the arguments of a group say about its end."""

    respawn: bool
    ends_launch: bool
    ended: bool = False


_groups: dict[str, _Group] = {}
_numbers = itertools.count(1)


def required() -> dict[str, Any]:
    """Options of a process without which the others must not go on: its end ends its group."""

    def on_exit(event: Any, context: Any) -> Any:
        return _end_of_group(event, context, how_it_ended(event.returncode))

    return {"on_exit": on_exit}


def restarted() -> dict[str, Any]:
    """Options of a process that is restarted after a crash; one crash too many, or an end without one, ends its group.

    The bounds are those of the process runner; launch knows one pause between restarts, not a growing one.
    """
    from launch.substitutions import LaunchConfiguration

    restarts = Restarts()

    def on_exit(event: Any, context: Any) -> Any:
        if not _group_of(event.env).respawn:
            return _end_of_group(event, context, how_it_ended(event.returncode))
        if restarts.after(event.returncode, time.monotonic()) is not None:
            return None
        return _end_of_group(event, context, restarts.sentence(event.returncode))

    # The end of the group has to overtake launch's own restart during this pause.
    delay = 2 * FIRST_PAUSE_S
    return {"respawn": LaunchConfiguration("use_respawn"), "respawn_delay": delay, "on_exit": on_exit}


def _group_of(environment: Mapping[str, str]) -> _Group:
    return _groups[environment[_GROUP]]


def _end_of_group(event: Any, context: Any, how: str) -> Any:
    """Actions that end the other processes of the group, or the whole launch, unless they end already."""
    from launch.actions import EmitEvent, LogInfo, Shutdown
    from launch.events.process import ShutdownProcess

    own = _group_of(event.env)
    if context.is_shutdown or own.ended:
        return None
    own.ended = True
    reason = f"{event.process_name} {how}; ending the others"
    if own.ends_launch:
        return Shutdown(reason=reason)

    def belongs(action: Any) -> bool:
        return bool((action.process_description.final_env or {}).get(_GROUP) == event.env[_GROUP])

    return [LogInfo(msg=reason), EmitEvent(event=ShutdownProcess(process_matcher=belongs))]


def stack_argument() -> list[Any]:
    """The argument ``stack``, and the remappings that it asks for of every node that follows."""
    from launch.actions import DeclareLaunchArgument
    from launch.conditions import IfCondition
    from launch.substitutions import LaunchConfiguration
    from launch_ros.actions import SetRemap

    from dsd_ros.humble import EqualsSubstitution

    said = "the stack that runs on the robot: its topics, and what the supervisor can require of it"
    return [
        DeclareLaunchArgument("stack", default_value="none", description=said, choices=list(STACKS)),
        *(
            SetRemap(here, there, condition=IfCondition(EqualsSubstitution(LaunchConfiguration("stack"), stack)))
            for stack, remappings in STACKS.items()
            for here, there in remappings
        ),
    ]
