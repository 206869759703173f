# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import queue
import threading
import time

import pytest

from dsd_lab.links.emulation import INITIAL_WINDOW, EmulatedChannel, LinkProfile, SlowStart
from dsd_ros.wire.channel import LinkClosed, LinkRefused, LinkTimeout, LocalChannel
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Outcome, Refusal, SessionClose

SESSION = 1


def numbered(number: int) -> SessionClose:
    return SessionClose(number)


def outcome(layer: int, confidence: float, final: bool = False, next_token: int = 7) -> Outcome:
    return Outcome(
        session=SESSION, reply=1, round=1, accepted=0, next_token=next_token, layer=layer,
        is_final=final, confidence=confidence, compute_us=0,
    )  # fmt: skip


class Pipe:
    """A channel without a link: what is sent can be looked at, what is put arrives."""

    def __init__(self) -> None:
        self.bytes_up = self.bytes_down = 0
        self.sent: list = []
        self.times: list[float] = []
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.reconnects = self.closes = 0
        self.breaks: Exception | None = None

    def send(self, message) -> None:
        if self.breaks is not None:
            raise self.breaks
        self.times.append(time.monotonic())
        self.sent.append(message)

    def receive(self, timeout):
        if self.breaks is not None:
            raise self.breaks
        try:
            return self.inbox.get(timeout=timeout)
        except queue.Empty:
            raise LinkTimeout("nothing") from None

    def reconnect(self) -> None:
        self.reconnects += 1
        self.breaks = None

    def close(self) -> None:
        self.closes += 1


def until(condition) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.005)
    pytest.fail("it did not happen within a minute")


def test_what_is_large_leaves_in_windows_that_double():
    window, trip = SlowStart(14_600, 0.3, 0.0), 0.3
    # 14.6, 29.2, 58.4 kB, each a round trip after the other.
    assert window.left(14_600, 10.0) == 10.0
    assert window.left(29_200, 10.0) == pytest.approx(10.0 + trip)
    assert window.left(58_401, 10.0) == pytest.approx(10.0 + 3 * trip)  # a byte too many
    assert SlowStart(14_600, 0.3, 0.0).left(15 * 14_600, 0.0) == pytest.approx(3 * trip)
    # A window that is open stays so until nothing was sent for two round trips.
    opened = window.left(500_000, 11.0)
    assert window.left(250_000, opened + 1.5 * trip) == opened + 1.5 * trip
    idle = opened + 4.0 * trip
    assert window.left(14_600, idle) == idle and window.left(1, idle) == pytest.approx(idle + trip)


def test_a_full_window_is_no_faster_than_the_rate():
    rate, size = 8e6, 3_000_000
    alone = SlowStart(1 << 30, 0.2, rate).left(size, 5.0)
    assert alone == pytest.approx(5.0 + 8.0 * size / rate)
    started = SlowStart(INITIAL_WINDOW, 0.2, rate).left(size, 5.0)
    # What a trip holds at this rate, 200 kB, is reached after four of them, in which 219 kB leave.
    assert started == pytest.approx(alone + 4 * 0.2 - 0.219, abs=0.01)
    assert SlowStart(INITIAL_WINDOW, 0.0, rate).left(size, 5.0) == pytest.approx(alone)


def test_a_channel_carries_as_tcp_where_it_is_asked_to():
    profile = LinkProfile(delay_up_s=0.02, delay_down_s=0.02)
    taken = []
    for window in (0, INITIAL_WINDOW):
        pipe = Pipe()
        with EmulatedChannel(pipe, profile, window_bytes=window) as channel:
            message = Refusal(SESSION, 1, 1, "busy", "x" * 60_000)
            began = time.monotonic()
            channel.send(message)
            until(lambda pipe=pipe: pipe.sent)
            taken.append(pipe.times[0] - began)
    assert taken[1] >= 0.02 + 2 * 0.04 and taken[1] > taken[0]
    with pytest.raises(ValueError, match="window_bytes is 100; use 0"):
        EmulatedChannel(Pipe(), profile, window_bytes=100)


def test_a_message_takes_at_least_its_delay_each_way():
    pipe = Pipe()
    with EmulatedChannel(pipe, LinkProfile(delay_up_s=0.05, delay_down_s=0.08)) as channel:
        began = time.monotonic()
        channel.send(numbered(1))
        until(lambda: pipe.sent)
        assert pipe.times[0] - began >= 0.05
        began = time.monotonic()
        pipe.inbox.put(numbered(2))
        assert channel.receive(10) == numbered(2)
        assert time.monotonic() - began >= 0.08


def test_a_narrow_link_is_occupied_by_each_message_in_turn():
    """Ten messages of 12 bytes at 8 kbit/s: 12 ms each, however soon they follow one another."""
    pipe, size = Pipe(), len(encode(numbered(0)))
    with EmulatedChannel(pipe, LinkProfile(rate_up_bps=8000, rate_down_bps=8000)) as channel:
        began = time.monotonic()
        for number in range(10):
            channel.send(numbered(number))
        until(lambda: len(pipe.sent) == 10)
        for index, at in enumerate(pipe.times):
            assert at - began >= (index + 1) * size / 1000 - 1e-6
        began = time.monotonic()
        for number in range(5):
            pipe.inbox.put(numbered(number))
        for number in range(5):
            assert channel.receive(10) == numbered(number)
            assert time.monotonic() - began >= (number + 1) * size / 1000 - 1e-6


