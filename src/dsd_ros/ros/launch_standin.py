"""Reads the files under launch/ where ROS 2's `launch` is not installed, by stand-ins for the few classes they use.

`ros2 launch` runs the same files with the real classes. Names and meanings are those of launch and launch_ros in ROS 2
Jazzy; an argument that a stand-in does not know is a TypeError, so that nothing in a launch file is ignored here.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

Values = dict[str, str]  # the launch configurations: argument -> value


def text(value: Any, values: Values) -> str:
    """A substitution, a sequence of them to be joined, or plain text."""
    if isinstance(value, list | tuple):
        return "".join(text(part, values) for part in value)
    return value.text(values) if hasattr(value, "text") else str(value)


def truth(value: Any, values: Values) -> bool:
    """A substitution that gives true or false."""
    return text(value, values).lower() in ("true", "1")


@dataclass(frozen=True)
class LaunchConfiguration:
    name: str

    def text(self, values: Values) -> str:
        return values[self.name]


@dataclass(frozen=True)
class EqualsSubstitution:
    left: Any
    right: Any

    def text(self, values: Values) -> str:
        return str(text(self.left, values) == text(self.right, values)).lower()


class NotEqualsSubstitution(EqualsSubstitution):
    def text(self, values: Values) -> str:
        return "false" if super().text(values) == "true" else "true"


@dataclass(frozen=True)
class AndSubstitution:
    left: Any
    right: Any

    def text(self, values: Values) -> str:
        return str(truth(self.left, values) and truth(self.right, values)).lower()


@dataclass(frozen=True)
class OrSubstitution:
    left: Any
    right: Any

    def text(self, values: Values) -> str:
        return str(truth(self.left, values) or truth(self.right, values)).lower()


@dataclass(frozen=True)
class NotSubstitution:
    value: Any

    def text(self, values: Values) -> str:
        return str(not truth(self.value, values)).lower()


@dataclass(frozen=True)
class IfElseSubstitution:
    condition: Any
    if_value: Any
    else_value: Any

    def text(self, values: Values) -> str:
        return text(self.if_value if truth(self.condition, values) else self.else_value, values)


@dataclass(frozen=True)
class IfCondition:
    value: Any

    def holds(self, values: Values) -> bool:
        return truth(self.value, values)


@dataclass(frozen=True)
class LaunchDescription:
    entities: Sequence[Any]


@dataclass(frozen=True)
class DeclareLaunchArgument:
    name: str
    default_value: Any
    description: str
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class SetEnvironmentVariable:
    name: str
    value: Any
    condition: IfCondition | None = None


@dataclass(frozen=True)
class OpaqueFunction:
    function: Callable[[Any], Any]


@dataclass(frozen=True)
class PythonLaunchDescriptionSource:
    path: str


@dataclass(frozen=True)
class IncludeLaunchDescription:
    source: PythonLaunchDescriptionSource
    launch_arguments: Iterable[tuple[str, Any]] = ()


@dataclass(frozen=True)
class Shutdown:
    """As ``on_exit``: the end of the process ends the whole system."""


@dataclass(frozen=True)
class ParameterValue:
    value: Any
    value_type: type = str


@dataclass(frozen=True, kw_only=True)
class Process:
    """What Node and ExecuteProcess have in common. Without ``on_exit`` the end of the process ends nothing."""

    condition: IfCondition | None = None
    output: str = "log"
    emulate_tty: bool = False
    respawn: bool = False
    respawn_delay: float = 0.0
    on_exit: Any = None


@dataclass(frozen=True, kw_only=True)
class ExecuteProcess(Process):
    cmd: Sequence[Any]
    name: str


@dataclass(frozen=True, kw_only=True)
class Node(Process):
    package: str
    executable: str
    namespace: Any = ""
    parameters: Sequence[str | Mapping[str, ParameterValue]] = ()
    remappings: Sequence[tuple[str, str]] = ()
    arguments: Sequence[Any] = field(default=())


def _modules() -> dict[str, ModuleType]:
    names: dict[str, tuple[Any, ...]] = {
        "launch": (LaunchDescription,),
        "launch.actions": (
            DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription, OpaqueFunction, SetEnvironmentVariable,
            Shutdown,
        ),
        "launch.conditions": (IfCondition,),
        "launch.launch_description_sources": (PythonLaunchDescriptionSource,),
        "launch.substitutions": (
            AndSubstitution, EqualsSubstitution, IfElseSubstitution, LaunchConfiguration, NotEqualsSubstitution,
            NotSubstitution, OrSubstitution,
        ),
        "launch_ros": (),
        "launch_ros.actions": (Node,),
        "launch_ros.parameter_descriptions": (ParameterValue,),
    }  # fmt: skip
    modules = {}
    for name, classes in names.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update({each.__name__: each for each in classes})
    return modules


_reading = threading.RLock()


@cache
def read(path: Path) -> tuple[LaunchDescription, str]:
    """The description of a launch file, made of the classes above, and the first sentence of the file's docstring."""
    with _reading:
        modules = _modules()
        real = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        try:
            spec = importlib.util.spec_from_file_location(path.name.partition(".")[0] + "_launch", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            description = module.generate_launch_description()
        finally:
            for name, before in real.items():
                if before is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = before
    return description, (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
