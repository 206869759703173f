"""docs/parameters.md, written from what the nodes declare, their parameter files and the launch arguments.

python -m tools.parameters_page docs/parameters.md      # without a file: onto the terminal
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsd_ros.cloud.settings import DocumentSettings, EngineSettings, MetricsSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.dragon.server import ServiceSettings
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.nodes import (
    bridge_node,
    decode_service,
    go2_node,
    go2_standin_node,
    memory_node,
    navigation_node,
    record_node,
    simulator_node,
    supervisor_node,
    view_node,
    visual_node,
)
from dsd_ros.paths import config_directory
from dsd_ros.ros import managed, models
from dsd_ros.ros.bringup import SYSTEMS, System
from dsd_ros.ros.parameters import ParameterSpec, specs
from dsd_ros.vlm.loading import ModelSettings

_NO_LIMIT = 1 << 62  # what an integer cannot exceed anyway is not worth telling
COMMAND = "python -m tools.parameters_page docs/parameters.md"
_HEAD = f"""# Parameters

Made from the code; do not edit it by hand: `{COMMAND}`

Every node reads its file under `config/`; launch arguments and `-p name:=value` come over it. Parameters are read-only
while a node runs, apart from those marked so. A name that the node does not have, a value of the wrong type or out of
its range ends the node with a sentence.
"""
_LAUNCH = """# Launch arguments

