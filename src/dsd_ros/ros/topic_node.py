# SPDX-License-Identifier: Apache-2.0
"""The base of every node here: no message ends it, and the quality of service of its topics can be overridden."""

from __future__ import annotations

import copy
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rcl_interfaces.msg import ParameterType, SetParametersResult
from rclpy.context import Context
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSPolicyKind, QoSProfile
from rclpy.qos_overriding_options import QoSOverridingOptions

from dsd_ros.ros.settings import flat, sections

_PREFIX = "qos_overrides."
_POLICIES = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY, QoSPolicyKind.DURABILITY)
_FORM = re.compile(rf"{re.escape(_PREFIX)}/[\w/]+\.(publisher|subscription)\.(history|depth|reliability|durability)")
# The overrides that topics of this process have taken. All its nodes are given the same ones, of the command line.
_taken: WeakKeyDictionary[Context, set[str]] = WeakKeyDictionary()


class OverrideError(ValueError):
    """A QoS override that is malformed or that no topic takes; one sentence."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as " (did you mean '...'?)"; empty when none is like it."""
    known = list(known)
    leaf = name.rpartition(".")[2]
    likely = difflib.get_close_matches(name, known, 1, 0.75)
    likely += [each for each in known if each.rpartition(".")[2] == leaf]
    return f" (did you mean '{likely[0]}'?)" if likely else ""


def given_by_name(node: str, words: Sequence[str] | None = None) -> set[str]:
    """The parameters that this process's arguments give to a node by its name, in a file's section or with ``-p``.

    The others come from a wildcard (``/**``), as a launch file's parameters for all its nodes do: a node may lack
    those. rclpy does not say where a value comes from.

    :param words: the arguments, sys.argv if None.
    """
    found: set[str] = set()
    words = sys.argv if words is None else words
    for flag, word in pairwise(words):
        owner, _, rest = word.partition(":=")[0].rpartition(":")
        if flag in ("-p", "--param") and _names(owner, node):
            found.add(rest)
        elif flag == "--params-file":
            with suppress(ValueError):  # rcl takes what this does not, such as an empty file
                found.update(*(flat(given) for pattern, given in sections(Path(word)) if _names(pattern, node)))
    return found


def _names(pattern: str, node: str) -> bool:
    return pattern.rpartition("/")[2] == node


