"""The protocol over DDS topics: the robot's end as a Channel, the verifier's end as a set of
topics.

Messages are serialized here and travel as raw CDR, so that a payload is serialized once and its
size is known. Every message type has a topic of its own, and DDS keeps order only within a topic;
what must not overtake (a draft its observation) is put back in order where it arrives (``topic_order``).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message, serialize_message

from dsd_ros.ros import qos
from dsd_ros.ros.companion import companion
from dsd_ros.ros.conversions import ROS_TYPES, from_ros, to_ros
from dsd_ros.ros.topic_order import HELD_S, TopicOrder
from dsd_ros.wire import messages as wire
from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.codec import WireError


@dataclass(frozen=True)
class TopicSet:
    """Topics of one concern: those that the robot writes (``up``), and those that the verifier writes."""

    up: Mapping[type, str]
    down: Mapping[type, str]


DECODING = TopicSet(
    {
        wire.SessionRequest: "session_request",
        wire.Observation: "observation",
        wire.Draft: "draft",
        wire.SessionClose: "session_close",
    },
    {wire.SessionReply: "session_reply", wire.Outcome: "outcome", wire.Refusal: "refusal"},
)
# What goes both ways has a topic for each: nobody is to hear his own words.
AGGREGATION = TopicSet(
    {
        wire.Question: "question",
        wire.Proposal: "proposal_up",
        wire.Verdict: "verdict_up",
        wire.Reveal: "reveal_up",
        wire.QuestionEnd: "question_end_up",
    },
    {
        wire.QuestionReply: "question_reply",
        wire.Proposal: "proposal_down",
        wire.Verdict: "verdict_down",
        wire.Reveal: "reveal_down",
        wire.QuestionEnd: "question_end_down",
    },
)
EVERYTHING = TopicSet({**DECODING.up, **AGGREGATION.up}, {**DECODING.down, **AGGREGATION.down})
_QUEUE_LIMIT = 1024
_MANY = (wire.Proposal, wire.Verdict, wire.Reveal)

OnMessage = Callable[[wire.Message], None]


def _qos_of(struct: type) -> QoSProfile:
    if struct is wire.Outcome:
        return qos.OUTCOMES
    return qos.PROPOSALS if struct in _MANY else qos.LINK


class _Topics:
    """Publishers for one direction and subscriptions for the other, in the node ``<owner>_link``."""

    def __init__(
        self, owner: Node, outgoing: Mapping[type, str], incoming: Mapping[type, str], order: TopicOrder
    ) -> None:
        self._owner = owner
        self._order = order
        self.bytes_out = 0
        self.bytes_in = 0
        self.node = companion(owner, "link")
        self._publishers = {
            struct: self.node.create_publisher(ROS_TYPES[struct], topic, _qos_of(struct))
            for struct, topic in outgoing.items()
        }
        self._subscriptions = [
            self.node.create_subscription(
                ROS_TYPES[struct], topic, self._receiver(ROS_TYPES[struct]), _qos_of(struct), raw=True
            )
            for struct, topic in incoming.items()
        ]
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = self.node.create_timer(HELD_S / 2, order.release_old, clock=steady)
        self._executor = SingleThreadedExecutor(context=owner.context)
        self._executor.add_node(self.node)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, name=self.node.get_name(), daemon=True)

    def start(self) -> None:
        """Begin to receive. Not in the constructor: a message could come before its receiver is built."""
        self._thread.start()

    def publish(self, message: wire.Message) -> None:
        """Send one message. May be called from any thread."""
        payload = serialize_message(to_ros(message))
        self.bytes_out += len(payload)
        self._publishers[type(message)].publish(payload)

    def peers(self) -> int:
        """How many others listen to everything that this side sends."""
        return min(p.get_subscription_count() for p in self._publishers.values())

    def senders(self) -> int:
        """How many others offer everything that this side listens to."""
        return min(self.node.count_publishers(s.topic_name) for s in self._subscriptions)

    def destroy(self) -> None:
        """Give thread and topics back. Not from a callback."""
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
            except Exception as error:  # a defect; the link must outlive the message that found it
                self._owner.get_logger().error(f"a message was lost to {error!r}")

    def _receiver(self, ros_type: type) -> Callable[[bytes], None]:
        def receive(payload: bytes) -> None:
            self.bytes_in += len(payload)
            try:
                message = from_ros(deserialize_message(payload, ros_type))
            except WireError as error:
                self._owner.get_logger().warning(f"dropped: {error}", throttle_duration_sec=1.0)
                return
            self._order.arrived(message)

        return receive


class DdsChannel:
    """The robot's end: implements :class:`dsd_ros.wire.channel.Channel` over the node's topics.

    It spins its topics itself, so ``node`` need not be spinning.

    :param match_timeout: how long a send waits for a verifier to appear, s.
    :param topics: what it carries; the other concerns may be another node's.
    """

    def __init__(self, node: Node, match_timeout: float = 1.0, topics: TopicSet = DECODING) -> None:
        self._inbox: queue.Queue[wire.Message | None] = queue.Queue(_QUEUE_LIMIT)
        self._match_timeout = match_timeout
        self._closed = threading.Event()
        self._matched = False  # as far as is known; asking the ROS graph takes longer than sending
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
        """Publish to whoever verifies. Whether anybody does is asked at first and after each silence.

        :raises LinkClosed: when the channel is closed, or nobody listens.
        """
        if not self._matched or self._closed.is_set():
            self._await_verifier()
        self._topics.publish(message)

    def receive(self, timeout: float) -> wire.Message:
        """The next message.

        :raises LinkTimeout: after ``timeout`` seconds without one.
        :raises LinkClosed: when the channel is or gets closed.
        """
        if self._closed.is_set():
            raise LinkClosed("The channel is closed.")
        try:
            message = self._inbox.get(timeout=max(0.0, timeout))
        except queue.Empty:
            self._matched = False
            raise LinkTimeout(f"No word from the verifier node within {timeout:.1f} s.") from None
        if message is None:
            raise LinkClosed("The channel was closed.")
        return message

    def reconnect(self) -> None:
        """Forget what is still queued, and make sure that somebody listens.

        :raises LinkClosed: when nobody does.
        """
        if self._closed.is_set():
            raise LinkClosed("The channel is closed.")
        while True:
            try:
                self._inbox.get_nowait()
            except queue.Empty:
                break
        self._matched = False
        self._await_verifier()

    def close(self) -> None:
        """Give the topics back; a waiting :meth:`receive` ends. May be called twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._put(None)
        self._topics.destroy()

    def _await_verifier(self) -> None:
        deadline = time.monotonic() + self._match_timeout
        while not self._closed.is_set():
            if self._topics.peers() > 0 and self._topics.senders() > 0:
                self._matched = True
                return
            if time.monotonic() > deadline:
                raise LinkClosed(
                    "No verifier listens on the DDS topics: start verifier_node or bridge_node in "
                    "this ROS domain and namespace."
                )
            time.sleep(0.02)
        raise LinkClosed("The channel is closed.")

    def _put(self, message: wire.Message | None) -> None:
        try:
            self._inbox.put_nowait(message)
        except queue.Full:
            # Nobody reads: what is oldest is of no use to anybody, and the protocol survives
            # losses.
            self._inbox.get_nowait()
            self._inbox.put_nowait(message)


class VerifierTopics:
    """The verifier's end of the topics, for the verifier node and the bridge.

    ``on_message`` is called in the topics' thread with the robots' messages, a draft never before its
    observation, and what is said about a question never before the question.
    """

    def __init__(self, node: Node, on_message: OnMessage, topics: TopicSet = EVERYTHING) -> None:
        order = TopicOrder(on_message, wire.Observation, wire.Question)
        self._topics = _Topics(node, topics.down, topics.up, order)

    def start(self) -> None:
        """Begin to receive; call it once ``on_message`` can be served."""
        self._topics.start()

    @property
    def bytes_up(self) -> int:
        return self._topics.bytes_in

    @property
    def bytes_down(self) -> int:
        return self._topics.bytes_out

    def publish(self, message: wire.Message) -> None:
        """Answer the robots. May be called from any thread."""
        self._topics.publish(message)

    def close(self) -> None:
        """Give the topics back."""
        self._topics.destroy()