Of `ros2 launch dsd_ros NAME.launch.py ARGUMENT:=VALUE`, and of
`python -m dsd_ros.ros.processes NAME ARGUMENT:=VALUE`.
"""


@dataclass(frozen=True)
class Group:
    """A settings dataclass as a node declares it, behind ``prefix``."""

    schema: type
    prefix: str = ""
    defaults: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class NodePage:
    """A node, what it is for, and all that it declares. ``live``: parameters that may be set while it runs."""

    name: str
    about: str
    groups: tuple[Group, ...]
    live: tuple[ParameterSpec, ...] = ()

    @property
    def parameters(self) -> list[ParameterSpec]:
        declared = [spec for group in self.groups for spec in specs(group.schema, group.prefix, group.defaults)]
        return declared + list(self.live)


_MANAGED = Group(managed.ManagedSettings)
_MODEL = Group(ModelSettings, "model.", models.DEFAULTS)

NODES = (
    NodePage(
        "draft_node",
        "Camera, draft model, decoding, session with the verifier.",
        (
            _MANAGED,
            Group(decode_service.DraftNodeSettings),
            _MODEL,
            Group(DecodeSettings, "decode."),
            Group(LinkSettings, "link."),
        ),
    ),
    NodePage(
        "memory_node",
        "The robot's own documents, and questions answered with the cloud ([memory.md](memory.md)).",
        (
            _MANAGED,
            Group(memory_node.MemorySettings),
            _MODEL,
            Group(AggregationSettings, "answer."),
        ),
    ),
    NodePage(
        "verifier_node",
        "The target model on DDS topics. `dsd verifier` has the same settings as options.",
        (
            _MANAGED,
            _MODEL,
            Group(EngineSettings, "engine."),
            Group(MetricsSettings),
            Group(DocumentSettings),
            Group(ServiceSettings, "answers."),
        ),
    ),
    NodePage(
        "bridge_node",
        "Carries the topics to a verifier behind a websocket.",
        (_MANAGED, Group(bridge_node.BridgeSettings)),
    ),
    NodePage(
        "navigation_node",
        "Turns verified replies into motion ([navigation.md](navigation.md)).",
        (
            _MANAGED,
            Group(navigation_node.ControlSettings),
            Group(navigation_node.RunSettings, "run."),
            Group(navigation_node.MotionSettings, "motion."),
            Group(navigation_node.GoalMemorySettings, "memory."),
        ),
    ),
    NodePage(
        "supervisor_node",
        "The last word on every motion ([safety.md](safety.md)).",
        (
            Group(supervisor_node.SupervisorSettings),
            Group(supervisor_node.Limits, "limit."),
            Group(supervisor_node.Requirements, "require."),
            Group(supervisor_node.DepthView, "depth."),
            Group(supervisor_node.Timeouts, "timeout."),
            Group(supervisor_node.Fallback),
        ),
    ),
    NodePage(
        "go2_node",
        "Drives a Unitree Go2 ([go2.md](go2.md)).",
        (
            _MANAGED,
            Group(go2_node.Go2NodeSettings),
            Group(go2_node.Go2Settings, "drive."),
            Group(go2_node.Limits, "limits."),
        ),
    ),
    NodePage(
        "simulator_node",
        "The simulated Go2 and its world.",
        (Group(simulator_node.SimulatorSettings),),
        (ParameterSpec("camera_on", bool, True, "false: the camera falls silent, to rehearse its loss"),),
    ),
    NodePage(
        "go2_standin_node",
        "The simulated Go2 behind the real robot's protocol.",
        (Group(go2_standin_node.StandinSettings),),
        (ParameterSpec("fault", str, "none", "what goes wrong now", choices=go2_standin_node._FAULTS),),
    ),
    NodePage(
        "record_node",
        "Writes a bag of the run ([bags.md](bags.md)).",
        (Group(record_node.RecordSettings),),
    ),
    NodePage("visual_node", "What RViz shows.", (Group(visual_node.VisualSettings),)),
    NodePage("view_node", "The web view.", (Group(view_node.ViewSettings),)),
)  # fmt: skip


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    parts += [_node(node) for node in NODES]
    parts.append(_LAUNCH)
    parts += [_system(system) for system in SYSTEMS.values()]
    return "\n".join(parts)


def _node(node: NodePage) -> str:
    file = config_directory() / f"{node.name.removesuffix('_node')}.yaml"
    written = flat(yaml.safe_load(file.read_text(encoding="utf-8"))[f"/**/{node.name}"]["ros__parameters"])
    arguments = _arguments_of(node.name)
    rows = []
    for spec in node.parameters:
        default = _said(spec.default)
        if written.get(spec.name, spec.default) != spec.default:
            default += f"; in the file {_said(written[spec.name])}"
        notes = [spec.help]
        if spec in node.live:
            notes.append("may be set while the node runs")
        if spec.name in arguments:
            notes.append(f"launch argument `{arguments[spec.name]}`")
        rows.append((f"`{spec.name}`", default, _allowed(spec), "; ".join(notes)))
    head = f"## `{node.name}`\n\n{node.about} File: [config/{file.name}](../config/{file.name})\n\n"
    return head + _table(("parameter", "default", "allowed", "meaning"), rows)


def _system(system: System) -> str:
    rows = [(f"`{a.name}`", _said(a.default), ", ".join(f"`{c}`" for c in a.choices), a.help) for a in system.arguments]
    return f"## `{system.name}`: {system.help}\n\n" + _table(("argument", "default", "allowed", "meaning"), rows)


def _arguments_of(node: str) -> dict[str, str]:
    return {
        target.partition(".")[2]: argument.name
        for system in SYSTEMS.values()
        for argument in system.arguments
        for target in argument.targets
        if target.partition(".")[0] == node
    }


def _allowed(spec: ParameterSpec) -> str:
    if spec.choices:
        return ", ".join(f"`{choice}`" for choice in spec.choices)
    kind = {bool: "bool", int: "int", float: "float", str: "text"}[spec.kind]
    if spec.low is None and spec.high is None:
        return kind
    if spec.high is None or spec.high >= _NO_LIMIT:
        return f"{kind}, from {spec.low:g}"
    if spec.low is None:
        return f"{kind}, up to {spec.high:g}"
    return f"{kind}, {spec.low:g} to {spec.high:.10g}"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    return "empty" if value == "" else f"`{value}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A parameter file's tree by full names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def main() -> None:
    """Command line: the file to write."""
    if len(sys.argv) > 2:
        sys.exit(f"usage: {COMMAND}")
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
