# SPDX-License-Identifier: Apache-2.0
"""The laboratory's rooms: imports point one way, and no folder or function is too large."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LAB = Path(__file__).resolve().parents[2] / "src" / "dsd_lab"
MODULES = sorted(LAB.rglob("*.py"))
ROOMS = {path.parent.name for path in LAB.glob("*/__init__.py")}
MAX_FILES, MAX_FUNCTION_LINES = 25, 60
# Room -> the rooms it may import; every room may import the package's own modules, which import no room.
ARROWS: dict[str, set[str]] = {
    "links": set(),
    "papers": set(),
    "robot": set(),
    "worlds": set(),
    "train": {"worlds"},
    "pair": {"worlds", "train"},
    "bench": {"links", "papers", "worlds", "train", "pair"},
}
ARROWS["reproduce"] = {"bench", *ARROWS["bench"]}
ARROWS["figures"] = {"reproduce", *ARROWS["reproduce"]}
ARROWS["dragon"] = {"bench", *ARROWS["bench"]}
ARROWS["faults"] = {"dragon", "robot", *ARROWS["dragon"]}
ARROWS["cli"] = {"faults", "figures", "reproduce", *ARROWS["faults"]}


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of everything that a module imports from the laboratory, imports inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "dsd_lab" and len(parts) > 1 and parts[1] in ROOMS:
                yield node.lineno, parts[1]


def test_every_room_has_its_arrows_and_they_form_no_circle() -> None:
    assert ARROWS.keys() == ROOMS
    left = {room: set(targets) for room, targets in ARROWS.items()}
    while left:
        free = {room for room, targets in left.items() if not targets & left.keys()}
        assert free, f"a circle among {', '.join(left)}"
        left = {room: targets for room, targets in left.items() if room not in free}


def test_imports_follow_the_arrows() -> None:
    for path in MODULES:
        room = path.relative_to(LAB).parts[0] if path.parent != LAB else ""
        for line, target in imported_rooms(path):
            allowed = target == room or target in ARROWS.get(room, set())
            assert allowed, f"{path.relative_to(LAB)}:{line}: {room or 'the package itself'} must not import {target}"


def test_folders_and_functions_stay_small() -> None:
    files: dict[Path, int] = defaultdict(int)
    found = []
    for path in MODULES:
        files[path.parent] += 1
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(LAB)}: {node.name} has {lines} lines")
    found += [f"{folder.relative_to(LAB)} has {n} files" for folder, n in files.items() if n > MAX_FILES]
    assert not found
