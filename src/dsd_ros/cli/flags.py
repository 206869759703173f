"""Command line flags from settings dataclasses, as `nodes.parameters` makes ROS parameters of them."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_METAVARS = {int: "N", float: "X", Path: "PATH", str: "TEXT"}


def add_settings(parser: argparse.ArgumentParser, schema: type) -> None:
    """One flag per field of the settings dataclass ``schema``: its name, help, choices and default."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata.get("help", "")
        default = said(field)
        if default not in (None, "", dataclasses.MISSING):
            text += f" (default: {default})".replace("%", "%%")
        if isinstance(field.default, bool):
            either = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=either, default=field.default, help=text)
            continue
        choices = field.metadata.get("choices")
        action = parser.add_argument(
            flag,
            type=reader(field, hints[field.name]),
            default=field.default,
            help=text,
            metavar="|".join(choices) if choices else _METAVARS.get(_without_none(hints[field.name])),
        )
        if choices:
            offer(action, choices)


def offer(action: argparse.Action, words: Sequence[str]) -> None:
    """Let Tab complete an option's value with ``words``; what else is accepted stays as it was."""
    action.completer = lambda **_: tuple(words)  # type: ignore[attr-defined]


def reader(field: dataclasses.Field[Any], hint: Any) -> Callable[[str], Any]:
    """What turns a text into the field's value; its metadata ``words`` are texts for certain values."""
    kind = _without_none(hint)
    words = field.metadata.get("words", {})
    if not words:
        return kind

    def read(text: str) -> Any:
        return words[text] if text in words else kind(text)

    read.__name__ = kind.__name__  # argparse names it in its error messages
    return read


def said(field: dataclasses.Field[Any]) -> Any:
    """The field's default, as its word where it has one."""
    words = {value: word for word, value in field.metadata.get("words", {}).items()}
    return words.get(field.default, field.default) if words else field.default


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def settings_from(args: argparse.Namespace, schema: type) -> Any:
    """``schema`` filled from the flags that `add_settings` made; it validates itself (ValueError)."""
    return schema(**{field.name: getattr(args, field.name) for field in dataclasses.fields(schema)})
