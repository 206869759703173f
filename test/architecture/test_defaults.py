# SPDX-License-Identifier: Apache-2.0
"""Each default is written once: no other class or function of the product repeats it as a literal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.logs import LogSettings
from dsd_ros.ros.settings import NODES, specs

SOURCE = Path(__file__).resolve().parents[2] / "src" / "dsd_ros"
SETTINGS = {spec.name.rpartition(".")[2] for node in NODES.values() for spec in specs(node)}
SETTINGS |= {item.name for schema in (VerifierSettings, LogSettings) for item in fields(schema)}
# (file, class or function, name): the same name for something else.
OTHERS = {
    ("decoding/modes.py", "Mode", "draft_length"): "what the setting's own default, preset, refers to",
    ("decoding/settings.py", "SamplingSettings", "top_p"): "where the default of top_p stands",
    ("dragon/answers.py", "AnswerStatistics", "attempts"): "a count",
    ("dragon/documents/embedding.py", "__init__", "device"): "the embedding's",
    ("robot/go2/protocol.py", "robot_state", "velocity_frame"): "the protocol's",
    ("robot/sim/driver.py", "__init__", "rate"): "simulated seconds per second, without a node",
    ("ros/running.py", "run_main", "threads"): "of an executor",
    ("ros/running.py", "run_node", "threads"): "of an executor",
    ("wire/messages.py", "Draft", "evidence"): "bytes of a message",
    ("wire/messages.py", "SessionRequest", "exit_policy"): "the protocol's",
}


def literal(node: ast.expr | None) -> bool:
    """Whether this is a constant that says something: no None, no empty text, no switch that is off."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and node.value not in (None, "", False)


def repeated(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class or function, name) of each literal default of something that has a setting's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = node.args.posonlyargs + node.args.args
            defaults = list(zip(reversed(positional), reversed(node.args.defaults), strict=False))
            defaults += list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))
            yield from ((node.name, arg.arg) for arg, value in defaults if arg.arg in SETTINGS and literal(value))
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
                    continue
                value = item.value
                if isinstance(value, ast.Call) and ast.unparse(value.func) != "option" and value.args:
                    value = value.args[0]  # a flag of the command line
                if item.target.id in SETTINGS and literal(value):
                    yield node.name, item.target.id


def test_a_default_is_not_repeated() -> None:
    found = {
        (str(path.relative_to(SOURCE)), owner, name)
        for path in SOURCE.rglob("*.py")
        for owner, name in repeated(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found <= OTHERS.keys(), "read these defaults from the settings dataclass"
