# SPDX-License-Identifier: Apache-2.0
"""The protocol over DDS topics: the robot's end as a Channel, the verifier's end as a set of topics.

Messages are serialized here and travel as raw CDR, so a payload is serialized once and its size is known. Every message
type has a topic of its own, and DDS keeps order only within a topic: ``TopicOrder`` restores it where messages arrive.
"""

from __future__ import annotations

import array
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from rclpy.duration import Duration
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.publisher import Publisher
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message, serialize_message

from dsd_msgs import msg as ros
from dsd_ros.ros import qos
from dsd_ros.ros.running import companion, steady_timer
from dsd_ros.wire import messages as wire
from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.codec import WireError, check_finite
from dsd_ros.wire.outbox import UNSENT_BYTES, Outbox

# A protocol message travels as the ROS message of the same name, with fields of the same names.
ROS_TYPES: dict[type[wire.Message], type] = {struct: getattr(ros, struct.__name__) for struct in get_args(wire.Message)}
_STRUCTS = {ros_type: struct for struct, ros_type in ROS_TYPES.items()}


def to_ros(message: wire.Message) -> Any:
    """The ROS message of a protocol message."""
    return _fill(ROS_TYPES[type(message)], message)


def _fill(ros_type: type, message: msgspec.Struct) -> Any:
    result: Any = ros_type()
    typecodes = _typecodes(ros_type)
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name in typecodes:
            value = array.array(typecodes[name], value)
        elif isinstance(value, list):
            value = [
                part if isinstance(part, str) else _fill(getattr(ros, type(part).__name__), part) for part in value
            ]
        setattr(result, name, value)
    return result


@functools.cache
def _typecodes(ros_type: type) -> dict[str, str]:
    """The array type codes of a ROS message's numeric sequences, by field."""
    empty = ros_type()
    fields = {name: getattr(empty, name) for name in empty.get_fields_and_field_types()}
    return {name: value.typecode for name, value in fields.items() if isinstance(value, array.array)}


def from_ros(message: Any) -> wire.Message:
    """The protocol message of a ROS message, validated like one from a socket.

    :raises WireError: naming the message and what is wrong with it.
    """
    struct = _STRUCTS.get(type(message))
    if struct is None:
        raise WireError(f"{type(message).__name__} is not a message of the protocol.")
    try:
        result = msgspec.convert([struct.__struct_config__.tag, *_values(message, struct)], struct)
    except msgspec.ValidationError as error:
        raise WireError(f"A {struct.__name__} that breaks the protocol: {error}") from error
    check_finite(result)
    return result


def _values(message: Any, struct: type[msgspec.Struct]) -> list[Any]:
    """A ROS message's fields in their order, as msgspec converts them: bytes, lists and plain values."""
    values: list[Any] = []
    for name in struct.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, array.array):
            value = value.tobytes() if value.typecode == "B" else value.tolist()
        elif isinstance(value, list):
            value = [
                part if isinstance(part, str) else _values(part, getattr(wire, type(part).__name__)) for part in value
            ]
        values.append(value)
    return values


@dataclass(frozen=True)
class TopicSet:
    """Topics of one concern: those that the robot writes (``up``), and those that the verifier writes."""

    up: Mapping[type, str]
    down: Mapping[type, str]


_UP: dict[type, str] = {
    wire.SessionRequest: "dsd/session_request",
    wire.Observation: "dsd/observation",
    wire.DraftTokens: "dsd/draft_tokens",
    wire.Draft: "dsd/draft",
}
_DOWN: dict[type, str] = {
    wire.SessionReply: "dsd/session_reply",
    wire.VerifiedTokens: "dsd/verified_tokens",
    wire.Outcome: "dsd/outcome",
    wire.Refusal: "dsd/refusal",
}
DECODING = TopicSet(_UP | {wire.SessionClose: "dsd/session_close"}, _DOWN)
# Messages that go both ways have a topic for each, so that no side hears its own.
_BOTH = {
    wire.Proposal: "dsd/proposal", wire.Verdict: "dsd/verdict", wire.Reveal: "dsd/reveal",
    wire.QuestionEnd: "dsd/question_end",
}  # fmt: skip
AGGREGATION = TopicSet(
    {wire.Question: "dsd/question", **{struct: f"{name}_up" for struct, name in _BOTH.items()}},
    {wire.QuestionReply: "dsd/question_reply", **{struct: f"{name}_down" for struct, name in _BOTH.items()}},
)
EVERYTHING = TopicSet({**DECODING.up, **AGGREGATION.up}, {**DECODING.down, **AGGREGATION.down})
_OPENING = (wire.SessionRequest, wire.SessionReply)
_FREQUENT = (wire.Proposal, wire.Verdict, wire.Reveal, wire.DraftTokens, wire.VerifiedTokens)
_INBOX_LIMIT = 1024

