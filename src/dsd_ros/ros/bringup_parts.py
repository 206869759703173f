"""What the bring-up table is made of: arguments, nodes, programs, systems. Imports nothing of ROS."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsd_ros.paths import config_directory


@dataclass(frozen=True)
class Argument:
    """One argument of a system: a launch argument, and an option of the process runner.

    ``targets`` names the parameters that it sets, as "node.parameter"; ``environment`` a variable of all
    processes, where it is not empty. With neither it chooses nodes, or is the namespace.
    """

    name: str
    default: str
    help: str
    targets: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    environment: str = ""


@dataclass(frozen=True)
class NodeEntry:
    """One node: its executable's name (also the module's and the node's) and its parameter file.

    ``respawn``: a crash of it may be recovered, so it is started again (see respawn.py). ``optional``: its end ends
    nothing. The end of any other node is the end of all. ``guest_of``: where that node is started, too, this one
    runs in its process, which reads both parameter files.
    """

    executable: str
    config: str
    only_with: tuple[str, str] | None = None  # (argument, value): started only then; "*": any value, "!x": any but x
    respawn: bool = False
    optional: bool = False
    guest_of: str = ""

    def wanted(self, values: dict[str, str]) -> bool:
        if self.only_with is None:
            return True
        name, value = self.only_with
        if value.startswith("!"):
            return values[name] != value[1:]
        return bool(values[name]) if value == "*" else values[name] == value

    @property
    def parameter_file(self) -> Path:
        return config_directory() / self.config


@dataclass(frozen=True)
class Program:
    """A `dsd` command that belongs to a system, or RViz. ``options``: (option, argument that gives its value)."""

    name: str
    command: str
    options: tuple[tuple[str, str], ...]
    only_with: tuple[str, str] | None = None
    respawn: bool = False
    optional: bool = False  # its end is the end of nothing else

    def wanted(self, values: dict[str, str]) -> bool:
        return self.only_with is None or values[self.only_with[0]] == self.only_with[1]


@dataclass(frozen=True)
class System:
    """A set of nodes that is started and ended together."""

    name: str
    help: str
    nodes: tuple[NodeEntry, ...]
    arguments: tuple[Argument, ...]
    programs: tuple[Program, ...] = ()

    def defaults(self) -> dict[str, str]:
        return {argument.name: argument.default for argument in self.arguments}


@dataclass(frozen=True)
class NodeStart:
    """A node as it is to be started: the entry and the parameters that arguments set."""

    entry: NodeEntry
    parameters: dict[str, str] = field(default_factory=dict)
    namespace: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    guests: tuple[NodeEntry, ...] = ()  # that run in its process
