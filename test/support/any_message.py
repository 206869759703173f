# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for any message of the protocol, from the types and bounds of its fields."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from dsd_ros.wire import messages as m

KINDS = get_args(m.Message)
_CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")  # which ROS allows


def fields_of(kind: type[m.Fields]) -> dict[str, inspect.Type]:
    found = inspect.type_info(kind).fields
    return {field.name: plain(field.type) for field in found}


def plain(kind: inspect.Type) -> inspect.Type:
    return plain(kind.type) if isinstance(kind, inspect.Metadata) else kind


def low(kind: Any) -> Any:
    return kind.ge if kind.ge is not None else kind.gt


def high(kind: Any) -> Any:
    return kind.le if kind.le is not None else kind.lt - 1


def values(kind: inspect.Type, name: str = "") -> st.SearchStrategy:
    """Any value that a field of this type may have; long ones not very long."""
    kind = plain(kind)
    if name == "confidence":  # it travels in 16 bits
        return st.integers(0, 65535).map(lambda units: units / 65535)
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(low(kind), high(kind))
        case inspect.FloatType():
            return st.floats(low(kind), high(kind), exclude_min=kind.ge is None)
        case inspect.StrType():
            return st.text(_CHARACTERS, min_size=kind.min_length or 0, max_size=min(kind.max_length, 300))
        case inspect.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length, 300))
        case inspect.ListType():
            inner = values(kind.item_type)
            return st.lists(inner, min_size=kind.min_length or 0, max_size=min(kind.max_length, 40))
        case inspect.StructType():
            return messages(kind.cls)
    raise AssertionError(kind)


def messages(kind: type[m.Fields]) -> st.SearchStrategy:
    made = st.builds(kind, **{name: values(field, name) for name, field in fields_of(kind).items()})
    # A distribution stands in the next token's place.
    return made.map(lambda one: replace(one, next_token=0) if one.distribution else one) if kind is m.Outcome else made


MESSAGES = st.one_of(*map(messages, KINDS))
