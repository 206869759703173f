# SPDX-License-Identifier: Apache-2.0
"""config/*.yaml and docs/parameters.md equal what the settings dataclasses generate."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from every import every

from dsd_ros.bringup.systems import SYSTEMS, plan
from dsd_ros.ros.settings import NODES, ManagedSettings, specs
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
FILES = generate.generated()


@every(FILES)
def test_generated_equals_committed(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == FILES[path], (
        f"{path.name} is not what the settings dataclasses generate; run `{generate.COMMAND}` and commit what it writes"
    )


def test_every_node_has_its_settings() -> None:
    sources = {path.stem for path in (ROOT / "src/dsd_ros/nodes").glob("*_node.py")}
    assert set(NODES) == sources >= {start.name for system in SYSTEMS for start in plan(system) if not start.command}


@every(NODES)
def test_a_node_declares_its_settings_and_nothing_else(node: str) -> None:
    tree = ast.parse((ROOT / "src/dsd_ros/nodes" / f"{node}.py").read_text(encoding="utf-8"))
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    declared = [ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "declare"]
    # A lifecycle node hands its settings to the base class, which declares them.
    bases = [base for item in tree.body if isinstance(item, ast.ClassDef) for base in item.bases]
    managed = [base for base in bases if isinstance(base, ast.Subscript) and ast.unparse(base.value) == "ManagedNode"]
    declared += [ast.unparse(base.slice) for base in managed]
    given = {ast.unparse(arg) for call in calls if ast.unparse(call.func) == "super().__init__" for arg in call.args}
    assert declared == [NODES[node].__name__]
    assert not managed or declared[0] in given
    assert not any(ast.unparse(call.func).endswith("declare_parameter") for call in calls)


@every(name for name, schema in NODES.items() if issubclass(schema, ManagedSettings))
def test_no_constructor_reads_what_a_configure_changes(node: str) -> None:
    """Such a change would never take effect; the parameter belongs into ``live`` or ``fixed``, or is read in `load`."""
    tree = ast.parse((ROOT / "src/dsd_ros/nodes" / f"{node}.py").read_text(encoding="utf-8"))
    (made,) = (
        method
        for item in tree.body
        if isinstance(item, ast.ClassDef) and any("ManagedNode[" in ast.unparse(base) for base in item.bases)
        for method in item.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    )
    texts = {ast.unparse(each) for each in ast.walk(made) if isinstance(each, ast.Attribute)}
    read = {text.partition("settings.")[2] for text in texts if text.startswith(("settings.", "self._settings."))}
    waiting = [spec.name for spec in specs(NODES[node]) if spec.change == "configure"]
    assert [name for name in waiting if any(f"{name}.".startswith(f"{each}.") for each in read)] == []


def flat(tree: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@every(NODES)
def test_the_parameter_file_holds_each_default_in_its_type(node: str) -> None:
    text = generate.parameter_file(node)
    found = dict(flat(yaml.safe_load(text)[f"/**/{node}"]["ros__parameters"]))
    fixed = [spec for spec in specs(NODES[node]) if not spec.varies]
    assert found == {spec.name: spec.default for spec in fixed}
    assert all(type(found[spec.name]) is spec.kind and spec.help for spec in fixed)
    assert all(f"# {spec.name}: " in text for spec in specs(NODES[node]) if spec.varies)


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    for folder in ("config", "docs"):
        (tmp_path / folder).mkdir()
    assert generate.main(["--check"]) == 1 and "draft.yaml is not what" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {path.relative_to(ROOT): text for path, text in FILES.items()}
