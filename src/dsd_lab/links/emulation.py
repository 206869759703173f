"""A link as slow and as narrow as one wants, put round any channel on this machine.

Per direction a message waits until the link is free, occupies it for its size over the rate, and arrives the
one-way delay, and some jitter, later. On request it is carried as by TCP, which sends little of what is large before
the first acknowledgements are back. What travels is what the inner channel carries: real messages, the real codec,
the real verifier.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from dsd_ros.wire.channel import Channel, LinkClosed, LinkTimeout
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Message
from dsd_ros.wire.outbox import Outbox

INITIAL_WINDOW = 14_600  # bytes: ten segments of 1460 (RFC 6928)
_SEGMENT = 1460  # bytes
_IDLE_TRIPS = 2.0  # round trips without sending, behind which TCP begins anew
_POLL_S = 0.05  # how soon a reader of a silent inner channel notices that it should end


@dataclass(frozen=True)
class LinkProfile:
    """One link. Delays in seconds, one way; rates in bits a second, 0: unlimited; ValueError otherwise.

    Every message arrives at least its delay after it left; jitter adds up to ``jitter_s`` to that, and never
    lets one message pass another.
    """

    delay_up_s: float = field(default=0.0, metadata={"help": "robot to verifier, seconds"})
    delay_down_s: float = field(default=0.0, metadata={"help": "verifier to robot, seconds"})
    jitter_s: float = field(default=0.0, metadata={"help": "most that is added to a delay, seconds"})
    rate_up_bps: float = field(default=0.0, metadata={"help": "bits a second; 0: unlimited"})
    rate_down_bps: float = field(default=0.0, metadata={"help": "bits a second; 0: unlimited"})

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
        """The same link on a clock that runs ``factor`` times as long."""
        return replace(
            self,
            delay_up_s=self.delay_up_s * factor,
            delay_down_s=self.delay_down_s * factor,
            jitter_s=self.jitter_s * factor,
            rate_up_bps=self.rate_up_bps / factor,
            rate_down_bps=self.rate_down_bps / factor,
        )


class SlowStart:
    """TCP's congestion window where nothing is lost (RFC 5681, section 3.1): when bytes leave.

    No more than the window is on its way unacknowledged; it grows by every acknowledged byte, so that it doubles with
    each round trip, and is at its ``first`` size (bytes) again behind two round trips without sending.
    """

    def __init__(self, first: int, trip_s: float, rate_bps: float) -> None:
        self._first, self._trip, self._rate = first, trip_s, rate_bps
        self._window = first
        self._under_way: deque[tuple[float, int]] = deque()  # acknowledged when, bytes
        self._unacknowledged = 0
        self._last = -math.inf

    def left(self, size: int, at: float) -> float:
        """When the last of ``size`` bytes has left that were ready at time ``at``, behind those of before."""
        now = max(at, self._last)
        self._hear(now)
        if now - self._last > _IDLE_TRIPS * self._trip:
            self._window = self._first
        while size > 0:
            self._hear(now)
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

    def _hear(self, now: float) -> None:
        """Take in the acknowledgements that have come."""
        while self._under_way and self._under_way[0][0] <= now:
            _, acknowledged = self._under_way.popleft()
            self._unacknowledged -= acknowledged
            self._window += acknowledged


class _Direction:
    """One way of the link: when a message leaves, and when it arrives. Not locked; its owner is."""

    def __init__(
        self, delay_s: float, jitter_s: float, rate_bps: float, seed: str,
        window: SlowStart | None = None,
    ) -> None:  # fmt: skip
        self.free_at = 0.0
        self._delay, self._jitter, self._rate, self._window = delay_s, jitter_s, rate_bps, window
        self._random = random.Random(seed)
        self._last_arrival = 0.0

    def carry(self, size: int, at: float) -> float:
        """Put ``size`` bytes on the link at time ``at`` or when it is free; when they have arrived."""
        begin = max(at, self.free_at)
        if self._window is not None:
            self.free_at = self._window.left(size, begin)
        else:
            self.free_at = begin + (8.0 * size / self._rate if self._rate else 0.0)
        arrival = self.free_at + self._delay + self._jitter * self._random.random()
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival


class EmulatedChannel:
    """See ``wire.channel.Channel``: ``inner`` as if reached over the link of ``profile``.

    The way up is first in, first out. On the way down early outcomes wait for the link in an ``Outbox``, the
    verifier's own queue, so that a final outcome passes them. Bytes are those that went onto the emulated link:
    early outcomes that a final one made needless are not among them. Jitter depends on ``seed`` and the number
    of the message alone. ``window_bytes``: TCP's first congestion window, 0: none. ``close`` closes ``inner`` too,
    after handing on what had been sent. ValueError for a window below a segment of 1460 bytes.
    """

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
            self._waiting.adopt_policy(message)
            self._under_way_up.append((self._up.carry(size, time.monotonic()), message))
            self.bytes_up += size
            self._wake.notify_all()

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
        try:
            for _, message in self._under_way_up:
                self._inner.send(message)
        except Exception:  # the link is going down anyway; what it thinks of the last messages is no news
            pass
        self._inner.close()

    def __enter__(self) -> EmulatedChannel:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _begin(self) -> None:
        """A fresh link, nothing under way, and the two threads that work it."""
        self._connections += 1
        seed, profile = f"{self._seed}/{self._connections}", self.profile
        trip = profile.delay_up_s + profile.delay_down_s

        def window(rate_bps: float) -> SlowStart | None:
            return SlowStart(self._window_bytes, trip, rate_bps) if self._window_bytes else None

        self._up = _Direction(
            profile.delay_up_s, profile.jitter_s, profile.rate_up_bps, f"{seed}/up",
            window(profile.rate_up_bps),
        )  # fmt: skip
        self._down = _Direction(
            profile.delay_down_s, profile.jitter_s, profile.rate_down_bps, f"{seed}/down",
            window(profile.rate_down_bps),
        )  # fmt: skip
        self._under_way_up: deque[tuple[float, Message]] = deque()
        self._under_way_down: deque[tuple[float, int, Message]] = deque()
        self._waiting = Outbox()
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
                    left = self._wake_in(self._under_way_up[0][0] if self._under_way_up else None)
                    if left is not None and left <= 0.0:
                        break
                    self._wake.wait(left)
                if not self._running:
                    return
                _, message = self._under_way_up.popleft()
            try:
                self._inner.send(message)
            except Exception as error:  # whatever it is, the robot's half has to hear of it
                self._fail(error)
                return

    @staticmethod
    def _wake_in(due: float | None) -> float | None:
        return None if due is None else due - time.monotonic()

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
        """Everything that has found the link down free by ``now`` goes onto it. Under the lock."""
        while self._down.free_at <= now:
            message = self._waiting.get_nowait()
            if message is None:
                return
            # What waited leaves when the link became free; what found it free, when it came.
            size = len(encode(message))
            arrival = self._down.carry(size, max(self._down.free_at, self._put_at))
            self._under_way_down.append((arrival, size, message))
