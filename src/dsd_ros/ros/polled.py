# SPDX-License-Identifier: Apache-2.0
"""Poll topics at a node's own rate: an executor takes longer per message than these nodes do for its content."""

from __future__ import annotations

import contextlib
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

from dsd_ros.ros.running import RunnableNode, companion

_NICENESS = 10
_RETRY_S = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Polled:
    """Subscriptions on a companion node, ``_<owner>_inputs``, that no executor spins."""

    def __init__(self, owner: Node) -> None:
        self._node = companion(owner, "inputs")

    def subscribe(self, kind: type, topic: str, profile: QoSProfile) -> Any:
        """A subscription for :func:`take` and :meth:`unsubscribe`."""
        return self._node.create_subscription(kind, topic, _unused, profile)

    def unsubscribe(self, subscription: Any) -> None:
        """Destroy a subscription."""
        self._node.destroy_subscription(subscription)

    def close(self) -> None:
        self._node.destroy_node()


def take(subscription: Any) -> list[Any]:
    """The messages since the last call, oldest first, up to the topic's depth; without those that are damaged."""
    found = []
    for sent in take_raw(subscription):
        with contextlib.suppress(RuntimeError):  # from rmw
            found.append(deserialize_message(sent, subscription.msg_type))
    return found


def take_raw(subscription: Any) -> list[bytes]:
    """:func:`take` without deserialization."""
    found: list[bytes] = []
    depth = subscription.qos_profile.depth
    with subscription.handle:
        while len(found) < depth:  # an empty take costs as much as a message
            taken = subscription.handle.take_message(subscription.msg_type, True)
            if taken is None:
                break
            found.append(taken[0])
    return found


def lower_priority() -> None:
    """Spare the other processes: one OpenCV thread, low priority, fewer page faults. For processes that only draw."""
    cv2.setNumThreads(1)  # leave the other cores to the models
    os.nice(_NICENESS)  # and let them go first on this one
    if sys.platform == "linux":
        # Otherwise malloc maps and unmaps fresh pages for every picture.
        libc = ctypes.CDLL(None)
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            if hasattr(libc, "mallopt"):
                libc.mallopt(option, 32 << 20)


def _unused(_: object) -> None:
    """The callback, which no executor ever calls."""


class RateTimer:
    """Says when the next call is due at a fixed rate; ask at least that often."""

    def __init__(self, rate: float) -> None:
        self._period = 1.0 / rate
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Whether a call is due at ``now`` (s), a quarter of the period early at most."""
        if now < self._next - 0.25 * self._period:
            return False
        late = now - self._next > self._period  # missed calls are skipped
        self._next = (now if late else self._next) + self._period
        return True


class PacedThread:
    """Calls ``work`` in its own thread; ``work`` returns the period until the next call, s.

    An executor takes about a millisecond to wake for a timer. After an exception ``work`` is tried again, since it may
    like the next messages; when it fails for ``PATIENCE_S``, the thread ends and sets ``node.failure``.
    """

    PATIENCE_S = 30.0

    def __init__(self, node: RunnableNode, work: Callable[[], float]) -> None:
        self._node, self._work = node, work
        # A plain lock wakes faster than an Event, which runs a hundred lines of Python.
        self._open = threading.Lock()
        self._open.acquire()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{node.get_name()} pace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop calling; returns when a call in progress has finished."""
        if not self._closed:
            self._closed = True
            self._open.release()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        due = worked = time.monotonic()
        while not self._open.acquire(timeout=max(0.0, due - time.monotonic())):
            try:
                # A late call shifts the schedule; calls never pile up.
                due = max(due, time.monotonic() - 0.1) + self._work()
                worked = time.monotonic()
            except Exception as error:
                if self._closed:
                    return
                due = time.monotonic() + _RETRY_S
                sentence = f"Drawing failed: {type(error).__name__}: {error!s:.200}"
                if due - worked > self.PATIENCE_S:
                    self._node.failure = sentence
                    return
                self._node.get_logger().error(sentence, throttle_duration_sec=5.0)
