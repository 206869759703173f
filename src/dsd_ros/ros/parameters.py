"""ROS parameters from settings dataclasses, so that nodes, YAML files and the command line share
one schema.

A field becomes a parameter of the same name (behind ``prefix``); its metadata say the rest:
``help`` (description), ``min`` and ``max`` (range), ``choices`` (allowed values). All are
read-only: settings are fixed while a node runs.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, ParameterType
from rclpy.exceptions import (
    InvalidParameterTypeException,
    InvalidParameterValueException,
    ParameterUninitializedException,
)
from rclpy.node import Node

Settings = TypeVar("Settings")

_TYPES = {
    bool: ParameterType.PARAMETER_BOOL,
    int: ParameterType.PARAMETER_INTEGER,
    float: ParameterType.PARAMETER_DOUBLE,
    str: ParameterType.PARAMETER_STRING,
}
_LARGEST = (1 << 63) - 1


class ParameterError(ValueError):
    """A parameter that is missing, unknown, of the wrong type or out of range; one sentence."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as a node declares it."""

    name: str
    kind: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def specs(settings: type, prefix: str = "", defaults: Mapping[str, Any] | None = None) -> list[ParameterSpec]:
    """The parameters that :func:`declare` makes of a dataclass.

    :raises TypeError: for a field that is no bool, int, float, str or string Enum, or has no
    default.
    """
    hints = typing.get_type_hints(settings)
    given = defaults or {}
    return [_spec(item, hints[item.name], prefix, given.get(item.name, MISSING)) for item in fields(settings)]


def declare(
    node: Node,
    settings: type[Settings],
    prefix: str = "",
    defaults: Mapping[str, Any] | None = None,
    complete: Callable[[dict[str, Any]], None] | None = None,
) -> Settings:
    """Declare one parameter per field and return the settings with the values they were given.

    :param defaults: for fields whose dataclass gives none, or none that suits a node.
    :param complete: may fill in values (e.g. an empty path) before the settings are made.
    :raises ParameterError: when a value has the wrong type, is out of range, or the dataclass refuses it.
    """
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(settings)
    for spec in specs(settings, prefix, defaults):
        value = _declare_one(node, spec)
        field_name = spec.name[len(prefix) :]
        kind = _unwrapped(hints[field_name])
        values[field_name] = kind(value) if issubclass(kind, Enum) else value
    if complete is not None:
        complete(values)
    try:
        return settings(**values)
    except ValueError as error:
        raise ParameterError(str(error)) from error


def _declare_one(node: Node, spec: ParameterSpec) -> Any:
    try:
        value = node.declare_parameter(spec.name, _plain(spec.default), _descriptor(spec)).value
    except InvalidParameterTypeException as error:
        raise ParameterError(f"The parameter '{spec.name}' must be of type {spec.kind.__name__}: {error}") from error
    except (InvalidParameterValueException, ParameterUninitializedException) as error:
        limits = "" if spec.low is None else f" (allowed: {spec.low} to {spec.high})"
        raise ParameterError(f"The parameter '{spec.name}' is not valid{limits}: {error}") from error
    if spec.choices and value not in spec.choices:
        raise ParameterError(f"The parameter '{spec.name}' is {value!r}, which is none of {', '.join(spec.choices)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"The parameter '{spec.name}' must be a finite number.")
    return value


def refuse_unknown(node: Node, host: Node | None = None) -> None:
    """Refuse parameters that were given and never declared: rclpy would silently drop a typing
    error.

    Call it after the last :func:`declare`. ``host``: whose process the node is in; launch gives what is meant for that
    one to every node of it.

    :raises ParameterError: naming them.
    """
    given = node._parameter_overrides  # rclpy offers no public view of what a file brought along
    own = [each for each in (node, host) if each is not None]
    unknown = sorted(name for name in given if not any(_known(each, name) for each in own))
    if unknown:
        raise ParameterError(
            f"The node '{node.get_name()}' has no parameter {', '.join(map(repr, unknown))}; "
            "check the spelling in the parameter file."
        )


def _known(node: Node, name: str) -> bool:
    return node.has_parameter(name) or name.startswith(("qos_overrides.", "use_sim_time"))


def _spec(item: Field[Any], hint: Any, prefix: str, given: Any) -> ParameterSpec:
    if given is not MISSING:
        default = given
    elif item.default is not MISSING:
        default = item.default
    elif item.default_factory is not MISSING:
        default = item.default_factory()
    else:
        raise TypeError(f"The setting '{item.name}' needs a default to become a parameter.")
    kind = _unwrapped(hint)
    choices: tuple[str, ...] = tuple(str(_plain(c)) for c in item.metadata.get("choices", ()))
    if issubclass(kind, Enum):
        choices = choices or tuple(str(member.value) for member in kind)
        kind = str
    if kind not in _TYPES:
        raise TypeError(f"The setting '{item.name}' of type {kind} cannot become a parameter.")
    low, high = item.metadata.get("min"), item.metadata.get("max")
    text = str(item.metadata.get("help", ""))
    return ParameterSpec(prefix + item.name, kind, _plain(default), text, low, high, choices)


def _unwrapped(hint: Any) -> type:
    """``X | None`` counts as X: None travels as the empty string."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if len(kinds) == 1:
            hint = kinds[0]
    return hint if isinstance(hint, type) else str


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return "" if value is None else value


def _descriptor(spec: ParameterSpec) -> ParameterDescriptor:
    choices = f"One of: {', '.join(spec.choices)}." if spec.choices else ""
    descriptor = ParameterDescriptor(
        name=spec.name, type=_TYPES[spec.kind], description=spec.help, additional_constraints=choices, read_only=True
    )
    if spec.low is None and spec.high is None:
        return descriptor
    if spec.kind is int:
        low = -_LARGEST if spec.low is None else int(spec.low)
        high = _LARGEST if spec.high is None else min(int(spec.high), _LARGEST)
        descriptor.integer_range = [IntegerRange(from_value=low, to_value=high, step=0)]
    elif spec.kind is float:
        low_f = -math.inf if spec.low is None else float(spec.low)
        high_f = math.inf if spec.high is None else float(spec.high)
        descriptor.floating_point_range = [FloatingPointRange(from_value=low_f, to_value=high_f, step=0.0)]
    return descriptor
