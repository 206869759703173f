# SPDX-License-Identifier: Apache-2.0
"""Settings dataclasses: each field is one setting with its default, help text, range and choices.

Command line flags, ROS parameters, launch arguments, config/*.yaml and docs/parameters.md are all made from these
fields, so a default stands in one place. This module imports nothing of the project; every room may use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    text: str,
    low: float | None = None,
    high: float | None = None,
    *,
    choices: tuple[str, ...] = (),
    allowed: str = "",
    check: Callable[[Any], object] | None = None,
    varies: str = "",
) -> Any:
    """A dataclass field with what users must know of it.

    :param text: the help text, with the unit.
    :param low: smallest allowed value, ``high`` the largest.
    :param allowed: the range in words, where "LOW to HIGH" does not say enough.
    :param varies: the default in words, where it depends on the environment.
    :param check: raises ValueError, one sentence, for a value that cannot be used.
    """
    known = {
        "help": text, "min": low, "max": high, "choices": choices, "range": allowed, "check": check, "varies": varies,
    }  # fmt: skip
    metadata = {name: value for name, value in known.items() if value not in (None, (), "")}
    return field(default=default, metadata=metadata)


def check_options(settings: Any, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` for the first field whose value may not be used; the sentence says what may be used instead."""
    for item in fields(settings):
        value, low, high = getattr(settings, item.name), item.metadata.get("min"), item.metadata.get("max")
        # NaN fails every comparison.
        if low is not None and high is not None and not low <= value <= high:
            words = item.metadata.get("range", f"{low} to {high}")
            raise error(f"{item.name} is {value}; use {words}")
        choices = item.metadata.get("choices", (value,))
        if value not in choices:
            raise error(f"{item.name} is {value!r}; use {', '.join(choices[:-1])} or {choices[-1]}")
        check = item.metadata.get("check")
        if check and value != item.default:
            try:
                check(value)
            except ValueError as wrong:
                raise error(f"{item.name}: {wrong}") from wrong
