# SPDX-License-Identifier: Apache-2.0
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
from types import ModuleType, SimpleNamespace
from typing import Any

from dsd_ros.python310 import dataclass_transform

Values = dict[str, str]  # the launch configurations: argument -> value


@dataclass_transform(field_specifiers=(field,))
class Struct:
    """Makes a dataclass of each subclass."""

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclass(kw_only=kw_only)(cls)


class Substitution:
    """The base of substitutions that a launch file makes itself."""

    def perform(self, context: Any) -> str:
        raise NotImplementedError


def perform_substitutions(context: Any, substitutions: Any) -> str:
    return text(substitutions, context.launch_configurations)


def normalize_to_list_of_substitutions(value: Any) -> Any:
    return value


def text(value: Any, values: Values) -> str:
    """A substitution, a sequence of them to be joined, or plain text; a truth as "true" or "false"."""
    if isinstance(value, list | tuple):
        return "".join(text(part, values) for part in value)
    if isinstance(value, Substitution):
        return str(value.perform(SimpleNamespace(launch_configurations=values)))
    found = value.text(values) if hasattr(value, "text") else value
    return str(found).lower() if isinstance(found, bool) else str(found)


def truth(value: Any, values: Values) -> bool:
    """A substitution that gives true or false."""
    return text(value, values).lower() in ("true", "1")


class LaunchConfiguration(Struct):
    name: str

    def text(self, values: Values) -> str:
        return values[self.name]


class _Pair(Struct):
    left: Any
    right: Any


class EqualsSubstitution(_Pair):
    def text(self, values: Values) -> bool:
        return text(self.left, values) == text(self.right, values)


class NotEqualsSubstitution(_Pair):
    def text(self, values: Values) -> bool:
        return text(self.left, values) != text(self.right, values)


class AndSubstitution(_Pair):
    def text(self, values: Values) -> bool:
        return truth(self.left, values) and truth(self.right, values)


class OrSubstitution(_Pair):
    def text(self, values: Values) -> bool:
        return truth(self.left, values) or truth(self.right, values)


class NotSubstitution(Struct):
    value: Any

    def text(self, values: Values) -> bool:
        return not truth(self.value, values)


class IfElseSubstitution(Struct):
    condition: Any
    if_value: Any
    else_value: Any

    def text(self, values: Values) -> str:
        return text(self.if_value if truth(self.condition, values) else self.else_value, values)


class IfCondition(Struct):
    value: Any

    def holds(self, values: Values) -> bool:
        return truth(self.value, values)


class LaunchDescription(Struct):
    entities: Sequence[Any]


class DeclareLaunchArgument(Struct):
    name: str
    default_value: Any
    description: str
    choices: Sequence[str] = ()


class SetEnvironmentVariable(Struct):
    name: str
    value: Any
    condition: IfCondition | None = None


class OpaqueFunction(Struct):
    function: Callable[[Any], Any]


class PythonLaunchDescriptionSource(Struct):
    path: str


class IncludeLaunchDescription(Struct):
    source: PythonLaunchDescriptionSource
    launch_arguments: Iterable[tuple[str, Any]] = ()


class GroupAction(Struct):
    """Launch configurations and environment variables that are set inside stay inside."""

    actions: Sequence[Any]
    launch_configurations: Mapping[str, Any] = field(default_factory=dict)


class SetRemap(Struct):
    src: str
    dst: str
    condition: IfCondition | None = None


class ParameterValue(Struct):
    value: Any
    value_type: type = str


class Process(Struct, kw_only=True):
    """What Node and ExecuteProcess have in common. Without ``on_exit`` the end of the process ends nothing."""

    condition: IfCondition | None = None
    output: str = "log"
    respawn: Any = False
    respawn_delay: float = 0.0
    on_exit: Any = None


class ExecuteProcess(Process, kw_only=True):
    cmd: Sequence[Any]
    name: str


class Node(Process, kw_only=True):
    package: str
    executable: str
    namespace: Any = ""
    parameters: Sequence[Any] = ()
    remappings: Sequence[tuple[str, str]] = ()
    arguments: Sequence[Any] = ()
    ros_arguments: Sequence[Any] = ()


def _modules() -> dict[str, ModuleType]:
    names: dict[str, tuple[Any, ...]] = {
        "launch": (LaunchDescription, Substitution),
        "launch.actions": (
            DeclareLaunchArgument, ExecuteProcess, GroupAction, IncludeLaunchDescription, OpaqueFunction,
            SetEnvironmentVariable,
        ),
        "launch.conditions": (IfCondition,),
        "launch.launch_description_sources": (PythonLaunchDescriptionSource,),
        "launch.substitutions": (
            AndSubstitution, EqualsSubstitution, IfElseSubstitution, LaunchConfiguration, NotEqualsSubstitution,
            NotSubstitution, OrSubstitution,
        ),
        "launch.utilities": (normalize_to_list_of_substitutions, perform_substitutions),
        "launch_ros": (),
        "launch_ros.actions": (Node, SetRemap),
        "launch_ros.parameter_descriptions": (ParameterValue,),
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    for name, classes in names.items():
        vars(modules[name]).update({each.__name__: each for each in classes})
    return modules


_reading = threading.RLock()


@cache
def read(path: Path) -> tuple[LaunchDescription, str]:
    """The description of a launch file, made of the classes above, and the first sentence of the file's docstring."""
    with _reading:
        modules = _modules()
        real = {name: sys.modules[name] for name in modules.keys() & sys.modules.keys()}
        sys.modules.update(modules)
        try:
            spec = importlib.util.spec_from_file_location(path.name.partition(".")[0] + "_launch", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            description = module.generate_launch_description()
        finally:
            for name in modules:
                del sys.modules[name]
            sys.modules.update(real)
    return description, (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
