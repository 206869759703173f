# SPDX-License-Identifier: Apache-2.0
"""Declare a command's arguments as a dataclass, which cyclopts reads.

A field's name is its flag; its metadata (``help``, ``choices``) is that of the settings dataclasses. A
settings dataclass may be a field itself: its own fields are then flags of the command.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from dsd_ros.addresses import check_engine_address
from dsd_ros.edge.settings import ENGINE_HELP
from dsd_ros.paths import shipped_model, user_path
from dsd_ros.python310 import dataclass_transform

T = TypeVar("T")
_UNDERSTOOD = inspect.signature(Parameter).parameters  # cyclopts 4, the last for Python 3.10, has no metavar
STDOUT = Path("-")


def flag(default: Any = dataclasses.MISSING, text: str = "", kw_only: bool = True, **metadata: Any) -> Any:
    """A flag of a command.

    :param metadata: ``choices``: its values; ``metavar``: their name in the help; ``many``: it takes several values;
        ``convert``: converts its text to a value.
    """
    metadata["help"] = text
    if isinstance(default, list):
        return field(default_factory=default.copy, kw_only=kw_only, metadata=metadata)
    return field(default=default, kw_only=kw_only, metadata=metadata)


def word(default: Any = dataclasses.MISSING, text: str = "", **metadata: Any) -> Any:
    """An argument without a flag; a list takes all that remain."""
    return flag(default, text, False, **metadata)


def part(settings: type[T], title: str = "") -> T:
    """Settings whose fields are flags of the command, under ``title`` in its help; they validate themselves."""
    made: T = field(default_factory=settings, metadata={"title": title})
    return made


def json_option(what: str = "the figures") -> Any:
    """``--json [FILE]``, for `shared.write_json`."""
    return flag(None, f"write {what} as JSON to FILE, or print it in place of the text", convert=output_file)


def file_option(text: str, metavar: str = "FILE") -> Any:
    """A path, None unless given."""
    return flag(None, text, metavar=metavar)


def model_option(role: str) -> Any:
    return flag("", f"directory or hub id of the {role} model (default: the shipped one)")


def engine_option() -> Any:
    return flag("", ENGINE_HELP, metavar="URL", convert=check_engine_address)


def tokenizer_option() -> Any:
    text = "the target's model directory or tokenizer.json, if the draft has another tokenizer"
    return flag("", text, metavar="DIR_OR_FILE")


def model_path(given: str, role: str) -> str:
    return given or str(shipped_model(role))


def output_file(text: str) -> Path:
    """A file to write, checked before hours of work rather than after them."""
    path = user_path(text)
    if path.is_dir():
        raise ValueError(f"'{text}' is a folder; name a file, or put --json last")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}; make it first")
    return path


@dataclass(frozen=True)
class CommonFlags:
    """The flags of every command, before its name or after it."""

    debug: bool = flag(False, "show the traceback of an error")
    online: bool = flag(False, "allow downloading a model named by its hub id")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(flag, word))
def arguments(cls: type[T]) -> type[T]:
    """Make ``cls`` the dataclass of a command's arguments, for cyclopts. Words must come before flags."""
    cls.__annotations__["common"], cls.common = CommonFlags, part(CommonFlags, "Of every command")  # type: ignore[attr-defined]
    made = dataclass(frozen=True, kw_only=True)(cls)
    _annotate(made)
    return Parameter(name="*")(made)


def _annotate(schema: Any) -> None:
    """Translate the metadata of a dataclass's fields into annotations that cyclopts reads."""
    hints = typing.get_type_hints(schema)
    for place, item in enumerate(dataclasses.fields(schema), 1):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            _annotate(hint)
            title = item.metadata.get("title")
            parameter = Parameter(name="*", group=Group(title, sort_key=place)) if title else Parameter(name="*")
        else:
            parameter = _parameter(item, hint)
        # Also for the constructor, whose annotations would be evaluated in the module of a subclass.
        schema.__annotations__[item.name] = schema.__init__.__annotations__[item.name] = Annotated[hint, parameter]


def _parameter(item: dataclasses.Field[Any], hint: Any) -> Parameter:
    """What cyclopts needs to know about a field besides its type, default and help."""
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType] or [hint]
    known, many = item.metadata, typing.get_origin(hint) is list
    given: dict[str, Any] = {name: known.get(name) for name in ("choices", "metavar") if name in _UNDERSTOOD}
    convert = known.get("convert") or (user_path if kinds == [Path] else None)
    if convert is not None:
        read = (lambda _, tokens: [convert(t.value) for t in tokens]) if many else lambda _, ts: convert(ts[0].value)
        given["converter"] = read
    if known.get("many"):
        given["consume_multiple"] = True
        given["show_default"] = lambda values: " ".join(map(str, values))
    if many or item.default is None or item.default is False or item.default == "":
        given["negative"] = ""  # no flag to turn off what is off
        given.setdefault("show_default", False)
    return Parameter(**given)


def with_json_value(argv: Sequence[str]) -> list[str]:
    """``argv``, where a ``--json`` without a file has stdout as its value."""
    left, found = list(argv), []
    while left:
        one = left.pop(0)
        if one == "--json" and (not left or left[0].startswith("-")):
            one = f"--json={STDOUT}"
            if left[:1] == [str(STDOUT)]:
                del left[0]
        found.append(one)
    return found
