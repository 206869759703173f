# SPDX-License-Identifier: Apache-2.0
"""dsd_msgs: in ROS style, bounded, and the same schema as the wire's."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec
from every import every

from dsd_msgs import action, msg
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.navigation.run.actions import KINDS
from dsd_ros.navigation.run.records import Phase
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.wire import messages as wire
from tools import msg_files

DSD_MSGS = Path(__file__).resolve().parents[2] / "src" / "dsd_msgs"
DEFINITIONS = sorted(path for folder in ("msg", "srv", "action") for path in (DSD_MSGS / folder).iterdir())

WIRE_MESSAGES = list(wire.Message.__args__)
PUBLIC = [path for path in DEFINITIONS if path.stem not in {struct.__name__ for struct in msg_files.STRUCTS}]
UNIT = re.compile(r"(_|\b)(s|ms|us|ns|sec|secs|seconds|deg|degrees|cm|mm|percent)$")
UNIT_IN_WORDS = re.compile(r"\b(seconds|milliseconds|ms|degrees|centimetres|cm)\b|, s\b")
DURATION = re.compile(r"(_|\b)(time|times|timeout|delay|age|offset|time_limit|duration)$")

# The SHA-256 of all files without their comments: robots and bags use these definitions.
IN_USE = "bb948162adac3d5dfe821ff1f946e478ec522d982e2689747d1ba3c084d57a68"


def bare_lines(path: Path) -> list[str]:
    """The lines of a definition without comments; empty ones are left out."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def fields(path: Path) -> Iterator[tuple[str, str]]:
    """(definition, comment) of every field and constant."""
    for line in path.read_text(encoding="utf-8").splitlines():
        definition, _, comment = line.partition("#")
        if definition.strip() and definition.strip() != "---":
            yield definition.strip(), comment.strip()


def test_definitions_are_those_in_use() -> None:
    lines = [f"{path.name} {' '.join(line.split())}" for path in DEFINITIONS for line in bare_lines(path)]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == IN_USE, "is the change meant? see git diff"


@every(DEFINITIONS)
def test_instructions_are_bounded_as_everywhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"at most (\d+) characters", text)} <= {str(MAX_INSTRUCTION_CHARS)}
    assert {*re.findall(r"string<=(\d+) (?:instruction|question)\b", text)} <= {str(4 * MAX_INSTRUCTION_CHARS)}


@every(msg_files.STRUCTS)
def test_msg_files_are_generated_from_the_schema(struct: type[msgspec.Struct]) -> None:
    committed = (msg_files.FOLDER / f"{struct.__name__}.msg").read_text(encoding="utf-8")
    assert committed == msg_files.definition(struct), "run python -m tools.msg_files"


@every(PUBLIC)
def test_public_interfaces_have_si_units_and_durations(path: Path) -> None:
    for definition, comment in fields(path):
        kind, name = re.split(r"(?<!<)=", definition)[0].split()
        assert not UNIT.search(name), f"{path.name}: '{name}' names a unit; use m, rad or builtin_interfaces/Duration"
        words = re.sub(r'"[^"]*"', "", comment)  # the grammar's own text is quoted
        assert not UNIT_IN_WORDS.search(words), f"{path.name}: {comment}"
        is_duration = kind.partition("[")[0] == "builtin_interfaces/Duration"
        assert is_duration == bool(DURATION.search(name)), f"{path.name}: '{kind} {name}'"


def test_the_readme_tells_public_interfaces_from_the_wires() -> None:
    rows = [
        line.split("|") for line in (DSD_MSGS / "README.md").read_text(encoding="utf-8").splitlines() if "|" in line
    ]
    found = {row[1].strip(): set(re.findall(r"\w+", row[2])) for row in rows[2:]}
    assert found.pop("public") == {path.stem for path in PUBLIC}
    assert set().union(*found.values()) == {struct.__name__ for struct in msg_files.STRUCTS}


def kind_of_ros(type_name: str) -> str:
    if type_name.startswith("sequence"):
        return "bytes" if type_name.startswith("sequence<uint8") else "list"
    for kind, prefix in {"int": "uint", "float": "double", "str": "string", "bool": "bool"}.items():
        if type_name.startswith(prefix):
            return kind
    return type_name


def wire_fields(struct: type[msgspec.Struct]) -> dict[str, tuple[str, int | None]]:
    """name -> (kind, longest length or None)."""
    found = {}
    for name, hint in get_type_hints(struct, include_extras=True).items():
        if name in struct.__struct_fields__:
            base = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
            limits = [meta.max_length for meta in getattr(hint, "__metadata__", ())]
            found[name] = ((get_origin(base) or base).__name__, limits[-1] if limits else None)
    return found


@every(DEFINITIONS)
def test_every_field_is_explained_and_bounded(path: Path) -> None:
    listed = (DSD_MSGS / "CMakeLists.txt").read_text()
    assert f'"{path.parent.name}/{path.name}"' in listed
    assert path.read_text().startswith("# ")
    for definition, comment in fields(path):
        explained = comment or re.fullmatch(r"\w+ [A-Z_]+=\d+", definition)  # a constant's name may say it all
        assert explained, f"{path.name}: '{definition}' has no comment"
        assert "[]" not in definition or definition.startswith("uint8[] "), (
            f"{path.name}: '{definition}' is not bounded"
        )
        assert not re.match(r"w?string\s", definition), f"{path.name}: '{definition}' is not bounded"


@every(WIRE_MESSAGES)
def test_wire_and_ros_messages_mirror_each_other(struct: type[msgspec.Struct]) -> None:
    name = struct.__name__
    ros = getattr(msg, name).get_fields_and_field_types()
    on_the_wire = wire_fields(struct)
    assert list(on_the_wire) == list(ros)
    for key, (kind, _) in on_the_wire.items():
        assert kind_of_ros(ros[key]) == kind, f"{name}.{key}"


@every(WIRE_MESSAGES)
def test_ros_bounds_hold_what_the_wire_allows(struct: type[msgspec.Struct]) -> None:
    ros = getattr(msg, struct.__name__).get_fields_and_field_types()
    for name, (_, longest) in wire_fields(struct).items():
        bound = re.search(r"(?:<|, )(\d+)>$", ros[name])
        if longest is not None and longest <= msg_files.LARGEST_BOUND:
            assert bound, f"{struct.__name__}.{name} is not bounded"
            assert int(bound[1]) >= longest, f"{struct.__name__}.{name}"


def test_full_distributions_of_a_full_draft_fit() -> None:
    largest_vocabulary = 152_064  # Qwen2-VL-7B-Instruct
    assert wire_fields(wire.Draft)["evidence"][1] >= 4 * wire.MAX_DRAFT * largest_vocabulary


def test_navigate_outcomes_are_the_runs() -> None:
    constants = {name: getattr(action.Navigate.Result, name) for name in RunOutcome.__members__}
    assert constants == {name: int(value) for name, value in RunOutcome.__members__.items()}
    text = (DSD_MSGS / "action" / "Navigate.action").read_text()
    assert set(re.findall(r"^uint8 ([A-Z_]+)=", text, re.MULTILINE)) == RunOutcome.__members__.keys()


def test_the_grammars_kinds_are_the_messages() -> None:
    assert [getattr(msg.NavAction, kind.name) for kind in KINDS] == list(range(len(KINDS)))
    words = re.findall(r"\w+", (DSD_MSGS / "action" / "Navigate.action").read_text(encoding="utf-8"))
    assert {phase.value for phase in Phase} <= set(words)
    empty = msg.NavAction()
    assert empty.kind == msg.NavAction.STOP and not empty.verified