class TopicNode(Node):
    """See the module. A subscription's or service's callback that raises loses its message, not the process.

    QoS overrides are the parameters ``qos_overrides.<topic>.<publisher or subscription>.<policy>``, as in rclcpp;
    policies are history, depth, reliability and durability.
    """

    topics_come_later = False  # whether the node makes topics after its constructor

    def callback_failed(self, what: str, error: Exception) -> None:
        """A callback raised: a defect that some message brought to light. Called in the executor."""
        sentence = f"The callback of {what} failed, and its message is lost: {error!r:.200}"
        self.get_logger().error(sentence, throttle_duration_sec=1.0)

    def create_subscription(self, msg_type: Any, topic: str, callback: Any, qos_profile: Any, **options: Any) -> Any:
        profile, more = self._overridden("subscription", topic, qos_profile)
        take = self.guarded(topic, callback)
        with _overriding(topic):
            return super().create_subscription(msg_type, topic, take, profile, **more, **options)

    def create_publisher(self, msg_type: Any, topic: str, qos_profile: Any, *given: Any, **options: Any) -> Any:
        profile, more = self._overridden("publisher", topic, qos_profile)
        with _overriding(topic):
            return super().create_publisher(msg_type, topic, profile, *given, **more, **options)

    def create_service(self, srv_type: Any, srv_name: str, callback: Any, *given: Any, **options: Any) -> Any:
        def serve(request: Any, response: Any) -> Any:
            try:
                return callback(request, response)
            except Exception as error:
                self.callback_failed(srv_name, error)
                return response  # as it is made: not a success

        return super().create_service(srv_type, srv_name, serve, *given, **options)

    def set_parameters(self, parameter_list: list[Parameter]) -> list[SetParametersResult]:
        return [self.set_parameters_atomically([parameter]) for parameter in parameter_list]

    def set_parameters_atomically(self, parameter_list: list[Parameter]) -> SetParametersResult:
        """As rclpy's; it also serves ``ros2 param set`` and ``load``. A refusal names the parameter and the remedy.

        A value that a parameter has already may be set again, even where it is read-only: a node's own dump can be
        loaded. An integer is taken for a number or a text where one is declared, as ``ros2 param`` guesses the type.
        """
        changes = [each for each in map(self._as_declared, parameter_list) if not self._holds(each)]
        for name in (each.name for each in changes):
            reason = ""
            if not self.has_parameter(name):
                reason = f"The node '{self.get_name()}' has no parameter '{name}'{nearest(name, self._parameters)}."
            elif self.describe_parameter(name).read_only:
                reason = f"'{name}' is read when the node starts: set it in a parameter file, and start the node again."
            if reason:
                return SetParametersResult(successful=False, reason=reason)
        if not changes:
            return SetParametersResult(successful=True)
        result = super().set_parameters_atomically(changes)
        names = ", ".join(f"'{each.name}'" for each in changes)
        if not result.successful and not any(each.name in result.reason for each in changes):
            result.reason = f"{names}: {result.reason}"
        return result

    def _holds(self, parameter: Parameter) -> bool:
        own = self.get_parameter_or(parameter.name)
        return own.type_ is parameter.type_ and own.value == parameter.value

    def _as_declared(self, parameter: Parameter) -> Parameter:
        if parameter.type_ is not Parameter.Type.INTEGER or not self.has_parameter(parameter.name):
            return parameter
        declared = {ParameterType.PARAMETER_DOUBLE: float, ParameterType.PARAMETER_STRING: str}
        kind = declared.get(self.describe_parameter(parameter.name).type)
        return Parameter(parameter.name, value=kind(parameter.value)) if kind else parameter

    def guarded(self, what: str, callback: Callable[..., object]) -> Callable[..., None]:
        """A callback that reports what it raises to :meth:`callback_failed`."""

        def call(*message: Any) -> None:
            try:
                callback(*message)
            except Exception as error:
                self.callback_failed(what, error)

        return call

    def check_overrides(self, complete: bool) -> None:
        """Check the QoS overrides; with ``complete``, when all topics exist, also that each has its topic.

        :raises OverrideError: naming an override that is malformed or misspelt, where it is given to this node by its
            name; otherwise it may be another node's, and is only warned of.
        """
        taken = _taken.get(self.context, set())
        given = [name for name in self._parameter_overrides if name.startswith(_PREFIX)]
        wrong = [name for name in given if not _FORM.fullmatch(name)]
        unused = wrong or (sorted(set(given) - taken) if complete else [])
        own = given_by_name(self.get_name()) if unused else set()
        for name in sorted(unused, key=lambda name: name not in own):
            sentence = (
                f"The node '{self.get_name()}' cannot apply {name}: write qos_overrides.<topic with its "
                "namespace>.<publisher or subscription>.<history, depth, reliability or durability>."
            )
            if name in own:
                raise OverrideError(sentence)
            self.get_logger().warning(sentence)

    def _overridden(self, entity: str, topic: str, profile: Any) -> tuple[Any, dict[str, Any]]:
        """The profile to create a topic with, and rclpy's option to override it where a parameter asks for that."""
        prefix = f"{_PREFIX}{self.resolve_topic_name(topic)}.{entity}."
        given = [name for name in self._parameter_overrides if name.startswith(prefix)]
        if not given or not isinstance(profile, (QoSProfile, int)):
            return profile, {}
        _taken.setdefault(self.context, set()).update(given)
        own = QoSProfile(depth=profile) if isinstance(profile, int) else copy.copy(profile)  # rclpy changes it in place
        return own, {"qos_overriding_options": QoSOverridingOptions(_POLICIES)}


@contextmanager
def _overriding(topic: str) -> Iterator[None]:
    """:raises OverrideError: when a QoS override has a wrong type or value."""
    try:
        yield
    except InvalidParameterTypeException as error:
        raise OverrideError(f"A QoS override of the topic '{topic}' has the wrong type: {error}.") from error
    except RuntimeError as error:
        if "QoS override" not in str(error):
            raise
        raise OverrideError(f"A QoS override of the topic '{topic}' is not valid: {error}.") from error
