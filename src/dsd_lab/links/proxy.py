# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that is a bad link on demand: slow, narrow, lossy, cut, silent, or injecting nonsense.

TCP hides loss, so a lost segment shows as the wait for its retransmission, which delays everything after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from websockets.frames import Frame, Opcode

from dsd_lab.links.emulation import LinkProfile

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")
Address = tuple[str, int]

SEGMENT_BYTES = 1448  # of TCP over Ethernet
MIN_RETRANSMISSION_S = 0.2  # Linux' least retransmission time-out
_FAST_RETRANSMIT = 3  # so many segments after a lost one trigger its retransmission within a round trip
_UNDER_WAY_BYTES = 1 << 20  # what a direction holds before it lets the sender wait
_CALL_LIMIT_S = 10.0
_RST = struct.pack("ii", 1, 0)  # linger for no time: a close becomes a reset


class Way(enum.Enum):
    """A direction: from the end that dialled to the end that listens, or back."""

    UP = "up"
    DOWN = "down"


class State(enum.Enum):
    """UP carries, CUT resets every connection, SILENT carries nothing: data waits, as in a sender that retransmits."""

    UP = "up"
    CUT = "cut"
    SILENT = "silent"


@dataclass(frozen=True)
class Conditions:
    """How the link is now. ``loss``: share of segments lost, 0 to 0.5; ValueError otherwise."""

    profile: LinkProfile = LinkProfile()
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.loss <= 0.5:  # false for a NaN too
            raise ValueError(f"loss is {self.loss}; use a share of 0 to 0.5")


class LinkProxy:
    """Relays every connection to ``target`` under conditions that can be changed at any time, from any thread."""

    def __init__(self, target: Address, listen: Address = ("127.0.0.1", 0), seed: int = 0) -> None:
        """OSError when ``listen`` cannot be listened on; port 0 takes a free one."""
        self.target = target  # may be changed; holds for connections made from then on
        self.conditions = Conditions()
        self.state = State.UP
        self.accepted = self.lost_segments = self.injected = 0
        self.carried = dict.fromkeys(Way, 0)  # bytes
        self._seed = seed
        self._relays: set[_Relay] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._ended = asyncio.Event()
        self._socket = socket.create_server(listen, backlog=64)
        self.host, self.port = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="link proxy", daemon=True)
        self._thread.start()
        self._ready.wait(_CALL_LIMIT_S)

    @property
    def url(self) -> str:
        return f"ws://{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Connections that are being relayed now."""
        return len(self._relays)

    def set(self, conditions: Conditions) -> None:
        """Change what the link does to data sent from now on."""
        self.conditions = conditions

    def cut(self) -> None:
        """Reset every connection, and every further one, until ``restore``."""
        self.state = State.CUT
        self._do(self._reset_all)

    def silence(self) -> None:
        """Carry nothing, either way, until ``restore``; connections stay, and seem healthy."""
        self.state = State.SILENT

    def restore(self) -> None:
        """Carry again, under the conditions set; data that waited goes out now."""
        self.state = State.UP
        self._do(self._wake_all)

    def inject(self, way: Way, data: bytes, as_frame: bool = True) -> int:
        """Put bytes that neither end sent onto every connection, as a binary frame or raw; how many took them."""

        def put() -> int:
            pipes = [relay.pipes[way] for relay in self._relays if way in relay.pipes]
            return sum(pipe.inject(data, as_frame) for pipe in pipes)

        return self._do(put)

    def close(self) -> None:
        """Reset all connections and free thread and sockets; may be called again."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
                self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(_CALL_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._on_connection, sock=self._socket)
        self._ready.set()
        await self._ended.wait()
        server.close()
        self._reset_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        relay = _Relay(self, random.Random(f"{self._seed}/{self.accepted}"))
        relay.writers.append(writer)
        self._relays.add(relay)
        try:
            if self.state is State.CUT:
                return
            host, port = self.target
            other_reader, other_writer = await asyncio.open_connection(host, port)
            relay.writers.append(other_writer)
            if self.state is not State.CUT:  # it may have come meanwhile
                await relay.run(reader, other_writer, other_reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # nothing listens at the target, an end broke off, or the proxy is closed: the reset says so
        finally:
            self._relays.discard(relay)
            relay.reset()

    def _reset_all(self) -> None:
        for relay in list(self._relays):
            relay.reset()

    def _wake_all(self) -> None:
        for relay in self._relays:
            for pipe in relay.pipes.values():
                pipe.wake.set()

    def _do(self, work: Callable[[], Result]) -> Result:
        """Do something in the loop's thread, and wait for it."""

        async def done() -> Result:
            return work()

        call: Coroutine[Any, Any, Result] = done()
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_LIMIT_S)
        except RuntimeError:
            call.close()
            raise OSError("the link proxy was closed") from None


class _Relay:
    """One connection: two pipes."""

    def __init__(self, proxy: LinkProxy, source: random.Random) -> None:
        self.pipes: dict[Way, _Pipe] = {}
        self.writers: list[asyncio.StreamWriter] = []
        self._proxy, self._random = proxy, source

    async def run(
        self,
        up: asyncio.StreamReader,
        up_to: asyncio.StreamWriter,
        down: asyncio.StreamReader,
        down_to: asyncio.StreamWriter,
    ) -> None:
        for writer in (up_to, down_to):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pipes = {
            Way.UP: _Pipe(self._proxy, Way.UP, up, up_to, self._random),
            Way.DOWN: _Pipe(self._proxy, Way.DOWN, down, down_to, self._random),
        }
        await asyncio.gather(*(pipe.run() for pipe in self.pipes.values()))
        for writer in self.writers:  # both ways have ended in order
            writer.close()

    def reset(self) -> None:
        """Break both ends off as a broken link does, unless they are closed."""
        for writer in self.writers:
            if writer.is_closing():
                continue
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
            writer.transport.abort()


