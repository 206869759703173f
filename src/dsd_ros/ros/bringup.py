# SPDX-License-Identifier: Apache-2.0
"""Which processes make up a system, and how each is started: what the files under launch/ say, read without `launch`.

Imports nothing of ROS, so that the command line and the process runner can read it anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsd_ros.paths import config_directory, share_directory
from dsd_ros.ros import launch_standin as standin
from dsd_ros.ros.launch_standin import Values, text, truth
from dsd_ros.shown import meant

TRANSPORTS = ("dds", "websocket")
DEMO_SEED = 24  # of a world where the shipped target does not depend on how exactly a turn ends
DEMO_INSTRUCTION = "find the silver bottle"
SYSTEMS = ("demo", "robot", "verifier")  # launch/NAME.launch.py
# Topics that are absolute by convention; in a robot's namespace they are the robot's own, as in Nav2.
PER_ROBOT = ("/tf", "/tf_static", "/clock")
REMAPPINGS = tuple((topic, topic[1:]) for topic in PER_ROBOT)
# Other people's stacks on the robot, and what is remapped beside each. config/stacks/NAME.yaml has the parameters.
STACKS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    # The supervisor takes twist_mux's place before the driver, and hears what the joystick's node publishes. The
    # stack's own imu has a type of its own.
    "go2_ros2_sdk": (("cmd_vel", "cmd_vel_out"), ("cmd_vel_joy", "cmd_vel"), ("imu", "imu/data")),
    "unitree_ros2": (),
}


@dataclass(frozen=True)
class Argument:
    """A launch argument of a system, and an option of the process runner."""

    name: str
    default: str
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """A process to start: a node of this package, or another program where ``command`` is not empty.

    ``respawn``: it is started again after a crash. ``optional``: its end ends nothing; the end of any other process
    ends all.
    """

    name: str  # of the node's executable, or of the program
    parameters: dict[str, Any] = field(default_factory=dict)  # over the layers; a text is read as their type
    namespace: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    layers: tuple[Path | dict[str, Any], ...] = ()  # parameter files and values; empty: the node's own file
    remappings: tuple[tuple[str, str], ...] = REMAPPINGS
    ros_arguments: tuple[str, ...] = ()
    guests: tuple[str, ...] = ()  # further nodes in the same process
    command: tuple[str, ...] = ()
    respawn: bool = False
    optional: bool = False

    @property
    def parameter_files(self) -> tuple[Path, ...]:
        files = tuple(layer for layer in self.layers if isinstance(layer, Path))
        return files or (config_directory() / f"{self.name.removesuffix('_node')}.yaml",)

    @property
    def available(self) -> bool:
        """Whether the program is installed here; a node always is."""
        return not self.command or shutil.which(self.command[0]) is not None

    @property
    def arguments(self) -> list[str]:
        """The namespace, remappings and what else there is as ROS arguments."""
        namespace = self.namespace.strip("/")
        words = ["-r", f"__ns:=/{namespace}"] if namespace else []
        for one, other in self.remappings:
            if namespace or one not in PER_ROBOT:
                words += ["-r", f"{one}:={other}"]
        return [*words, *self.ros_arguments]


def launch_file(system: str) -> Path:
    """The launch file of a system, or of a path to one; ValueError for an unknown one."""
    if system.endswith(".launch.py") and Path(system).is_file():
        return Path(system).resolve()
    if system not in SYSTEMS:
        raise ValueError(f"There is no system '{system}'; known are {', '.join(SYSTEMS)}.")
    return share_directory() / "launch" / f"{system}.launch.py"


def about(system: str) -> str:
    """What a system is, in one phrase."""
    return standin.read(launch_file(system))[1]


def arguments_of(system: str) -> list[Argument]:
    """The launch arguments of a system, those of included files after its own."""
    return list(_arguments(standin.read(launch_file(system))[0].entities).values())


def set_by_arguments(system: str, node: str) -> dict[str, str]:
    """Parameters of a node that launch arguments set: parameter -> argument."""
    return {
        name: argument
        for entity in _entities(launch_file(system))
        if isinstance(entity, standin.Node) and entity.executable == node
        for each in entity.parameters
        for name, argument in each.arguments.items()
    }


def plan(system: str, overrides: dict[str, str] | None = None) -> list[Start]:
    """The processes of a system to start, in order.

    :raises ValueError: for an unknown system or argument, or a value that is not among the choices.
    """
    return _visited(system, overrides)[0]


def values_of(system: str, overrides: dict[str, str] | None = None) -> dict[str, str]:
    """The arguments' values: the defaults, overridden; ValueError as :func:`plan`."""
    return _visited(system, overrides)[1]


def _visited(system: str, overrides: dict[str, str] | None) -> tuple[list[Start], Values]:
    given = dict(overrides or {})
    known = [argument.name for argument in arguments_of(system)]
    for name in given:
        if name not in known:
            near = meant(name, known) or f"it has {', '.join(known)}."
            raise ValueError(f"The system '{system}' has no argument '{name}'; {near}")
    declared: Values = {}
    starts = list(_walk(standin.read(launch_file(system))[0].entities, given, {}, [], declared))
    return starts, declared


