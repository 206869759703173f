"""docs/parameters.md is what the nodes declare, all of it, and what their parameter files hold."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from dsd_ros.ros.bringup import SYSTEMS
from tools import parameters_page
from tools.parameters_page import NODES, flat

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parameters.md"


def test_the_page_is_what_the_code_declares() -> None:
    assert PAGE.read_text(encoding="utf-8") == parameters_page.page(), (
        f"docs/parameters.md is not what the code declares; write it again with "
        f"{parameters_page.COMMAND}, and commit it"
    )


def test_every_node_is_on_the_page() -> None:
    sources = {path.stem for path in (ROOT / "src/dsd_ros/nodes").glob("*_node.py")}
    started = {entry.executable for system in SYSTEMS.values() for entry in system.nodes}
    assert {node.name for node in NODES} == sources >= started


@cache
def declared(module: str) -> tuple[set[tuple[str, str]], set[str]]:
    """(settings class, prefix) of every ``declare`` in a node's module, and the parameters declared one by one."""
    tree = ast.parse(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))
    groups: set[tuple[str, str]] = set()
    single: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            if any(isinstance(base, ast.Name) and base.id == "ManagedNode" for base in node.bases):
                groups.add(("ManagedSettings", ""))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "declare":
                schema = node.args[1]
                assert isinstance(schema, ast.Name)
                prefix = ast.literal_eval(node.args[2]) if len(node.args) > 2 else ""
                groups.add((schema.id, prefix))
            elif node.func.id == "declare_model":
                groups.add(("ModelSettings", "model."))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "declare_parameter":
            single.add(ast.literal_eval(node.args[0]))
    return groups, single


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_nothing_that_a_node_declares_is_missing(node: parameters_page.NodePage) -> None:
    module = f"dsd_ros.nodes.{node.name}"
    __import__(module)
    groups, single = declared(module)
    assert {(group.schema.__name__, group.prefix) for group in node.groups} == groups
    assert {spec.name for spec in node.live} == single


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.name)
def test_the_parameter_file_holds_each_of_them(node: parameters_page.NodePage) -> None:
    file = ROOT / "config" / f"{node.name.removesuffix('_node')}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))[f"/**/{node.name}"]
    assert {spec.name for spec in node.parameters} == set(flat(content["ros__parameters"]))
    assert all(spec.help for spec in node.parameters)


def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parameters_page", str(tmp_path / "page.md")])
    parameters_page.main()
    monkeypatch.setattr(sys, "argv", ["parameters_page"])
    parameters_page.main()
    assert capsys.readouterr().out == (tmp_path / "page.md").read_text() == parameters_page.page()
