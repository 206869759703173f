# SPDX-License-Identifier: Apache-2.0
"""An emulated link of any delay and rate, around any channel on this machine.

In each direction a message waits until the link is free, occupies it for its size over the rate, and arrives after the
one-way delay and some jitter; on request it is carried as by TCP, which begins with a small window.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsd_ros.wire.channel import Channel, LinkClosed, LinkTimeout
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Message
from dsd_ros.wire.outbox import Outbox

if TYPE_CHECKING:
    from typing_extensions import Self

INITIAL_WINDOW = 14_600  # bytes: ten segments of 1460 (RFC 6928)
_SEGMENT = 1460  # bytes
_IDLE_TRIPS = 2.0  # round trips without sending, after which TCP begins again
_POLL_S = 0.05  # how soon the reader of a silent inner channel notices that it should end


@dataclass(frozen=True)
class LinkProfile:
    """One link: one-way delays in seconds (up: robot to verifier), rates in bits a second (0: unlimited).

    Jitter adds up to ``jitter_s`` to a message's delay, and never lets one message pass another.
    """

    delay_up_s: float = 0.0
    delay_down_s: float = 0.0
    jitter_s: float = 0.0
    rate_up_bps: float = 0.0
    rate_down_bps: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_up_s", "delay_down_s", "jitter_s"):
            value = getattr(self, name)
            if not 0.0 <= value <= 60.0:  # false for a NaN too
                raise ValueError(f"{name} is {value}; use 0 to 60 seconds")
        for name in ("rate_up_bps", "rate_down_bps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value == 0.0 or value >= 1000.0)):
                raise ValueError(f"{name} is {value}; use 0 (unlimited), or 1000 bits a second or more")

    def stretched(self, factor: float) -> LinkProfile:
        """The same link on a clock that runs ``factor`` times slower."""
        times = self.delay_up_s, self.delay_down_s, self.jitter_s
        rates = self.rate_up_bps, self.rate_down_bps
        return LinkProfile(*(time * factor for time in times), *(rate / factor for rate in rates))


class SlowStart:
    """TCP's congestion window without losses (RFC 5681, section 3.1): when bytes leave.

    It grows by every acknowledged byte, and returns to its ``first`` size (bytes) after two round trips without
    sending.
    """

    def __init__(self, first: int, trip_s: float, rate_bps: float) -> None:
        self._first, self._trip, self._rate = first, trip_s, rate_bps
        self._window = first
        self._under_way: deque[tuple[float, int]] = deque()  # acknowledged when, bytes
        self._unacknowledged = 0
        self._last = -math.inf

    def left(self, size: int, at: float) -> float:
        """When the last of ``size`` bytes leaves that are ready at time ``at``, after all earlier ones."""
        now = max(at, self._last)
        self._acknowledge(now)
        if now - self._last > _IDLE_TRIPS * self._trip:
            self._window = self._first
        while size > 0:
            self._acknowledge(now)
            some = min(size, _SEGMENT, self._window - self._unacknowledged)
            if some <= 0:
                now = self._under_way[0][0]
                continue
            now += 8.0 * some / self._rate if self._rate else 0.0
            self._under_way.append((now + self._trip, some))
            self._unacknowledged += some
            size -= some
        self._last = now
        return now

    def _acknowledge(self, now: float) -> None:
        """Take in the acknowledgements that have arrived."""
        while self._under_way and self._under_way[0][0] <= now:
            _, acknowledged = self._under_way.popleft()
            self._unacknowledged -= acknowledged
            self._window += acknowledged


class _Direction:
    """One way of the link: when a message leaves, and when it arrives. Its owner locks it."""

    def __init__(
        self, delay_s: float, jitter_s: float, rate_bps: float, seed: str, window: SlowStart | None = None
    ) -> None:
        self.free_at = 0.0
        self._delay, self._jitter, self._rate, self._window = delay_s, jitter_s, rate_bps, window
        self._random = random.Random(seed)
        self._last_arrival = 0.0

    def carry(self, size: int, at: float) -> float:
        """Put ``size`` bytes on the link at time ``at`` or when it is free; when they arrive."""
        begin = max(at, self.free_at)
        if self._window is not None:
            self.free_at = self._window.left(size, begin)
        else:
            self.free_at = begin + (8.0 * size / self._rate if self._rate else 0.0)
        arrival = self.free_at + self._delay + self._jitter * self._random.random()
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival


class EmulatedChannel:
    """A ``wire.channel.Channel``: ``inner`` as if reached over the link of ``profile``.

    The way up is first in, first out. On the way down early outcomes wait in the verifier's own ``Outbox``, so that a
    final outcome passes them. Jitter depends on ``seed`` and the number of the message. ``window_bytes``: TCP's first
    congestion window, 0: none. ``close`` closes ``inner`` too.
    """

    outbox = Outbox  # of the verifier's end

    def __init__(self, inner: Channel, profile: LinkProfile, seed: int = 0, window_bytes: int = 0) -> None:
        if window_bytes and window_bytes < _SEGMENT:
            raise ValueError(f"window_bytes is {window_bytes}; use 0 (none), or {_SEGMENT} bytes or more")
        self.bytes_up = 0
        self.bytes_down = 0
        self.profile = profile
        self._inner = inner
        self._seed = seed
        self._window_bytes = window_bytes
        self._connections = 0
        self._wake = threading.Condition()  # guards all below
        self._closed = False
        self._begin()

    def send(self, message: Message) -> None:
        size = len(encode(message))
        with self._wake:
            if self._closed or self._failure is not None:
                raise LinkClosed(f"the emulated link is down: {self._failure or 'it was closed'}")
            self._under_way_up.append((self._up.carry(size, time.monotonic()), message))
            self.bytes_up += size
            self._wake.notify_all()

    @property
    def busy(self) -> bool:
        """Whether the way up still carries what was sent before."""
        return self._up.free_at > time.monotonic()

    def receive(self, timeout: float) -> Message:
        until = time.monotonic() + max(0.0, timeout)
        with self._wake:
            while True:
                now = time.monotonic()
                self._load(now)
                arriving = self._under_way_down
                if arriving and arriving[0][0] <= now and not self._closed:
                    _, size, message = arriving.popleft()
                    self.bytes_down += size
                    return message
                if self._closed:
                    raise LinkClosed("the emulated link was closed")
                if self._failure is not None and not arriving and not len(self._waiting):
                    raise self._failure
                if now >= until:
                    raise LinkTimeout(f"nothing came over the emulated link for {timeout:.1f} s")
                next_event = until
                if arriving:
                    next_event = min(next_event, arriving[0][0])
                if len(self._waiting):
                    next_event = min(next_event, self._down.free_at)
                self._wake.wait(max(0.0, next_event - now))

    def reconnect(self) -> None:
        self._end()
        with self._wake:
            if self._closed:
                raise LinkClosed("the emulated link was closed")
        self._inner.reconnect()
        self._begin()

    def close(self) -> None:
        with self._wake:
            if self._closed:
                return
            self._closed = True
        self._end()
        with contextlib.suppress(Exception):  # the link is going down anyway
            for _, message in self._under_way_up:
                self._inner.send(message)
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Begin a fresh link with nothing under way, and its two threads."""
        self._connections += 1
        seed, profile = f"{self._seed}/{self._connections}", self.profile
        trip = profile.delay_up_s + profile.delay_down_s

        def direction(name: str, delay_s: float, rate_bps: float) -> _Direction:
            window = SlowStart(self._window_bytes, trip, rate_bps) if self._window_bytes else None
            return _Direction(delay_s, profile.jitter_s, rate_bps, f"{seed}/{name}", window)

        self._up = direction("up", profile.delay_up_s, profile.rate_up_bps)
        self._down = direction("down", profile.delay_down_s, profile.rate_down_bps)
        self._under_way_up: deque[tuple[float, Message]] = deque()
        self._under_way_down: deque[tuple[float, int, Message]] = deque()
        self._waiting = self.outbox()
        self._put_at = 0.0
        self._failure: Exception | None = None
        self._running = True
        self._threads = [
            threading.Thread(target=work, name=f"emulated-link-{way}", daemon=True)
            for way, work in (("up", self._work_up), ("down", self._work_down))
        ]
        for thread in self._threads:
            thread.start()

    def _end(self) -> None:
        with self._wake:
            self._running = False
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._failure = self._failure or error
            self._wake.notify_all()

    def _work_up(self) -> None:
        while True:
            with self._wake:
                while self._running:
                    left = self._under_way_up[0][0] - time.monotonic() if self._under_way_up else None
                    if left is not None and left <= 0.0:
                        break
                    self._wake.wait(left)
                if not self._running:
                    return
                _, message = self._under_way_up.popleft()
            try:
                self._inner.send(message)
            except Exception as error:  # whatever it is, the robot's half must see it
                self._fail(error)
                return

    def _work_down(self) -> None:
        while self._running:
            try:
                message = self._inner.receive(_POLL_S)
            except LinkTimeout:
                continue
            except Exception as error:
                self._fail(error)
                return
            with self._wake:
                now = time.monotonic()
                self._load(now)
                self._waiting.put(message)
                self._put_at = now
                self._load(now)
                self._wake.notify_all()

    def _load(self, now: float) -> None:
        """Put everything onto the link down that found it free by ``now``. Under the lock."""
        while self._down.free_at <= now:
            message = self._waiting.get_nowait()
            if message is None:
                return
            # A message that waited leaves when the link became free; one that found it free, when it came.
            size = len(encode(message))
            arrival = self._down.carry(size, max(self._down.free_at, self._put_at))
            self._under_way_down.append((arrival, size, message))
