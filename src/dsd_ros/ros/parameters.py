# SPDX-License-Identifier: Apache-2.0
"""Declares a node's settings dataclass as ROS parameters: typed, ranged, described; and follows their changes."""

from __future__ import annotations

import math
import threading
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, ParameterType, SetParametersResult
from rclpy.exceptions import (
    InvalidParameterTypeException,
    InvalidParameterValueException,
    ParameterUninitializedException,
)
from rclpy.node import Node
from rclpy.parameter import Parameter

from dsd_ros.ros.settings import CONFIGURE, LIVE, START, ParameterSpec, specs
from dsd_ros.ros.topic_node import nearest
from dsd_ros.shown import masked

Settings = TypeVar("Settings")

_TYPES = {
    bool: ParameterType.PARAMETER_BOOL,
    int: ParameterType.PARAMETER_INTEGER,
    float: ParameterType.PARAMETER_DOUBLE,
    str: ParameterType.PARAMETER_STRING,
}
_LARGEST = (1 << 63) - 1
_CHANGES = {
    LIVE: "Takes effect at once.",
    CONFIGURE: "Takes effect at the next configure.",
    START: "Read when the node starts.",
}


class ParameterError(ValueError):
    """A parameter that is missing, of the wrong type or out of range; one sentence."""


class NodeParameters(Generic[Settings]):
    """A node's parameters, as the settings dataclass whose fields they are.

    A parameter that the node lacks, and rclpy would silently drop, is warned of: it may be misspelt.

    :param host: the node in whose process this one runs; launch gives its parameters to every node of the process.
    :param adopt: called with new settings when live parameters change; refuses them by a ValueError of one sentence.
    :raises ParameterError: when a value has the wrong type, is out of range, or the dataclass refuses it.
    """

    def __init__(
        self,
        node: Node,
        schema: type[Settings],
        host: Node | None = None,
        adopt: Callable[[Settings], None] | None = None,
    ) -> None:
        self._node, self._schema, self._adopt = node, schema, adopt
        self._specs = {spec.name: spec for spec in specs(schema)}
        self._lock = threading.Lock()
        self._values = {name: _declare_one(node, spec) for name, spec in self._specs.items()}
        self._in_effect = dict(self._values)
        self.settings: Settings = _made(schema, self._values)  # those in effect
        own = [each for each in (node, host) if each is not None]
        given = node._parameter_overrides  # rclpy offers no public view of what a file brought along
        unknown = sorted(name for name in given if not any(_known(each, name) for each in own))
        if unknown:
            names = ", ".join(f"'{name}'{nearest(name, self._specs)}" for name in unknown)
            node.get_logger().warning(f"The node '{node.get_name()}' has no parameter {names}: ignored.")
        node.add_on_set_parameters_callback(self._on_set)

    def configure(self) -> Settings:
        """Put every change into effect that waits for the next configure; returns the settings."""
        with self._lock:
            self._in_effect = dict(self._values)
            self.settings = _made(self._schema, self._in_effect)
            return self.settings

    def _on_set(self, given: list[Parameter]) -> SetParametersResult:
        changes = {each.name: each.value for each in given if each.name in self._specs}
        with self._lock:
            try:
                for name, value in changes.items():
                    _check(self._specs[name], value)
                values = self._values | changes
                _made(self._schema, values)
                live = {name: value for name, value in changes.items() if self._specs[name].change == LIVE}
                in_effect = self._in_effect | live
                settings = _made(self._schema, in_effect)
                if live and self._adopt is not None:
                    self._adopt(settings)
            except ValueError as error:
                return SetParametersResult(successful=False, reason=str(error))
            for name, value in changes.items():
                when = "" if name in live else " from the next configure"
                before, after = (
                    masked(each) if isinstance(each, str) else each for each in (self._values[name], value)
                )
                self._node.get_logger().info(f"{name} is {after!r} instead of {before!r}{when}")
            self._values, self._in_effect, self.settings = values, in_effect, settings
        return SetParametersResult(successful=True)


def declare(
    node: Node, schema: type[Settings], host: Node | None = None, adopt: Callable[[Settings], None] | None = None
) -> Settings:
    """The settings of a node as it starts; see :class:`NodeParameters`."""
    return NodeParameters(node, schema, host, adopt).settings


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
    _check(spec, value)
    return value


def _check(spec: ParameterSpec, value: Any) -> None:
    """What a descriptor cannot say: choices, and that a number is finite."""
    if spec.choices and value not in spec.choices:
        raise ParameterError(f"The parameter '{spec.name}' is {value!r}; choose from {', '.join(spec.choices)}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ParameterError(f"The parameter '{spec.name}' must be a finite number.")


def _known(node: Node, name: str) -> bool:
    return node.has_parameter(name) or name.startswith(("qos_overrides.", "use_sim_time"))


def _descriptor(spec: ParameterSpec) -> ParameterDescriptor:
    choices = f"One of: {', '.join(spec.choices)}. " if spec.choices else ""
    descriptor = ParameterDescriptor(
        name=spec.name,
        type=_TYPES[spec.kind],
        description=spec.help,
        additional_constraints=choices + _CHANGES[spec.change],
        read_only=spec.change == START,
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
