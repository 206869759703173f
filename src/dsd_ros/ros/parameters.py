"""Declares a node's settings dataclass as ROS parameters: typed, ranged, described."""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, ParameterType
from rclpy.exceptions import (
    InvalidParameterTypeException,
    InvalidParameterValueException,
    ParameterUninitializedException,
)
from rclpy.node import Node

from dsd_ros.ros.settings import ParameterSpec, specs
from dsd_ros.ros.topic_node import given_by_name

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


def declare(node: Node, schema: type[Settings], host: Node | None = None) -> Settings:
    """Declare a parameter for each field of a settings dataclass and return the settings as given.

    Parameters are read-only, ``use_sim_time`` too: a clock that changes while the robot moves would mix two times.

    A parameter that the node lacks, and rclpy would silently drop, is an error where it is given to this node by its
    name, e.g. misspelt in its parameter file. Otherwise it may be meant for another node, and is only warned of.

    :param host: the node in whose process this one runs; launch gives its parameters to every node of the process.
    :raises ParameterError: when a value has the wrong type, is out of range, or the dataclass refuses it; or when the
        node is given a parameter by its name that it lacks.
    """
    settings: Settings = _made(schema, {spec.name: _declare_one(node, spec) for spec in specs(schema)})
    sim_time = "read when the node starts: the clock's time comes from /clock"
    descriptor = ParameterDescriptor(type=ParameterType.PARAMETER_BOOL, description=sim_time, read_only=True)
    node.set_descriptor("use_sim_time", descriptor)
    own = [each for each in (node, host) if each is not None]
    given = node._parameter_overrides  # rclpy offers no public view of what a file brought along
    unknown = sorted(name for name in given if not any(_known(each, name) for each in own))
    if unknown:
        _refuse_or_warn(node, unknown, [spec.name for spec in specs(schema)])
    return settings


def _refuse_or_warn(node: Node, unknown: list[str], declared: list[str]) -> None:
    named = given_by_name(node.get_name())
    refused = [name for name in unknown if name in named]
    names = ", ".join(f"'{name}'{nearest(name, declared)}" for name in refused or unknown)
    sentence = f"The node '{node.get_name()}' has no parameter {names}"
    if refused:
        raise ParameterError(f"{sentence}; correct its section of the parameter file.")
    node.get_logger().warning(f"{sentence}: ignored.")


def _made(schema: type, values: dict[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(schema)
    given: dict[str, Any] = {}
    for item in fields(schema):
        kind, name = hints[item.name], prefix + item.name
        given[item.name] = (
            _made(kind, values, f"{name}.") if isinstance(kind, type) and is_dataclass(kind) else values[name]
        )
    try:
        return schema(**given)
    except ValueError as error:
        raise ParameterError(str(error)) from error


def _declare_one(node: Node, spec: ParameterSpec) -> Any:
    try:
        value = node.declare_parameter(spec.name, spec.default, _descriptor(spec)).value
    except InvalidParameterTypeException as error:
        raise ParameterError(f"The parameter '{spec.name}' must be of type {spec.kind.__name__}: {error}") from error
    except (InvalidParameterValueException, ParameterUninitializedException) as error:
        limits = "" if spec.low is None else f" (allowed: {spec.low} to {spec.high})"
        raise ParameterError(f"The parameter '{spec.name}' is not valid{limits}: {error}") from error
    if spec.choices and value not in spec.choices:
        raise ParameterError(f"The parameter '{spec.name}' is {value!r}; choose from {', '.join(spec.choices)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"The parameter '{spec.name}' must be a finite number.")
    return value


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as " (did you mean '...'?)"; empty when none is like it."""
    known = list(known)
    leaf = name.rpartition(".")[2]
    likely = difflib.get_close_matches(name, known, 1, 0.75) or [
        each for each in known if each.rpartition(".")[2] == leaf
    ]
    return f" (did you mean '{likely[0]}'?)" if likely else ""


def _known(node: Node, name: str) -> bool:
    return node.has_parameter(name) or name.startswith(("qos_overrides.", "use_sim_time"))


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
