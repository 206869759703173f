"""The bounds that settings carry in their metadata, kept in one place."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def check_bounds(settings: Any, error: type[ValueError]) -> None:
    """Raise ``error`` for the first field of a dataclass outside its ``min`` and ``max`` or none of its ``choices``.

    The sentence names field, value and what may be used: ``range`` of the metadata where it says it in words.
    """
    for item in fields(settings):
        value, low, high = (getattr(settings, item.name), item.metadata.get("min"), item.metadata.get("max"))
        # NaN fails every comparison.
        if low is not None and high is not None and not low <= value <= high:
            words = item.metadata.get("range", f"{low} to {high}")
            raise error(f"{item.name} is {value}; use {words}")
        choices = item.metadata.get("choices", (value,))
        if value not in choices:
            raise error(f"{item.name} is {value!r}; use {', '.join(choices[:-1])} or {choices[-1]}")