def test_jitter_never_reorders():
    pipe = Pipe()
    profile = LinkProfile(delay_up_s=0.001, delay_down_s=0.001, jitter_s=0.02)
    with EmulatedChannel(pipe, profile, 1) as channel:
        for number in range(40):
            channel.send(numbered(number))
            pipe.inbox.put(numbered(number))
        assert [channel.receive(10) for _ in range(40)] == [numbered(n) for n in range(40)]
        until(lambda: len(pipe.sent) == 40)
        assert pipe.sent == [numbered(n) for n in range(40)]


def test_jitter_is_the_seeds():
    from dsd_lab.links.emulation import _Direction

    def arrivals(seed: str) -> list[float]:
        way = _Direction(0.1, 0.05, 8000.0, seed)
        return [way.carry(100, at) for at in (0.0, 0.5, 0.6, 3.0)]

    assert arrivals("a") == arrivals("a") != arrivals("b")
    for at, arrival in zip((0.0, 0.5, 0.6, 3.0), arrivals("a"), strict=True):
        assert arrival >= at + 0.1 + 0.1  # delay, and 100 bytes at 1 kB/s
    assert arrivals("a") == sorted(arrivals("a"))


def test_a_final_outcome_passes_early_ones_that_wait_for_a_slow_link():
    pipe = Pipe()
    with EmulatedChannel(pipe, LinkProfile(rate_down_bps=4000)) as channel:
        pipe.inbox.put(outcome(1, 0.5, next_token=1))  # finds the link free and occupies it
        until(lambda: channel._under_way_down)
        pipe.inbox.put(outcome(2, 0.2, next_token=2))
        pipe.inbox.put(outcome(3, 0.9, next_token=3))
        pipe.inbox.put(outcome(8, 1.0, final=True, next_token=4))
        assert channel.receive(10).layer == 1
        final = channel.receive(10)
        assert final.is_final
        with pytest.raises(LinkTimeout):
            channel.receive(0.15)
        assert channel.bytes_down == len(encode(outcome(1, 0.5))) + len(encode(final))


def test_bytes_are_those_of_the_encoded_messages():
    class Echo:
        def submit(self, message, reply, peer) -> bool:
            reply(Refusal(0, 1, 2, "code", "sentence"))
            return True

        def disconnect(self, peer) -> None:
            pass

    inner = LocalChannel(Echo())
    with EmulatedChannel(inner, LinkProfile(delay_up_s=0.01)) as channel:
        channel.send(numbered(3))
        assert isinstance(channel.receive(10), Refusal)
        assert (channel.bytes_up, channel.bytes_down) == (inner.bytes_up, inner.bytes_down)
        assert channel.bytes_up > 0 and channel.bytes_down > 0


def test_reconnecting_drops_what_is_under_way():
    pipe = Pipe()
    with EmulatedChannel(pipe, LinkProfile(delay_up_s=30, delay_down_s=30)) as channel:
        channel.send(numbered(1))
        pipe.inbox.put(numbered(2))
        until(lambda: channel._under_way_down)
        channel.reconnect()
        assert pipe.reconnects == 1 and not pipe.sent
        with pytest.raises(LinkTimeout):
            channel.receive(0.01)
    assert not pipe.sent


def test_both_sides_see_a_broken_link_and_it_can_be_restored():
    pipe = Pipe()
    with EmulatedChannel(pipe, LinkProfile()) as channel:
        pipe.inbox.put(numbered(5))
        until(lambda: channel._under_way_down)
        pipe.breaks = LinkRefused("no verifier")
        assert channel.receive(10) == numbered(5)  # what had arrived before
        with pytest.raises(LinkRefused):
            channel.receive(10)
        with pytest.raises(LinkClosed, match="no verifier"):
            channel.send(numbered(1))
        channel.reconnect()
        channel.send(numbered(1))
        until(lambda: pipe.sent == [numbered(1)])


def test_closing_gives_back_threads_hands_on_what_was_sent_and_wakes_a_receiver():
    before = set(threading.enumerate())
    pipe, told = Pipe(), []
    channel = EmulatedChannel(pipe, LinkProfile(delay_up_s=30))

    def receive() -> None:
        try:
            channel.receive(60)
        except LinkClosed as error:
            told.append(error)

    receiver = threading.Thread(target=receive)
    receiver.start()
    channel.send(numbered(9))
    channel.close()
    channel.close()
    receiver.join(10)
    assert len(told) == 1 and pipe.sent == [numbered(9)] and pipe.closes == 1
    assert set(threading.enumerate()) <= before
    for action in (
        lambda: channel.send(numbered(1)), lambda: channel.receive(0), channel.reconnect
    ):  # fmt: skip
        with pytest.raises(LinkClosed):
            action()


def test_a_link_that_cannot_be_is_refused():
    for values, named in [
        ({"delay_up_s": -1}, "delay_up_s"),
        ({"delay_down_s": float("nan")}, "delay_down_s"),
        ({"jitter_s": 61}, "jitter_s"),
        ({"rate_up_bps": 10}, "rate_up_bps"),
        ({"rate_down_bps": float("inf")}, "rate_down_bps"),
    ]:
        with pytest.raises(ValueError, match=named):
            LinkProfile(**values)