OnMessage = Callable[[wire.Message], None]


def _qos_of(struct: type) -> QoSProfile:
    if struct is wire.Outcome:
        return qos.OUTCOMES
    return qos.PROPOSALS if struct in _FREQUENT else qos.LINK


class TopicOrder:
    """Restores order between topics: a message that overtakes its beginning is held until the beginning arrives.

    A draft waits for its observation; a proposal, verdict or reveal for its question at the verifier's end, for the
    question's reply at the robot's. The first two fields of all of these say what a message belongs to: a session and
    its reply, or a question and its attempt. All calls must come from one thread.

    :param deliver: is called with the messages in their order.
    :param begins: the types that others wait for at this end.
    """

    HELD_S = 0.5
    _HELD_LIMIT = 64  # messages that wait for one beginning
    _REMEMBERED = 256  # sessions and questions
    _BEGINS = {
        wire.Draft: (wire.Observation,),
        **dict.fromkeys((wire.Proposal, wire.Verdict, wire.Reveal), (wire.Question, wire.QuestionReply)),
    }

    def __init__(self, deliver: OnMessage, *begins: type) -> None:
        self._deliver = deliver
        self._begins = begins
        self._begun: dict[tuple[type, int], int] = {}  # the newest reply or attempt that has begun
        self._held: dict[tuple[type, int], list[tuple[float, wire.Message]]] = {}

    def arrived(self, message: wire.Message) -> None:
        """Deliver a message and those that waited for it; or hold it until its beginning is here."""
        kind = type(message)
        begin = next((one for one in (kind, *self._BEGINS.get(kind, ())) if one in self._begins), None)
        if begin is None:
            self._deliver(message)
            return
        name, number = (getattr(message, field) for field in message.__struct_fields__[:2])
        key = begin, name
        if begin is kind:
            self._begun.pop(key, None)
            self._begun[key] = number  # inserted last, so that the first entry is the oldest
            if len(self._begun) > self._REMEMBERED:
                del self._begun[next(iter(self._begun))]
            for item in (message, *(late for _, late in self._held.pop(key, []))):
                self._deliver(item)
        elif number <= self._begun.get(key, -1):
            self._deliver(message)
        elif len(held := self._held.setdefault(key, [])) < self._HELD_LIMIT:
            held.append((time.monotonic(), message))

    def release_old(self) -> None:
        """Deliver messages whose beginning does not come, for the receiver to refuse. Call every HELD_S / 2."""
        limit = time.monotonic() - self.HELD_S
        for key in [key for key, held in self._held.items() if held[0][0] < limit]:
            for _, message in self._held.pop(key):
                self._deliver(message)


