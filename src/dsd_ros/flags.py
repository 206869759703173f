"""Command line flags from settings dataclasses, as `nodes.parameters` makes ROS parameters of them."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import Any


def add_settings(parser: argparse.ArgumentParser, schema: type) -> None:
    """One flag per field of the settings dataclass ``schema``: its name, help, choices and default."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata.get("help", "")
        if field.default not in (None, "", dataclasses.MISSING):
            text += " (default: %(default)s)"
        if isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=field.default, help=text)
            continue
        choices = field.metadata.get("choices")
        parser.add_argument(
            flag,
            type=_without_none(hints[field.name]),
            default=field.default,
            help=text,
            metavar="|".join(choices) if choices else field.name.upper(),
        )


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def settings_from(args: argparse.Namespace, schema: type) -> Any:
    """``schema`` filled from the flags that `add_settings` made; it validates itself (ValueError)."""
    return schema(**{field.name: getattr(args, field.name) for field in dataclasses.fields(schema)})
