# SPDX-License-Identifier: Apache-2.0
"""Finds strangers among a topic's publishers, and publishers of another type than a subscription's.

DDS tells a publisher's node, its namespace and the message type. A name is a claim: a process that takes the name of a
node that belongs is not told apart from it. A publisher is found once DDS has discovered it, usually within a second. A
process that is no ROS node gives no name, and neither does a node, for some time, that DDS had given up while it was
frozen; its process (DDS' participant) is known.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rclpy.node import Node
from rclpy.topic_endpoint_info import TopicEndpointInfo

SUPERVISOR = "supervisor_node"  # publishes cmd_vel, and nobody else does beside it
_UNNAMED = "_NODE_NAME_UNKNOWN_"  # rmw's, until the name is known
_UNNAMED_S = 2.0  # after this long without a name, a publisher is warned of
_PARTICIPANT = 12  # bytes of an endpoint's GID that name its participant
_LOOK_S = 0.2  # between two looks at the graph
OTHER_TYPE = "The parameter enable_stamped_cmd_vel chooses between Twist and TwistStamped."


class PublisherWatch:
    """The publishers of one topic that do not belong there.

    :param belongs: nodes whose publishers belong, by name in this node's namespace, or with a namespace ("/a/node").
    :param alone: none of these may have a second publisher, as a second node of the same name would.
    """

    def __init__(self, node: Node, topic: str, belongs: Sequence[str], alone: bool = False) -> None:
        self.topic = node.resolve_topic_name(topic).removeprefix(f"{node.get_namespace().rstrip('/')}/")  # as remapped
        self._topic, self._node, self._alone = topic, node, alone
        full = [name if name.startswith("/") else f"{node.get_namespace().rstrip('/')}/{name}" for name in belongs]
        links = {f"{space}/_{name}_link" for space, _, name in (each.rpartition("/") for each in full)}
        self._belongs = links.union(full)  # see running.companion
        self._names: dict[bytes, str] = {}  # participant -> the node that it was
        self._unnamed_since: dict[bytes, float] = {}

    def strangers(self, now: float) -> list[str]:
        """The nodes that publish and do not belong, by name; ``now`` is steady time, s."""
        counts: Counter[str] = Counter()
        unnamed: dict[bytes, float] = {}
        for info in self._node.get_publishers_info_by_topic(self._topic):
            participant = bytes(info.endpoint_gid[:_PARTICIPANT])
            if info.node_name != _UNNAMED:
                self._names[participant] = _full_name(info)
            if name := self._names.get(participant):
                counts[name] += 1
            else:
                unnamed[participant] = self._unnamed_since.get(participant, now)
        self._unnamed_since = unnamed
        if any(now - since > _UNNAMED_S for since in unnamed.values()):
            sentence = f"A process that is no ROS node publishes {self.topic}; stop it unless it belongs there."
            self._node.get_logger().warning(sentence, throttle_duration_sec=60.0)
        strangers = {name for name, count in counts.items() if count and name not in self._belongs}
        doubled = {f"a second {name}" for name in self._belongs if self._alone and counts[name] > 1}
        return sorted(strangers | doubled)


class CommandWatch:
    """For a driver: whether another node commands the robot beside the supervisor. Looks at most every 0.2 s.

    Without a supervisor anybody may publish ``cmd_vel``.
    """

    def __init__(self, node: Node, kind: str) -> None:
        """:param kind: the type of the driver's own subscription, "package/msg/Type"."""
        self._node, self._kind, self._unheard = node, kind, ""
        self._watch = PublisherWatch(node, "cmd_vel", [SUPERVISOR])
        self._supervisor = f"{node.get_namespace().rstrip('/')}/{SUPERVISOR}"
        self._looked = float("-inf")
        self.trouble = ""  # as of the last look: a sentence, or empty

    def contested(self) -> bool:
        """Whether the robot must stand, since it cannot be told whose command came."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked, before = now, self.trouble
            found = self._watch.strangers(now)
            publishers = map(_full_name, self._node.get_publishers_info_by_topic("cmd_vel"))
            self.trouble = alarm("cmd_vel", found) if found and self._supervisor in publishers else ""
            if self.trouble and self.trouble != before:
                self._node.get_logger().error(self.trouble)
            unheard = " ".join(misfits(self._node, "cmd_vel", [self._kind]))
            if unheard and unheard != self._unheard:
                self._node.get_logger().warning(f"{unheard} {OTHER_TYPE}")
            self._unheard = unheard
        return bool(self.trouble)


def alarm(topic: str, strangers: Sequence[str]) -> str:
    """The sentence about a topic's strangers."""
    return f"{topic} has a publisher that does not belong there: {' and '.join(strangers)}; stop or remap it."


def misfits(node: Node, topic: str, types: Sequence[str]) -> Iterator[str]:
    """A sentence for each publisher of another type than ``types`` ("package/msg/Type"), which is not heard."""
    for info in node.get_publishers_info_by_topic(topic):
        if info.topic_type not in types:
            yield f"{_full_name(info)} publishes {info.topic_type} on {topic}, which must be {' or '.join(types)}."


def _full_name(info: TopicEndpointInfo) -> str:
    return f"{info.node_namespace.rstrip('/')}/{info.node_name}"


def type_name(kind: Any) -> str:
    """A message class's name, "package/msg/Type"."""
    return f"{kind.__module__.split('.')[0]}/msg/{kind.__name__}"