def _entities(path: Path) -> Iterator[Any]:
    """Everything that a launch file and those included by it describe, whatever the conditions."""

    def inside(entities: Iterable[Any]) -> Iterator[Any]:
        for entity in entities:
            if isinstance(entity, standin.GroupAction):
                yield from inside(entity.actions)
            elif isinstance(entity, standin.IncludeLaunchDescription):
                yield from _entities(Path(entity.source.path))
            yield entity

    yield from inside(standin.read(path)[0].entities)


def _arguments(entities: Iterable[Any]) -> dict[str, Argument]:
    found: dict[str, Argument] = {}
    for entity in entities:
        if isinstance(entity, standin.DeclareLaunchArgument):
            default = text(entity.default_value, {})
            found[entity.name] = Argument(entity.name, default, entity.description, tuple(entity.choices))
        elif isinstance(entity, standin.GroupAction):
            found |= {name: each for name, each in _arguments(entity.actions).items() if name not in found}
        elif isinstance(entity, standin.IncludeLaunchDescription):
            set_here = found.keys() | dict(entity.launch_arguments).keys()
            included = _arguments(standin.read(Path(entity.source.path))[0].entities)
            found |= {name: argument for name, argument in included.items() if name not in set_here}
    return found


def _walk(
    entities: Iterable[Any],
    values: Values,
    environment: dict[str, str],
    remappings: list[tuple[str, str]],
    declared: Values,
) -> Iterator[Start]:
    """As launch visits a description: what is set on the way holds for what follows, within a group.

    ``declared`` collects the values of all arguments.
    """
    for entity in entities:
        condition = getattr(entity, "condition", None)
        if condition is not None and not condition.holds(values):
            continue
        if isinstance(entity, standin.DeclareLaunchArgument):
            value = values.setdefault(entity.name, text(entity.default_value, values))
            declared.setdefault(entity.name, value)
            if entity.choices and value not in entity.choices:
                near = meant(value, entity.choices)
                known = f"choose from {', '.join(entity.choices)}" + (f"; {near}" if near else ".")
                raise ValueError(f"'{value}' is no {entity.name}; {known}")
        elif isinstance(entity, standin.SetEnvironmentVariable):
            environment[entity.name] = text(entity.value, values)
        elif isinstance(entity, standin.SetRemap):
            remappings.append((entity.src, entity.dst))
        elif isinstance(entity, standin.OpaqueFunction):
            entity.function(SimpleNamespace(launch_configurations=values))
        elif isinstance(entity, standin.GroupAction):
            own = values | {name: text(value, values) for name, value in entity.launch_configurations.items()}
            yield from _walk(entity.actions, own, dict(environment), list(remappings), declared)
        elif isinstance(entity, standin.IncludeLaunchDescription):
            values.update({name: text(value, values) for name, value in entity.launch_arguments})
            included = standin.read(Path(entity.source.path))[0].entities
            yield from _walk(included, values, environment, remappings, declared)
        else:
            yield _start(entity, values, dict(environment), remappings)


def _start(
    process: standin.Process, values: Values, environment: dict[str, str], remappings: list[tuple[str, str]]
) -> Start:
    options: dict[str, Any] = {
        "environment": environment, "respawn": truth(process.respawn, values), "optional": process.on_exit is None
    }  # fmt: skip
    if isinstance(process, standin.ExecuteProcess):
        return Start(process.name, command=tuple(text(word, values) for word in process.cmd), **options)
    assert isinstance(process, standin.Node)
    options |= {
        "namespace": text(process.namespace, values),
        "remappings": (*remappings, *process.remappings),
        "ros_arguments": tuple(text(word, values) for word in process.ros_arguments),
    }
    if process.package == "dsd_ros":
        source = process.parameters[0]
        layers, given = source.layers(SimpleNamespace(launch_configurations=values))
        return Start(process.executable, given, layers=tuple(layers), guests=source.nodes[1:], **options)
    start = Start(process.executable, **options)
    parameters = [
        f"{name}:={json.dumps(text(v.value, values)) if v.value_type is str else text(v.value, values)}"
        for each in process.parameters
        for name, v in each.items()
    ]
    ros = ["--ros-args", *start.arguments, *(word for each in parameters for word in ("-p", each))]
    words = (text(word, values) for word in process.arguments)
    return Start(process.executable, command=(_program(process.package, process.executable), *words, *ros), **options)


def _program(package: str, executable: str) -> str:
    """The path of another package's executable where that package is sourced; otherwise its name."""
    prefixes = os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep)
    paths = (Path(prefix, "lib", package, executable) for prefix in prefixes if prefix)
    return next((str(path) for path in paths if path.is_file()), executable)


def node_command(start: Start) -> list[str]:
    """The command line of a node, without its parameter files."""
    return [sys.executable, "-m", "dsd_ros.ros.entry", start.name, "--ros-args", *start.arguments]
