# SPDX-License-Identifier: Apache-2.0
"""The base of every node here: no message ends it, and the quality of service of its topics can be overridden."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable
from typing import Any

from rclpy.node import Node
from rclpy.qos import QoSPolicyKind, QoSProfile
from rclpy.qos_overriding_options import QoSOverridingOptions

_POLICIES = (QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY, QoSPolicyKind.DURABILITY)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that was probably meant, as " (did you mean '...'?)"; empty when none is like it."""
    known = list(known)
    leaf = name.rpartition(".")[2]
    likely = difflib.get_close_matches(name, known, 1, 0.75)
    likely += [each for each in known if each.rpartition(".")[2] == leaf]
    return f" (did you mean '{likely[0]}'?)" if likely else ""


class TopicNode(Node):
    """See the module. A subscription's or service's callback that raises loses its message, not the process.

    QoS overrides are the parameters ``qos_overrides.<topic>.<publisher or subscription>.<policy>``, as in rclcpp;
    policies are history, depth, reliability and durability.
    """

    def callback_failed(self, what: str, error: Exception) -> None:
        """A callback raised: a defect that some message brought to light. Called in the executor."""
        sentence = f"The callback of {what} failed, and its message is lost: {error!r:.200}"
        self.get_logger().error(sentence, throttle_duration_sec=1.0)

    def create_subscription(self, msg_type: Any, topic: str, callback: Any, qos_profile: Any, **options: Any) -> Any:
        profile, more = self._overridden("subscription", topic, qos_profile)
        take = self.guarded(topic, callback)
        return super().create_subscription(msg_type, topic, take, profile, **more, **options)

    def create_publisher(self, msg_type: Any, topic: str, qos_profile: Any, *given: Any, **options: Any) -> Any:
        profile, more = self._overridden("publisher", topic, qos_profile)
        return super().create_publisher(msg_type, topic, profile, *given, **more, **options)

    def create_service(self, srv_type: Any, srv_name: str, callback: Any, *given: Any, **options: Any) -> Any:
        def serve(request: Any, response: Any) -> Any:
            try:
                return callback(request, response)
            except Exception as error:
                self.callback_failed(srv_name, error)
                return response  # as it is made: not a success

        return super().create_service(srv_type, srv_name, serve, *given, **options)

    def guarded(self, what: str, callback: Callable[..., object]) -> Callable[..., None]:
        """A callback that reports what it raises to :meth:`callback_failed`."""

        def call(*message: Any) -> None:
            try:
                callback(*message)
            except Exception as error:
                self.callback_failed(what, error)

        return call

    def _overridden(self, entity: str, topic: str, profile: Any) -> tuple[Any, dict[str, Any]]:
        """The profile to create a topic with, and rclpy's option to override it where a parameter asks for that."""
        prefix = f"qos_overrides.{self.resolve_topic_name(topic)}.{entity}."
        given = any(name.startswith(prefix) for name in self._parameter_overrides)
        if not given or not isinstance(profile, QoSProfile):
            return profile, {}
        own = copy.copy(profile)  # rclpy changes it in place
        return own, {"qos_overriding_options": QoSOverridingOptions(_POLICIES)}
