# SPDX-License-Identifier: Apache-2.0
"""Connections that cannot hurt each other: who may connect, and what one may send while others wait.

All of it runs in the thread of the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
import time
from asyncio import BaseTransport
from collections import Counter
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import ServerConnection
from websockets.frames import Frame, Opcode

from dsd_ros.wire.authentication import name_of
from dsd_ros.wire.messages import (
    Draft,
    Message,
    Observation,
    Outcome,
    Question,
    QuestionEnd,
    SessionClose,
    VerifiedTokens,
)

if TYPE_CHECKING:
    from dsd_ros.cloud.credentials import TokenHolder

_log = logging.getLogger(__name__)

HANDSHAKES = 16  # connections of one address that are not admitted yet
_ACCEPTED_A_TURN = 64
_LOG_EVERY_S = 60.0
_RESERVE = 64  # descriptors kept for the rest of the process, or a quarter of few
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SLICE_BYTES = 1024  # read first; twice as many each time as long as they make few frames
_FRAMES_A_TURN = 64  # of one connection, before the others have their turn
_WINDOW_S = 0.1
_CONTROL_FRAMES, _CONTROL_FRAMES_A_SECOND = 64, 4.0
_SMALL_BYTES = 64 << 10  # what a connection may hold without being counted


@dataclass(frozen=True)
class DoorLimits:
    """What all connections, and those of one address, may take together."""

    connections: int
    connections_per_address: int  # or of one robot, where robots have names
    messages_per_second: float  # of one address
    receiving_bytes: int


def address_group(host: str) -> str:
    """The address that limits are counted for: of IPv6 the network of 64 bits, which one machine has to itself."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))
    return host


class OncePerMinute(logging.Filter):
    """Passes a line a minute for each message text, without a traceback, and says how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        now, text = time.monotonic(), str(record.msg)
        if now < self._next.get(text, 0.0):
            self._left_out[text] += 1
            return False
        self._next[text] = now + _LOG_EVERY_S
        reason = record.exc_info[1] if record.exc_info else None
        record.msg, record.args = record.getMessage() + (f": {reason!r}" if reason is not None else ""), None
        record.exc_info = record.exc_text = None
        if left_out := self._left_out.pop(text, 0):
            record.msg += f" ({left_out} more in the last minute)"
        return True


# What the websocket library and asyncio have to say about single connections.
library_log = logging.getLogger(f"{__name__}.library")
library_log.addFilter(OncePerMinute())


def report_failure(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An event loop's exception handler that cannot fill a disk."""
    library_log.error("%s", context["message"], exc_info=context.get("exception"))


