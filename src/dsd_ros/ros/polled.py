"""Topics that are looked into now and then, instead of waking a process with every message.

An executor takes longer over a message than most of these nodes over its content, and odometry comes 50 times a
second: who needs only what is newest 15 times a second, asks 15 times a second.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cv2
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message

from dsd_ros.ros.companion import companion

_NICENESS = 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Polled:
    """Subscriptions of a node of its own, ``<owner>_ears``, which no executor knows of."""

    def __init__(self, owner: Node) -> None:
        self._node = companion(owner, "ears")

    def subscribe(self, kind: type, topic: str, profile: QoSProfile) -> Any:
        """A subscription for :func:`take` and :meth:`drop`."""
        return self._node.create_subscription(kind, topic, _unused, profile)

    def drop(self, subscription: Any) -> None:
        """Listen no more."""
        self._node.destroy_subscription(subscription)

    def close(self) -> None:
        self._node.destroy_node()


def take(subscription: Any) -> list[Any]:
    """The messages that have come since the last call, oldest first, as far as the topic's depth kept them."""
    return [deserialize_message(sent, subscription.msg_type) for sent in take_raw(subscription)]


def take_raw(subscription: Any) -> list[bytes]:
    """:func:`take` with the messages as they were sent. Where none came, no message object is made, either."""
    found: list[bytes] = []
    depth = subscription.qos_profile.depth
    with subscription.handle:
        while len(found) < depth:  # to ask in vain costs as much as to be given a message
            taken = subscription.handle.take_message(subscription.msg_type, True)
            if taken is None:
                break
            found.append(taken[0])
    return found


def lower_priority() -> None:
    """Settings of this process that pictures are cheaper with; for processes that only draw."""
    cv2.setNumThreads(1)  # the models want the other cores
    os.nice(_NICENESS)  # and come first on this one
    if sys.platform == "linux":
        # Every picture would otherwise be given fresh pages by the kernel, and give them back.
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            if hasattr(libc, "mallopt"):
                libc.mallopt(option, 32 << 20)


def _unused(_: object) -> None:
    """No executor ever calls it."""


class RateTimer:
    """Tells when something done so often a second is due, asked no less often."""

    def __init__(self, rate: float) -> None:
        self._period = 1.0 / rate
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Whether it is; ``now`` (s) may be a quarter of the time between two early."""
        if now < self._next - 0.25 * self._period:
            return False
        late = now - self._next > self._period  # what was missed is not made up for
        self._next = (now if late else self._next) + self._period
        return True


class PacedThread:
    """Calls ``work`` in a thread of its own; it returns how long to wait from its beginning, s.

    An executor takes about a millisecond to wake for a timer. A failure of ``work`` ends the thread and becomes the
    node's: ``node.failure``.
    """

    def __init__(self, node: Any, work: Callable[[], float]) -> None:
        self._node, self._work = node, work
        # A plain lock: an Event wakes through a hundred lines of Python, here 15 times a second.
        self._open = threading.Lock()
        self._open.acquire()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{node.get_name()} pace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Call no more; returns once a call under way is over."""
        if not self._closed:
            self._closed = True
            self._open.release()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._open.acquire(timeout=max(0.0, due - time.monotonic())):
                # Too slow means fewer calls, not a pile of them.
                due = max(due, time.monotonic() - 0.1) + self._work()
        except Exception as error:
            if not self._closed:
                self._node.failure = f"Drawing failed: {type(error).__name__}: {error}"