class _Topics:
    """Publishers for one direction and subscriptions for the other, in the node ``_<owner>_link``."""

    def __init__(
        self, owner: Node, outgoing: Mapping[type, str], incoming: Mapping[type, str], order: TopicOrder
    ) -> None:
        self._owner = owner
        self._order = order
        self.bytes_out = 0
        self.bytes_in = 0
        self.node = companion(owner, "link")
        self._publishers = {
            struct: self.node.create_publisher(
                ROS_TYPES[struct], topic, qos.SESSION if struct in _OPENING else _qos_of(struct)
            )
            for struct, topic in outgoing.items()
        }
        self._subscriptions = [
            self.node.create_subscription(
                ROS_TYPES[struct], topic, self._receiver(ROS_TYPES[struct]), _qos_of(struct), raw=True
            )
            for struct, topic in incoming.items()
        ]
        self._timer = steady_timer(self.node, order.HELD_S / 2, order.release_old)
        self._executor = SingleThreadedExecutor(context=owner.context)
        self._executor.add_node(self.node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, name=self.node.get_name(), daemon=True)

    def start(self) -> None:
        """Begin to receive. Not in the constructor: a message could arrive before its receiver is built."""
        self._thread.start()

    def publish(self, message: wire.Message) -> None:
        """Send one message. May be called from any thread."""
        self._write(message, self._publishers[type(message)])

    def _write(self, message: wire.Message, publisher: Publisher) -> int:
        """Publish a message; its size in bytes."""
        payload = serialize_message(to_ros(message))
        self.bytes_out += len(payload)
        publisher.publish(payload)
        return len(payload)

    def peers(self) -> int:
        """How many nodes listen to everything that this side sends."""
        return min(p.get_subscription_count() for p in self._publishers.values())

    def senders(self) -> int:
        """How many nodes publish everything that this side listens to."""
        return min(self.node.count_publishers(s.topic_name) for s in self._subscriptions)

    def close(self) -> None:
        """Stop the thread and destroy the topics. Not from a callback."""
        self._stop.set()
        self._executor.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        self._executor.shutdown(timeout_sec=0.2)
        self.node.destroy_node()

    def _spin(self) -> None:
        while not self._stop.is_set():
            try:
                self._executor.spin_once(timeout_sec=0.5)
            except ExternalShutdownException:
                return
            except Exception as error:  # a defect; the link must survive the message that triggers it
                self._owner.get_logger().error(f"a message was lost: {error!r:.200}", throttle_duration_sec=1.0)

    def _receiver(self, ros_type: type) -> Callable[[bytes], None]:
        def receive(payload: bytes) -> None:
            self.bytes_in += len(payload)
            try:
                message = from_ros(deserialize_message(payload, ros_type))
            except (WireError, RuntimeError) as error:  # RuntimeError: damaged, from rmw
                self._owner.get_logger().warning(f"dropped: {error!s:.300}", throttle_duration_sec=1.0)
                return
            self._order.arrived(message)

        return receive