class Door:
    """Counts connections by account, their messages and the bytes of frames that are still being received.

    A connection's account is its robot's name where it has one, since a balancer gives all robots one address.
    """

    def __init__(self, limits: DoorLimits, refused: Callable[..., object] = lambda *_: None) -> None:
        """``refused(reason, robot's name)`` is called for each connection that is refused or cut off."""
        self._limits, self._refused = limits, refused
        self._open: Counter[str] = Counter()  # by address, without those that robots with a name were admitted over
        self._admitted: Counter[str] = Counter()  # by account
        self._messages: dict[str, tuple[float, int]] = {}  # account -> begin of its window, messages in it
        self._named = 0  # connections that robots with a name were admitted over
        self._holding: dict[RobotConnection, int] = {}
        self._next_line: dict[str, float] = {}
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._files = soft - min(_RESERVE, soft // 4) if soft != resource.RLIM_INFINITY else 1 << 62
        self._spare: int | None = None

    def open(self) -> None:
        """Keep a descriptor in reserve, with which connections can be refused when there is no other."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Give it back."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def enters(self, connection: AcceptedSocket) -> bool:
        """Whether a connection that was just accepted may stay."""
        limits, address = self._limits, connection.address
        if connection.fileno() >= self._files:
            return self.refuse("files", "the process has few file descriptors left: raise its limit (ulimit -n)")
        if self._open.total() + self._named >= limits.connections + 4 * HANDSHAKES:
            return self.refuse("full", "all connections are taken: raise max_sessions")
        if self._open[address] >= limits.connections_per_address + HANDSHAKES:
            return self.refuse("address", f"{address} has too many: raise connections_per_address")
        self._open[address] += 1
        return True

    def left(self, address: str) -> None:
        """A connection that had entered is closed."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]
            self._messages.pop(address, None)

    def refusal(self, connection: RobotConnection) -> str:
        """Why a robot may not have a connection, in one sentence; empty: it may."""
        limits, robot = self._limits, connection.robot
        if self._admitted.total() >= limits.connections:
            self._refused("full")
            return (
                f"the verifier already has its {limits.connections} connections; try again later, or raise max_sessions"
            )
        held, most = self._admitted[connection.account], connection.limit or limits.connections_per_address
        if robot and held >= most:
            self._refused("robot", robot)
            return (
                f"the robot {robot} already has its {most} connections; close some, or raise its 'connections' in the "
                "verifier's tokens file"
            )
        if held >= most:
            self._refused("address")
            return (
                f"your address already has its {limits.connections_per_address} connections; close some, or raise the "
                "verifier's connections_per_address (behind a proxy all robots have one address)"
            )
        return ""

    @contextlib.contextmanager
    def admitted(self, connection: RobotConnection) -> Any:
        """Count a robot's connection while the block runs."""
        account, named = connection.account, bool(connection.robot)
        self._admitted[account] += 1
        self._open[connection.address] -= named
        self._named += named
        try:
            yield
        finally:
            self._open[connection.address] += named
            self._named -= named
            self._admitted[account] -= 1
            if not self._admitted[account]:
                del self._admitted[account]
                if named:
                    self._messages.pop(account, None)

    def pause(self, account: str) -> float:
        """Count a message of this account; how long to wait before reading its next one, s."""
        now = time.monotonic()
        began, count = self._messages.get(account, (now, 0))
        if now - began >= _WINDOW_S:
            began, count = now, 0
        self._messages[account] = began, count + 1
        return began + _WINDOW_S - now if count + 1 >= self._limits.messages_per_second * _WINDOW_S else 0.0

    def holds(self, connection: RobotConnection, size: int) -> None:
        """``size`` bytes of ``connection`` belong to unfinished frames; cuts off who holds most if all is too much."""
        if size <= _SMALL_BYTES:
            self._holding.pop(connection, None)
            return
        self._holding[connection] = size
        while self._holding and sum(self._holding.values()) > self._limits.receiving_bytes:
            largest = max(self._holding, key=self._holding.__getitem__)
            self.cut_off(largest, "memory", "unfinished frames take too much memory: raise memory_mb")
            del self._holding[largest]

    def cut_off(self, connection: RobotConnection, reason: str, sentence: str) -> None:
        """End a connection at once."""
        self.refuse(reason, sentence)
        connection.transport.abort()

    def refuse(self, reason: str, sentence: str) -> bool:
        """Count a refused connection, and log it once a minute; False."""
        self._refused(reason)
        now = time.monotonic()
        if now >= self._next_line.get(reason, 0.0):
            self._next_line[reason] = now + _LOG_EVERY_S
            _log.warning("connections are refused: %s", sentence)
        return False

    def refuse_without_files(self, listener: socket.socket) -> None:
        """Refuse the next waiting connection although no descriptor is free, by means of the one in reserve."""
        self.refuse("files", "the process has no file descriptor left: raise its limit (ulimit -n)")
        self.close()
        try:
            socket.socket.accept(listener)[0].close()
        except OSError:
            time.sleep(0.01)  # the whole machine has none: do not spin
        self.open()


class AcceptedSocket(socket.socket):
    """A connection that the door knows of until it is closed."""

    def enter(self, door: Door, address: str) -> bool:
        """Whether it may stay."""
        self.address = address
        self._door: Door | None = door if door.enters(self) else None
        return self._door is not None

    def close(self) -> None:
        door, self._door = self._door, None
        super().close()
        if door is not None:
            door.left(self.address)


class Listener(socket.socket):
    """A listening socket for asyncio whose ``accept`` closes at once what the door refuses."""

    door: Door

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(_ACCEPTED_A_TURN):
            try:
                plain, address = super().accept()
            except OSError as error:
                if error.errno not in _NO_FILES:
                    raise
                # asyncio would log a traceback for each, and try again without end.
                self.door.refuse_without_files(self)
                continue
            accepted = AcceptedSocket(self.family, self.type, self.proto, fileno=plain.detach())
            if accepted.enter(self.door, address_group(address[0])):
                return accepted, address
            accepted.close()
        raise BlockingIOError


def listeners(host: str, port: int, door: Door) -> list[Listener]:
    """Listening sockets for all addresses of ``host``; OSError when one cannot be had."""
    found: list[Listener] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            listener = Listener(family, kind, protocol)
            listener.door = door
            found.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.setblocking(False)
            listener.bind(address)
    except OSError:
        for listener in found:
            listener.close()
        raise
    return found


class RobotConnection(ServerConnection):
    """A websocket whose frames are read a few at a time, and are small until a session is open.

    It can be closed without harm ``between_replies``: its robot then dials again, and a balancer may choose another
    verifier.
    """

    door: Door
    address = ""
    holder: TokenHolder | None = None  # whose token it shows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread = bytearray()
        self._controls, self._began = 0, time.monotonic()
        self._replies: set[Hashable] = set()  # sessions and questions in the middle of a reply
        self._active = self._began  # when the last message came or went

    @property
    def robot(self) -> str:
        """The robot's name, where each has a token of its own."""
        return self.holder.name if self.holder is not None else ""

    @property
    def account(self) -> str:
        """What limits are counted for."""
        return self.robot or self.address

    @property
    def limit(self) -> int | None:
        """Connections that its robot may have; None: no limit of its own."""
        return self.holder.connections if self.holder is not None else None

    def carried(self, message: Message, ends: Container[int]) -> None:
        """Note a message that came or goes; ``ends``: the tokens that end a reply."""
        self._active = time.monotonic()
        match message:
            case Observation() | Draft() | Question():
                self._replies.add(name_of(message))
            case Outcome() if message.is_final and not message.distribution and message.next_token in ends:
                self._replies.discard(name_of(message))
            case VerifiedTokens() if not message.ended:  # of a reply that began over another link, too
                self._replies.add(name_of(message))
            case VerifiedTokens():
                self._replies.discard(name_of(message))
            case SessionClose() | QuestionEnd():
                self._replies.discard(name_of(message))

    def between_replies(self, quiet_s: float) -> bool:
        """Whether every robot of this connection is between two replies, as far as messages tell.

        A reply that the robot cuts off at its length looks like one that goes on, until ``quiet_s`` without a message:
        a robot that waits for an answer sends again before that.
        """
        return not self._replies or time.monotonic() - self._active > quiet_s

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.address = address_group((transport.get_extra_info("peername") or ("",))[0])

    def allow_frames_of(self, size: int) -> None:
        """A session is open: take messages of ``size`` bytes."""
        self.protocol.max_message_size = size

    def data_received(self, data: bytes) -> None:
        if self._unread or len(data) > _SLICE_BYTES:
            self._unread += data
            self.read_on()
        else:
            super().data_received(data)
            self.door.holds(self, len(self.protocol.reader.buffer))

    def read_on(self) -> None:
        """Read what has arrived, until as many frames wait as one turn may have."""
        size = _SLICE_BYTES
        while self._unread and not self.recv_messages.paused and not self.transport.is_closing():
            data = bytes(self._unread[:size])
            del self._unread[:size]
            super().data_received(data)
            size *= 2
        self.door.holds(self, len(self._unread) + len(self.protocol.reader.buffer))

    def process_event(self, event: Any) -> None:
        if isinstance(event, Frame) and event.opcode in (Opcode.PING, Opcode.PONG):
            self._controls += 1
            if self._controls > _CONTROL_FRAMES + _CONTROL_FRAMES_A_SECOND * (time.monotonic() - self._began):
                if not self.transport.is_closing():
                    self.door.cut_off(self, "flood", f"{self.account} sends too many pings")
                return
        super().process_event(event)

    def pause(self, count: int) -> float | None:
        """Seconds to sleep before message number ``count`` is handled, so that others have their turn; None: not."""
        if self._unread:
            self.read_on()
        wait = self.door.pause(self.account)
        return wait if wait or count % _FRAMES_A_TURN == 0 else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        self.door.holds(self, 0)
        super().connection_lost(exc)
