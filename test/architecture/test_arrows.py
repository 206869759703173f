# SPDX-License-Identifier: Apache-2.0
"""Imports between rooms point one way, and code that reads untrusted bytes cannot execute them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from every import every

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dsd_ros"
MODULES = sorted(SOURCE.rglob("*.py"))

# Modules of the package itself.
TOP = {"", *(path.stem for path in SOURCE.glob("*.py"))}
# Room -> the rooms it may import, itself and the package's own modules apart.
ARROWS = {
    "decoding": set(),
    "vlm": {"decoding"},
    "wire": {"decoding"},
    "edge": {"decoding", "vlm", "wire"},
    "cloud": {"decoding", "vlm", "wire"},
    "dragon": {"decoding", "vlm", "wire"},
    "navigation": set(),
    "robot": set(),
}
for _room in ("ros", "bringup", "observe", "nodes", "cli"):
    ARROWS[_room] = set(ARROWS)

ROS = {
    *("action_msgs", "builtin_interfaces", "cv_bridge", "diagnostic_msgs", "dsd_msgs", "geometry_msgs"),
    *("lifecycle_msgs", "nav2_msgs", "nav_msgs", "rcl_interfaces", "rclpy", "rosgraph_msgs", "sensor_msgs"),
    *("std_msgs", "std_srvs", "tf2_msgs", "unitree_api", "unitree_go", "visualization_msgs"),
}
# Package -> the only rooms that may import it.
ONLY_IN = {
    **{name: {"nodes", "ros", "observe/ros"} for name in ROS},
    "mujoco": {"robot"},
    "websockets": {"wire", "cloud"},
    "prometheus_client": {"cloud"},
    "torch": {"decoding", "vlm", "wire", "edge", "cloud", "dragon", "ros", "nodes", "cli"},
    "transformers": {"vlm", "dragon"},
    "vllm": {"cloud/vllm"},
}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load"), ("os", "system")}


def room_of(module: str) -> str:
    """The room of a dotted name such as ``dsd_ros.edge.session``; "" for the package's own modules."""
    room = ([*module.split("."), ""])[1]
    return "" if room in TOP or room.startswith("__") else room


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module imports, inside functions and type checks too."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_every_room_is_in_the_table() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} == ARROWS.keys()


@every(MODULES, name_of)
def test_imports_follow_the_arrows(path: Path) -> None:
    """Nothing of the product imports its laboratory: a robot has none."""
    room = room_of(dotted(path))
    for line, name in imports(path):
        top = name.split(".")[0]
        if top == "dsd_ros":
            target = room_of(name)
            allowed = target in ("", room) or target in ARROWS.get(room, set())
            assert allowed, f"line {line}: {room or 'the package itself'} must not import {name}"
        elif top in ONLY_IN:
            inside = any(name_of(path).startswith(f"{place}/") for place in ONLY_IN[top])
            assert inside, f"line {line}: {top} is not for {room}"
        assert top != "dsd_lab", f"line {line} imports {name}"


@every(MODULES, name_of)
def test_nothing_runs_what_it_reads(path: Path) -> None:
    for line, name in imports(path):
        assert name.split(".")[0] not in UNSAFE_MODULES, f"line {line} imports {name}"
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        where = f"line {node.lineno}"
        if isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "__import__"), f"{where} calls {node.func.id}"
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            call = (node.func.value.id, node.func.attr)
            assert call not in UNSAFE_CALLS, f"{where} calls {'.'.join(call)}"
        for keyword in node.keywords:
            true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            unsafe = keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and true
            assert not unsafe, f"{where} sets {keyword.arg}=True"