class DdsChannel:
    """The robot's end: a :class:`dsd_ros.wire.channel.Channel` over topics.

    It spins its topics itself, so ``node`` need not be spinning.

    :param match_timeout: how long a send waits for a verifier to appear, s.
    :param topics: what it carries; another node may carry the rest.
    """

    def __init__(self, node: Node, match_timeout: float = 1.0, topics: TopicSet = DECODING) -> None:
        self._inbox: queue.Queue[wire.Message | None] = queue.Queue(_INBOX_LIMIT)
        self._match_timeout = match_timeout
        self._closed = threading.Event()
        self._matched = False  # as of the last check: asking the ROS graph takes longer than sending
        order = TopicOrder(self._put, wire.QuestionReply)
        self._topics = _Topics(node, topics.up, topics.down, order)
        self._topics.start()

    @property
    def bytes_up(self) -> int:
        return self._topics.bytes_out

    @property
    def bytes_down(self) -> int:
        return self._topics.bytes_in

    def send(self, message: wire.Message) -> None:
        """Publish a message. Whether a verifier listens is checked before the first one and after each silence.

        :raises LinkClosed: when the channel is closed, or no verifier listens.
        """
        if not self._matched or self._closed.is_set():
            self._await_verifier()
        self._topics.publish(message)

    def receive(self, timeout: float) -> wire.Message:
        """The next message.

        :raises LinkTimeout: after ``timeout`` seconds without one.
        :raises LinkClosed: when the channel is closed, before or meanwhile.
        """
        if self._closed.is_set():
            raise LinkClosed("The channel is closed.")
        try:
            message = self._inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            if timeout > 0:
                self._matched = False
            raise LinkTimeout(f"The verifier node sent nothing within {timeout:.1f} s.") from None
        if message is None:
            raise LinkClosed("The channel was closed.")
        return message

    def reconnect(self) -> None:
        """Drop what is still queued, and make sure that a verifier listens.

        :raises LinkClosed: when none does.
        """
        if self._closed.is_set():
            raise LinkClosed("The channel is closed.")
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()
        self._matched = False
        self._await_verifier()

    def close(self) -> None:
        """Destroy the topics; a waiting :meth:`receive` ends. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._put(None)
        self._topics.close()

    def _await_verifier(self) -> None:
        deadline = time.monotonic() + self._match_timeout
        while not self._closed.is_set():
            if self._topics.peers() > 0 and self._topics.senders() > 0:
                self._matched = True
                return
            if time.monotonic() > deadline:
                raise LinkClosed(
                    "No verifier listens on the DDS topics: start verifier_node or bridge_node in this ROS domain "
                    "and namespace."
                )
            time.sleep(0.02)
        raise LinkClosed("The channel is closed.")

    def _put(self, message: wire.Message | None) -> None:
        try:
            self._inbox.put_nowait(message)
        except queue.Full:
            # Nobody reads: the oldest message is of no use any more, and the protocol survives losses.
            self._inbox.get_nowait()
            self._inbox.put_nowait(message)


class VerifierTopics(_Topics):
    """The verifier's end, for the verifier node and the bridge.

    ``on_message`` is called in the topics' thread with the robots' messages in their order (``TopicOrder``); call
    :meth:`start` once it may be. What is published passes the ``Outbox`` that a websocket has, too (FSD, Algorithm 2,
    Sender): early outcomes leave only while the link is free. DDS takes every sample at once and does not say what it
    has sent, so it is free while few bytes of early outcomes are unacknowledged.
    """

    _OVERHEAD_BYTES = 140  # of a sample: headers of IP, UDP and RTPS, and the heartbeat
    _POLL_S = 0.002
    _PATIENCE_S = 0.25  # a reader that acknowledges nothing (frozen, killed, far away) stops no early outcomes

    def __init__(self, node: Node, on_message: OnMessage, topics: TopicSet = EVERYTHING) -> None:
        super().__init__(node, topics.down, topics.up, TopicOrder(on_message, wire.Observation, wire.Question))
        self._outbox = Outbox()
        self._sending = threading.Lock()
        self._early_waits = threading.Event()
        self._unacknowledged, self._last_early = 0, 0.0  # bytes of early outcomes, time of the last one
        if wire.Outcome in topics.down:
            # Not by the node's own method: a QoS override is meant for the final outcomes.
            self._early_publisher = Node.create_publisher(
                self.node, ROS_TYPES[wire.Outcome], topics.down[wire.Outcome], qos.EARLY_OUTCOMES
            )
        self._early_sender = threading.Thread(target=self._send_early, name=f"{node.get_name()} early", daemon=True)
        self._early_sender.start()

    def publish(self, message: wire.Message) -> None:
        """Send one message; an early outcome waits while the link is busy. May be called from any thread."""
        self._outbox.put(message)
        self._send()

    def close(self) -> None:
        with self._sending:
            self._outbox.close()
            self._early_waits.set()
        self._early_sender.join(timeout=1.0)
        super().close()

    def _send(self) -> None:
        with self._sending:
            while True:
                message = self._outbox.get_nowait(early=False)
                if message is None and len(self._outbox) and self._is_free():
                    message = self._outbox.get_nowait()
                if message is None:
                    break
                if isinstance(message, wire.Outcome) and not message.is_final:
                    self._unacknowledged += self._write(message, self._early_publisher) + self._OVERHEAD_BYTES
                    self._last_early = time.monotonic()
                else:
                    super().publish(message)
            if len(self._outbox):
                self._early_waits.set()
            elif not self._outbox.closed:
                self._early_waits.clear()

    def _is_free(self) -> bool:
        if self._unacknowledged >= UNSENT_BYTES and (
            self._early_publisher.wait_for_all_acked(Duration())
            or time.monotonic() - self._last_early > self._PATIENCE_S
        ):
            self._unacknowledged = 0
        return self._unacknowledged < UNSENT_BYTES

    def _send_early(self) -> None:
        """The early outcomes that found the link busy."""
        while not self._outbox.closed:
            self._early_waits.wait()
            time.sleep(self._POLL_S)
            self._send()
