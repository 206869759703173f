# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the few classes of `launch` and `launch_ros` that the files under launch/ use: no wheel has those.

An argument that a stand-in does not know is a TypeError.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class LaunchDescription:
    entities: list[Any]


@dataclass
class DeclareLaunchArgument:
    name: str
    default_value: str
    description: str
    choices: list[str] | None = None


@dataclass
class SetEnvironmentVariable:
    name: str
    value: str


@dataclass
class OpaqueFunction:
    function: Any


@dataclass
class GroupAction:
    actions: list[Any]


@dataclass
class PythonLaunchDescriptionSource:
    location: str


@dataclass
class IncludeLaunchDescription:
    source: PythonLaunchDescriptionSource
    launch_arguments: Any = ()


@dataclass
class ParameterValue:
    value: Any
    value_type: type


class Shutdown:
    pass


@dataclass(kw_only=True)
class ExecuteProcess:
    cmd: list[str]
    name: str
    output: str = "log"
    respawn: bool = False
    respawn_delay: float = 0.0
    on_exit: Any = None


@dataclass(kw_only=True)
class Node:
    package: str
    executable: str
    name: str = ""
    namespace: str = ""
    parameters: list[Any] = field(default_factory=list)
    remappings: Any = ()
    arguments: list[str] = field(default_factory=list)
    ros_arguments: list[str] = field(default_factory=list)
    output: str = "log"
    respawn: bool = False
    respawn_delay: float = 0.0
    on_exit: Any = None


def modules() -> dict[str, ModuleType]:
    places: dict[str, tuple[type, ...]] = {
        "launch": (LaunchDescription,),
        "launch.actions": (
            DeclareLaunchArgument, ExecuteProcess, GroupAction, IncludeLaunchDescription, OpaqueFunction,
            SetEnvironmentVariable, Shutdown,
        ),
        "launch.launch_description_sources": (PythonLaunchDescriptionSource,),
        "launch_ros": (),
        "launch_ros.actions": (Node,),
        "launch_ros.parameter_descriptions": (ParameterValue,),
    }  # fmt: skip
    made = {name: ModuleType(name) for name in places}
    for name, classes in places.items():
        vars(made[name]).update({each.__name__: each for each in classes})
    vars(made["launch"])["LaunchContext"] = SimpleNamespace
    return made


def launched(file: Path, given: dict[str, str]) -> list[Any]:
    """The nodes and programs that a launch file starts, as `launch` visits it with these arguments."""
    made = {**modules(), "dsd_ros.bringup.launching": None}
    before = {name: sys.modules.pop(name) for name in made if name in sys.modules}
    sys.modules.update({name: module for name, module in made.items() if module is not None})
    try:
        return list(_visited([GroupAction(_entities(file))], dict(given)))
    finally:
        for name in made:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _entities(file: Path) -> list[Any]:
    return runpy.run_path(str(file))["generate_launch_description"]().entities


def _visited(entities: list[Any], values: dict[str, str]) -> Iterator[Any]:
    for each in entities:
        if isinstance(each, GroupAction):
            yield from _visited(each.actions, dict(values))  # what is set inside stays inside
        elif isinstance(each, DeclareLaunchArgument):
            value = values.setdefault(each.name, each.default_value)
            assert not each.choices or value in each.choices, f"{each.name} is {value}"
        elif isinstance(each, OpaqueFunction):
            yield from _visited(each.function(SimpleNamespace(launch_configurations=values)), values)
        elif isinstance(each, IncludeLaunchDescription):
            values.update(each.launch_arguments)
            yield from _visited(_entities(Path(each.source.location)), values)
        elif not isinstance(each, SetEnvironmentVariable):
            yield each
