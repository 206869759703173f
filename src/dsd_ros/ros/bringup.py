"""Which processes make up a system, and how each is started: what the files under launch/ say, read without `launch`.

Imports nothing of ROS, so that the command line and the process runner can read it anywhere.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsd_ros.paths import config_directory, share_directory
from dsd_ros.ros import launch_standin as standin
from dsd_ros.ros.launch_standin import Values, text

TRANSPORTS = ("dds", "websocket")
STORAGES = ("mcap", "sqlite3")  # of bags
ROBOTS = ("simulated", "go2-standin")  # of the demo
DEMO_SEED = 24  # of a world where the shipped target does not depend on how exactly a turn ends
DEMO_INSTRUCTION = "find the silver bottle"
SYSTEMS = ("demo", "robot", "verifier")  # launch/NAME.launch.py
# Topics that are absolute by convention; in a robot's namespace they are the robot's own, as in Nav2.
PER_ROBOT = ("/tf", "/tf_static", "/clock")
REMAPPINGS = tuple((topic, topic[1:]) for topic in PER_ROBOT)


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
    parameters: dict[str, Any] = field(default_factory=dict)  # over those of the files; a text is read as their type
    namespace: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()  # parameter files; empty: the node's own
    remappings: tuple[tuple[str, str], ...] = REMAPPINGS
    command: tuple[str, ...] = ()
    respawn: bool = False
    optional: bool = False

    @property
    def parameter_files(self) -> tuple[Path, ...]:
        return self.files or (config_directory() / f"{self.name.removesuffix('_node')}.yaml",)

    @property
    def available(self) -> bool:
        """Whether the program is installed here; a node always is."""
        return not self.command or shutil.which(self.command[0]) is not None

    @property
    def arguments(self) -> list[str]:
        """The namespace and remappings as ROS arguments."""
        namespace = self.namespace.strip("/")
        words = ["-r", f"__ns:=/{namespace}"] if namespace else []
        for one, other in self.remappings if namespace else ():
            words += ["-r", f"{one}:={other}"]
        return words


def launch_file(system: str) -> Path:
    """The launch file of a system; ValueError for an unknown one."""
    if system not in SYSTEMS:
        raise ValueError(f"There is no system '{system}'; known are {', '.join(SYSTEMS)}.")
    return share_directory() / "launch" / f"{system}.launch.py"


def about(system: str) -> str:
    """What a system is, in one phrase."""
    return standin.read(launch_file(system))[1]


def arguments_of(system: str) -> list[Argument]:
    """The launch arguments of a system, those of included files after its own."""
    return list(_arguments(launch_file(system)).values())


def set_by_arguments(system: str, node: str) -> dict[str, str]:
    """Parameters of a node that launch arguments set: parameter -> argument."""
    return {
        name: value.value.name
        for entity in _entities(launch_file(system))
        if isinstance(entity, standin.Node) and entity.executable == node
        for each in entity.parameters
        if isinstance(each, dict)
        for name, value in each.items()
        if isinstance(value.value, standin.LaunchConfiguration)
    }


def plan(system: str, overrides: dict[str, str] | None = None) -> list[Start]:
    """The processes of a system to start, in order.

    :raises ValueError: for an unknown system or argument, or a value that is not among the choices.
    """
    return list(_walk(launch_file(system), _given(system, overrides), {}))


def values_of(system: str, overrides: dict[str, str] | None = None) -> dict[str, str]:
    """The arguments' values: the defaults, overridden; ValueError as :func:`plan`."""
    values = _given(system, overrides)
    list(_walk(launch_file(system), values, {}))
    return values


def _given(system: str, overrides: dict[str, str] | None) -> Values:
    known = [argument.name for argument in arguments_of(system)]
    for name in overrides or {}:
        if name not in known:
            raise ValueError(f"The system '{system}' has no argument '{name}'; it has {', '.join(known)}.")
    return dict(overrides or {})


def _entities(path: Path) -> Iterator[Any]:
    """Everything that a launch file and those included by it describe, whatever the conditions."""
    for entity in standin.read(path)[0].entities:
        if isinstance(entity, standin.IncludeLaunchDescription):
            yield from _entities(Path(entity.source.path))
        yield entity


def _arguments(path: Path) -> dict[str, Argument]:
    found: dict[str, Argument] = {}
    for entity in standin.read(path)[0].entities:
        if isinstance(entity, standin.DeclareLaunchArgument):
            default = text(entity.default_value, {})
            found[entity.name] = Argument(entity.name, default, entity.description, tuple(entity.choices))
        elif isinstance(entity, standin.IncludeLaunchDescription):
            set_here = found.keys() | dict(entity.launch_arguments).keys()
            included = _arguments(Path(entity.source.path))
            found |= {name: argument for name, argument in included.items() if name not in set_here}
    return found


def _walk(path: Path, values: Values, environment: dict[str, str]) -> Iterator[Start]:
    """As launch visits a description: ``values`` and ``environment`` grow on the way."""
    for entity in standin.read(path)[0].entities:
        condition = getattr(entity, "condition", None)
        if condition is not None and not condition.holds(values):
            continue
        if isinstance(entity, standin.DeclareLaunchArgument):
            value = values.setdefault(entity.name, text(entity.default_value, values))
            if entity.choices and value not in entity.choices:
                raise ValueError(f"'{value}' is no {entity.name}; choose from {', '.join(entity.choices)}.")
        elif isinstance(entity, standin.SetEnvironmentVariable):
            environment[entity.name] = text(entity.value, values)
        elif isinstance(entity, standin.OpaqueFunction):
            entity.function(SimpleNamespace(launch_configurations=values))
        elif isinstance(entity, standin.IncludeLaunchDescription):
            values.update({name: text(value, values) for name, value in entity.launch_arguments})
            yield from _walk(Path(entity.source.path), values, environment)
        else:
            yield _start(entity, values, dict(environment))


def _start(process: standin.Process, values: Values, environment: dict[str, str]) -> Start:
    options: dict[str, Any] = {
        "environment": environment, "respawn": process.respawn, "optional": process.on_exit is None
    }  # fmt: skip
    if isinstance(process, standin.ExecuteProcess):
        return Start(process.name, command=tuple(text(word, values) for word in process.cmd), **options)
    assert isinstance(process, standin.Node)
    given = {name: text(v.value, values) for each in process.parameters if isinstance(each, dict)
             for name, v in each.items()}  # fmt: skip
    files = tuple(Path(each) for each in process.parameters if isinstance(each, str))
    namespace = text(process.namespace, values)
    start = Start(process.executable, given, namespace, files=files, remappings=tuple(process.remappings), **options)
    if process.package == "dsd_ros":
        return start
    ros = ["--ros-args", *start.arguments] if start.arguments else []
    words = (text(word, values) for word in process.arguments)
    return Start(process.executable, command=(process.executable, *words, *ros), **options)


def node_command(start: Start) -> list[str]:
    """The command line of a node, without its parameter files."""
    return [sys.executable, "-m", "dsd_ros.ros.entry", start.name, "--ros-args", *start.arguments]
