# SPDX-License-Identifier: Apache-2.0
"""docs/topics.md lists what the nodes create: names, types, ends and quality of service."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections import defaultdict
from typing import Any

import pytest
from builtin_interfaces.msg import Duration
from graph import End, all_ends
from pages import DOCS, ROOT, text_of

ELSEWHERE = {"record_node", "view_node"}  # not made here: one writes a bag, the other serves a page


def rows(heading: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of every table whose head begins so."""
    found: dict[str, list[str]] = {}
    for table in re.findall(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for line in table.splitlines():
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert name.strip("`") not in found, f"{name} is listed twice"
            found[name.strip("`")] = cells
    return found


PAGE = text_of(DOCS / "topics.md")


def names(cell: str) -> set[str]:
    return {f"{name}_node" for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture
def ends(ros_domain: int) -> frozenset[End]:
    return all_ends()


def test_the_page_is_what_the_nodes_create(ends: frozenset[End]) -> None:
    by_name: dict[tuple[bool, str], dict[str, list[End]]] = defaultdict(lambda: defaultdict(list))
    for end in ends:
        by_name[end.way in ("serves", "calls"), end.name][end.way].append(end)
    for service, listed in ((False, rows("topic")), (True, rows("service"))):
        there = {name for is_service, name in by_name if is_service == service}
        assert set(listed) == there
        out, into = ("serves", "calls") if service else ("publishes", "listens")
        for name, (kind, source, drain, *rest) in listed.items():
            made = by_name[service, name]
            everybody = [*made[out], *made[into]]
            assert {end.kind.replace("/msg/", "/").replace("/srv/", "/") for end in everybody} == {kind.strip("`")}, (
                name
            )
            for cell, way in ((source, out), (drain, into)):
                assert {end.node for end in made[way]} - ELSEWHERE == names(cell) - ELSEWHERE, f"{name}: {way}"
            if not service:
                assert {end.qos for end in made[out] or made[into]} == set(rest[0].split("; ")), name


def test_what_only_this_project_has_is_under_its_own_prefix(ends: frozenset[End]) -> None:
    own = {end.name for end in ends if end.kind.startswith("dsd_msgs/")} | set(rows("action"))
    assert own and all(name.startswith("dsd/") for name in own)


def test_every_listener_can_be_served(ends: frozenset[End]) -> None:
    offered: dict[str, list[End]] = defaultdict(list)
    for end in ends:
        if end.way == "publishes":
            offered[end.name].append(end)
    for end in ends:
        for source in offered[end.name] if end.way == "listens" else ():
            assert source.reliable or not end.reliable, f"{end} never hears {source}"
            assert source.latched or not end.latched, f"{end} never hears {source}"


def test_the_actions_are_those_of_the_code() -> None:
    served: dict[str, str] = {}
    for path in (ROOT / "src/dsd_ros/nodes").glob("*_node.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ActionServer":
                kind: Any = node.args[1]
                served[ast.literal_eval(node.args[2])] = f"`dsd_msgs/{kind.id}`"
    assert {name: cells[0] for name, cells in rows("action").items()} == served


def test_the_foxglove_layout_shows_what_is_published(ends: frozenset[End]) -> None:
    layout = json.loads((ROOT / "config" / "dsd.foxglove.json").read_text())
    panels = layout["configById"]

    def leaves(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        assert node["direction"] in ("row", "column") and 10 <= node["splitPercentage"] <= 90
        return leaves(node["first"]) + leaves(node["second"])

    shown = leaves(layout["layout"])
    assert sorted(shown) == sorted(panels)
    assert {name.partition("!")[0] for name in shown} == {
        "3D", "Image", "StateTransitions", "Plot", "DiagnosticSummary",
    }  # fmt: skip
    published = {"/" + end.name.lstrip("/"): end.kind for end in ends if end.way == "publishes"}
    scene = panels["3D!dsdmap"]["topics"]
    assert all(settings["visible"] for settings in scene.values())
    wanted = {*scene, panels["Image!dsdview"]["imageMode"]["imageTopic"]}
    wanted.add(panels["DiagnosticSummary!dsdnodes"]["topicToRender"])
    assert wanted <= published.keys(), wanted - published.keys()
    for panel in ("StateTransitions!dsdsafety", "Plot!dsdtokens"):
        for path in panels[panel]["paths"]:
            topic, *fields = path["value"].split(".")
            package, _, name = published[topic].split("/")
            message = getattr(importlib.import_module(f"{package}.msg"), name)()
            for field in fields:
                message = getattr(message, field)
            assert isinstance(message, bool | int | float | Duration), path  # Foxglove plots a duration in seconds
