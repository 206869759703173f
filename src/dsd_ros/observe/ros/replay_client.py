# SPDX-License-Identifier: Apache-2.0
"""Ask a draft node to decode recorded pictures, and collect the tokens from the topics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from builtin_interfaces.msg import Time
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

from dsd_msgs.msg import Draft, Observation, Outcome, SessionReply, VerifiedTokens
from dsd_msgs.srv import Decode
from dsd_ros.observe.bag.replay_system import ReplayReply, ReplayRequest
from dsd_ros.observe.bag.replay_tokens import TrafficLog
from dsd_ros.observe.ros.bag_pictures import from_bag
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.ros import qos
from dsd_ros.ros.managed import LifecycleWatch
from dsd_ros.ros.stamps import seconds, to_duration
from dsd_ros.ros.standalone import SpinningNode

_TICK_S = 0.05  # interval of clock and picture messages; best effort may lose one
_SETTLE_S = 2.0  # wait for the last topic messages after the service has answered

Waited = Callable[[], None]  # called while waiting; raises to end it


class ReplayClient:
    """A ROS node in its own namespace, spinning in its own thread."""

    def __init__(self, namespace: str, nodes: tuple[str, ...]) -> None:
        """:param nodes: the lifecycle nodes to wait for: the draft node and the verifier or bridge."""
        self._ros = SpinningNode("replay_client", namespace)
        node = self._ros.node
        self._lock = threading.Lock()
        self._now = 0
        self._since = time.monotonic()
        self._rate = 0.0  # of the clock between two steps, s per s
        self._shown: Image | None = None
        self._log = TrafficLog()
        self.target_fingerprint = ""
        self._camera = node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self._clock = node.create_publisher(Clock, "clock", qos.CLOCK)
        for kind, topic, take in (
            (Observation, "dsd/observation", lambda m: self._log.observation(m, time.time_ns())),
            (VerifiedTokens, "dsd/verified_tokens", lambda m: self._log.verified(m)),
            (Draft, "dsd/draft", lambda m: self._log.draft(m)),
            (Outcome, "dsd/outcome", lambda m: self._log.outcome(m)),
            (SessionReply, "dsd/session_reply", self._opened),
        ):
            node.create_subscription(kind, topic, self._locked(take), qos.OUTCOMES)
        self._decode = node.create_client(Decode, "dsd/decode")
        # Created after the subscriptions: DDS announces both in this order, so a node that answers has discovered the
        # subscriptions, and nothing of the first reply is missed.
        self._watches = [LifecycleWatch(node, name) for name in nodes]
        node.create_timer(_TICK_S, self._tick)
        self._ros.start()

    def close(self) -> None:
        self._ros.close()

    def ready(self) -> bool:
        """Whether the draft node has a session with the verifier and receives this node's pictures."""
        return (
            all(watch.active() for watch in self._watches)
            and self._decode.service_is_ready()
            and self._camera.get_subscription_count() > 0
        )

    def run_clock(self, stamp: int, rate: float) -> None:
        """Set the clock to ``stamp`` (ns); it advances at ``rate`` seconds per second (0: it stands still)."""
        with self._lock:
            self._now, self._rate, self._since = stamp, rate, time.monotonic()

    @property
    def now(self) -> int:
        """The clock, ns."""
        return self._now + int((time.monotonic() - self._since) * self._rate * 1e9)

    def ask(self, question: ReplayRequest, timeout: float, waited: Waited) -> ReplayReply:
        """Publish a picture until the reply about it arrives.

        :param timeout: for the whole reply, s.
        :raises ImageMessageError: when the picture cannot be read.
        """
        picture = from_bag(question.picture, question.format)
        picture.header.stamp = _time(question.stamp)
        picture.header.frame_id = FrameSettings.camera_frame
        request = Decode.Request(instruction=question.instruction, not_before=_time(question.stamp))
        request.timeout = to_duration(timeout)
        request.history_stamps = [_time(stamp) for stamp, _ in question.history]
        request.history_actions = [action for _, action in question.history]
        with self._lock:
            self._shown = picture
        self._camera.publish(picture)
        began = time.monotonic()
        future = self._decode.call_async(request)
        while not future.done():
            waited()
            if time.monotonic() - began > timeout + 10.0:
                return ReplayReply(message="The draft node did not answer.", seconds=timeout)
            time.sleep(0.002)
        with self._lock:
            self._shown = None
        answer = future.result()
        if not answer.success:
            return ReplayReply(message=answer.message or "The decode failed.", seconds=time.monotonic() - began)
        stats = answer.stats
        tokens = self._tokens(stats.tokens)
        observed = answer.observation_stamp
        return ReplayReply(
            text=answer.text,
            tokens=tokens,
            count=stats.tokens,
            rounds=stats.rounds,
            seconds=seconds(stats.total_time),
            stamp=observed.sec * 1_000_000_000 + observed.nanosec,
        )

    def _tokens(self, count: int) -> list[int] | None:
        """The tokens of the newest reply; waits for messages still on their way."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            with self._lock:
                found = self._log.replies[-1].tokens(count) if self._log.replies else None
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(0.002)

    def _opened(self, message: SessionReply) -> None:
        if message.target_fingerprint:
            self.target_fingerprint = message.target_fingerprint

    def _locked(self, take: Callable[[Any], None]) -> Callable[[Any], None]:
        def receive(message: Any) -> None:
            with self._lock:
                take(message)

        return receive

    def _tick(self) -> None:
        with self._lock:
            now, shown = self.now, self._shown
        self._clock.publish(Clock(clock=_time(now)))
        if shown is not None:
            self._camera.publish(shown)


def _time(stamp: int) -> Time:
    return Time(sec=stamp // 1_000_000_000, nanosec=stamp % 1_000_000_000)