class _Pipe:
    """One way of one connection."""

    def __init__(
        self,
        proxy: LinkProxy,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: random.Random,
    ) -> None:
        self.wake = asyncio.Event()
        self._proxy, self._way, self._random = proxy, way, source
        self._reader, self._writer = reader, writer
        self._waiting: deque[tuple[float, bytes]] = deque()  # when it has arrived; b"": the end
        self._held = 0
        self._room = asyncio.Event()
        self._free_at = self._last_arrival = 0.0
        self._frames = _FrameBoundaries()
        self._injections: deque[bytes] = deque()

    async def run(self) -> None:
        """Carry until the sender ends the stream; OSError when an end breaks off."""
        read = asyncio.ensure_future(self._read())
        try:
            await self._write()
        finally:
            read.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await read

    def inject(self, data: bytes, as_frame: bool) -> int:
        if self._writer.is_closing():
            return 0
        self._proxy.injected += 1
        if as_frame:
            self._injections.append(Frame(Opcode.BINARY, data).serialize(mask=self._way is Way.UP))
            self.wake.set()
        else:
            self._writer.write(data)
        return 1

    async def _read(self) -> None:
        while True:
            try:
                data = await self._reader.read(65536)
            except OSError:
                self._writer.transport.abort()
                data = b""
            self._waiting.append((self._arrival(len(data)), data))
            self._held += len(data)
            self.wake.set()
            if not data:
                return
            while self._held > _UNDER_WAY_BYTES:
                self._room.clear()
                await self._room.wait()

    async def _write(self) -> None:
        while True:
            self.wake.clear()
            carrying = self._proxy.state is State.UP
            if carrying and self._injections and self._frames.between:
                self._writer.write(self._injections.popleft())
                continue
            now = time.monotonic()
            due = self._waiting[0][0] if self._waiting and carrying else math.inf
            if due > now:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), None if due == math.inf else due - now)
                continue
            _, data = self._waiting.popleft()
            self._held -= len(data)
            self._room.set()
            if not data:
                with contextlib.suppress(OSError):
                    self._writer.write_eof()
                return
            self._proxy.carried[self._way] += len(data)
            self._frames.pass_on(data)
            self._writer.write(data)
            await self._writer.drain()

    def _arrival(self, size: int) -> float:
        """When ``size`` bytes sent now have arrived, in order and retransmissions included."""
        conditions = self._proxy.conditions
        profile = conditions.profile
        up = self._way is Way.UP
        delay = profile.delay_up_s if up else profile.delay_down_s
        rate = profile.rate_up_bps if up else profile.rate_down_bps
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + (8.0 * size / rate if rate else 0.0)
        arrival = self._free_at + delay + profile.jitter_s * self._random.random()
        if conditions.loss:
            arrival += self._retransmissions(size, conditions)
        self._last_arrival = max(arrival, self._last_arrival)
        return self._last_arrival

    def _retransmissions(self, size: int, conditions: Conditions) -> float:
        """Seconds that the worst of its segments' losses costs.

        RFC 5681: a lost segment is sent again after a round trip if enough others follow it, else after the time-out,
        which doubles each time (RFC 6298).
        """
        profile = conditions.profile
        trip = profile.delay_up_s + profile.delay_down_s + profile.jitter_s
        segments = max(1, math.ceil(size / SEGMENT_BYTES))
        worst = 0.0
        for index in range(segments):
            wait, timeout = 0.0, max(MIN_RETRANSMISSION_S, 2.0 * trip)
            first = segments - index > _FAST_RETRANSMIT
            while self._random.random() < conditions.loss:
                self._proxy.lost_segments += 1
                wait += trip if first else timeout
                timeout *= 1.0 if first else 2.0
                first = False
            worst = max(worst, wait)
        return worst


class _FrameBoundaries:
    """Follows a websocket's stream (RFC 6455), to know when it is between two frames."""

    def __init__(self) -> None:
        self._open = False  # the HTTP part is over
        self._head = b""  # the HTTP part, or a frame's header, as far as it has come
        self._left = 0  # of the payload

    @property
    def between(self) -> bool:
        return self._open and not self._head and not self._left

    def pass_on(self, data: bytes) -> None:
        if not self._open:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            data, self._head, self._open = self._head[end + 4 :], b"", True
        while data:
            if self._left:
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]
                continue
            self._head, data = self._head + data[:1], data[1:]
            self._left = _payload_of(self._head)
            if self._left >= 0:
                self._head = b""
            else:
                self._left = 0


def _payload_of(head: bytes) -> int:
    """Bytes of payload after a complete frame header; -1 while the header is incomplete."""
    if len(head) < 2:
        return -1
    length, mask = head[1] & 0x7F, 4 if head[1] & 0x80 else 0
    more = {126: 2, 127: 8}.get(length, 0)
    if len(head) < 2 + more + mask:
        return -1
    return int.from_bytes(head[2 : 2 + more], "big") if more else length
