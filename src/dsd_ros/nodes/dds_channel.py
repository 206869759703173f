"""The protocol over DDS topics: the robot's end as a Channel, the verifier's end as a set of
topics.

Messages are serialized here and travel as raw CDR, so that a payload is serialized once and its
size is known. Every message type has a topic of its own, and DDS keeps order only within a topic;
what must not overtake (a draft its observation) is put back in order at the verifier's end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message, serialize_message

from dsd_ros.nodes import qos
from dsd_ros.nodes.companion import companion
from dsd_ros.nodes.conversions import ROS_TYPES, from_ros, to_ros
from dsd_ros.wire import messages as wire
from dsd_ros.wire.channel import LinkClosed, LinkTimeout
from dsd_ros.wire.codec import WireError

UP_TOPICS: dict[type, str] = {
    wire.SessionRequest: "session_request",
    wire.Observation: "observation",
    wire.Draft: "draft",
    wire.SessionClose: "session_close",
}
DOWN_TOPICS: dict[type, str] = {
    wire.SessionReply: "session_reply",
    wire.Outcome: "outcome",
    wire.Refusal: "refusal",
}
_QUEUE_LIMIT = 1024
_HELD_LIMIT = 64  # drafts that wait for their observation, per session
_HELD_S = 0.5
_SESSIONS_REMEMBERED = 256

OnMessage = Callable[[wire.Message], None]


def _qos_of(struct: type) -> QoSProfile:
    return qos.OUTCOMES if struct is wire.Outcome else qos.LINK


class _Topics:
    """Publishers for one direction and subscriptions for the other, in the node ``<owner>_link``."""

    def __init__(
        self,
        owner: Node,
        outgoing: dict[type, str],
        incoming: dict[type, str],
        on_message: OnMessage,
    ) -> None:
        self._owner = owner
        self._on_message = on_message
        self.bytes_out = 0
        self.bytes_in = 0
        self.node = companion(owner, "link")
        self._publishers = {
            struct: self.node.create_publisher(ROS_TYPES[struct], topic, _qos_of(struct))
            for struct, topic in outgoing.items()
        }
        self._subscriptions = [
            self.node.create_subscription(
                ROS_TYPES[struct],
                topic,
                self._receiver(ROS_TYPES[struct]),
                _qos_of(struct),
                raw=True,
            )
            for struct, topic in incoming.items()
        ]
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
            self._on_message(message)

        return receive


class DdsChannel:
    """The robot's end: implements :class:`dsd_ros.wire.channel.Channel` over the node's topics.

    It spins its topics itself, so ``node`` need not be spinning.

    :param match_timeout: how long a send waits for a verifier to appear, s.
    """

    def __init__(self, node: Node, match_timeout: float = 1.0) -> None:
        self._inbox: queue.Queue[wire.Message | None] = queue.Queue(_QUEUE_LIMIT)
        self._match_timeout = match_timeout
        self._closed = threading.Event()
        self._matched = False  # as far as is known; asking the ROS graph takes longer than sending
        self._topics = _Topics(node, UP_TOPICS, DOWN_TOPICS, self._put)
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
    observation.
    """

    def __init__(self, node: Node, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._lock = threading.Lock()
        self._observed: dict[int, int] = {}  # session -> newest reply whose observation came
        self._held: dict[int, list[tuple[float, wire.Draft]]] = {}
        self._topics = _Topics(node, DOWN_TOPICS, UP_TOPICS, self._arrived)
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = self._topics.node.create_timer(_HELD_S / 2, self._release_old, clock=steady)

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

    def _arrived(self, message: Any) -> None:
        released: list[wire.Draft] = []
        with self._lock:
            if isinstance(message, wire.Draft) and self._too_early(message):
                held = self._held.setdefault(message.session, [])
                if len(held) < _HELD_LIMIT:
                    held.append((time.monotonic(), message))
                return
            if isinstance(message, wire.Observation):
                self._observed.pop(message.session, None)
                self._observed[message.session] = message.reply  # moved to the end: newest
                while len(self._observed) > _SESSIONS_REMEMBERED:
                    self._observed.pop(next(iter(self._observed)))
                released = [draft for _, draft in self._held.pop(message.session, [])]
            elif isinstance(message, wire.SessionClose):
                self._observed.pop(message.session, None)
                self._held.pop(message.session, None)
        self._on_message(message)
        for draft in released:
            self._on_message(draft)

    def _too_early(self, draft: wire.Draft) -> bool:
        return draft.reply > self._observed.get(draft.session, -1)

    def _release_old(self) -> None:
        """An observation that does not come is the engine's to refuse: a session it no longer
        knows.
        """
        limit = time.monotonic() - _HELD_S
        with self._lock:
            late = [s for s, held in self._held.items() if held and held[0][0] < limit]
            drafts = [draft for session in late for _, draft in self._held.pop(session)]
        for draft in drafts:
            self._on_message(draft)
