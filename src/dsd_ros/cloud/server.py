# SPDX-License-Identifier: Apache-2.0
"""The engine behind a websocket: TLS, a bearer token, and connections that cannot hurt each other.

The event loop only moves frames; models run on the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.connections import Door, DoorLimits, Listener, RobotConnection, library_log
from dsd_ros.cloud.credentials import Certificate, Tokens
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.metrics_server import CLOSE_TIMEOUT_S, MetricsServer, ServerError, ServerThread, respond
from dsd_ros.cloud.sessions import Answer, full
from dsd_ros.cloud.settings import RECEIVING_BYTES_OF_A_MB, VerifierSettings, is_loopback
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.limits import largest_vocabulary
from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import (
    FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    Message,
    Observation,
    QuestionReply,
    Refusal,
    RefusalCode,
    SessionReply,
)
from dsd_ros.wire.outbox import UNSENT_BYTES, UNSENT_OPTION, Outbox
from dsd_ros.wire.turns import RobotLink

_log = logging.getLogger(__name__)

# A robot reads what it asked for. One that leaves this much unread is gone or hostile.
MAX_UNSENT_FRAMES = 4096
PAUSE_FRAMES = 64  # so many unread pause its replies
MAX_MALFORMED_FRAMES = 8
OPEN_TIMEOUT_S = 10.0
ENGINE_POLL_S = 1.0
RELOAD_POLL_S = 5.0  # how often changed files are noticed
QUIET_S = 5.0  # without a message, a robot is between two replies; one that waits sends again sooner
_LOOK_S = 0.2  # how often connections are looked at
_MOST_REASON = 120  # characters of a close frame's sentence
_SHUTTING_DOWN = "the verifier is shutting down"

_BUSY_LINK_POLL_S = 0.002


class Served(Protocol):
    """What answers messages: a ``VerifierEngine``, alone or with a service for questions."""

    @property
    def model(self) -> Any: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def alive(self) -> bool: ...
    def has_room(self, account: str) -> bool: ...
    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool: ...
    def disconnect(self, peer: Hashable) -> None: ...
    def resume(self, peer: Hashable) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


class VerifierServer(ServerThread):
    """Serves an engine to robots. The engine stays the caller's.

    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        print(server.url)
    """

    connection_type = RobotConnection

    def __init__(self, engine: Served, settings: VerifierSettings) -> None:
        """ServerError or ValueError when tokens, certificate or key cannot be used."""
        super().__init__(settings.host, settings.port)
        self._engine = engine
        self._settings = settings
        self._tokens = Tokens.of(settings.token_file, settings.tokens_file)
        self._submit = engine.submit
        self._guard: Authenticator | None = None
        if self._tokens is not None:
            self._guard = Authenticator(engine, self._tokens, settings.max_sessions)
            self._submit = self._guard.submit
        self._certificate = Certificate(settings.certificate, settings.key) if settings.certificate else None
        self._served: set[RobotConnection] = set()  # connections of robots
        self._ends = engine.model.eos_token_ids
        self._full = full(settings)
        self._draining = False
        self._closing: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        limits = DoorLimits(
            2 * settings.max_sessions,
            settings.connections_per_address,
            settings.messages_per_second,
            settings.memory_mb * RECEIVING_BYTES_OF_A_MB,
        )
        self.door = Door(limits, engine.metrics.refused)

    def start(self) -> str:
        url = super().start()
        if self._tokens is None and not is_loopback(self.host):
            _log.warning("no token file is set: whoever reaches %s can use this verifier", url)
        return url

    def connect(self, *args: Any, **kwargs: Any) -> ServerConnection:
        connection = super().connect(*args, **kwargs)
        connection.door = self.door  # type: ignore[attr-defined]
        return connection

    async def listen(self, listener: Listener) -> Server:
        tls: dict[str, Any] = {}
        if self._certificate is not None:
            tls = {"ssl": self._certificate.context, "ssl_handshake_timeout": OPEN_TIMEOUT_S}
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())
        server: Server = await serve(
            self._handle,  # type: ignore[arg-type]  # ``connect`` makes its connections
            sock=listener,
            logger=library_log,
            **tls,
            process_request=self._admit,
            create_connection=self.connect,  # type: ignore[arg-type]  # a factory is as good
            compression=None,
            max_size=FIRST_FRAME_BYTES,
            max_queue=4,
            write_limit=0,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=10,
            ping_timeout=20,
            server_header=None,
        )
        return server

    def url_of(self, address: str) -> str:
        return f"{'wss' if self._certificate is not None else 'ws'}://{address}"

    def reload(self) -> None:
        """Read certificate and tokens again if their files have changed. From any thread.

        Open connections stay, but those whose token is no longer taken.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                self._loop.call_soon_threadsafe(self._reload)

    def drain(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Take no more robots, send each elsewhere after its reply, and return when none is left.

        At the latest after ``seconds``, or when ``stop`` is set. Robots in the middle of a reply go on at another
        verifier. From another thread than the server's.
        """
        loop = self._loop
        if loop is None or seconds <= 0:
            return
        self._draining = True
        loop.call_soon_threadsafe(self.stop_listening)
        until, stop = time.monotonic() + seconds, stop or threading.Event()
        while self._served and time.monotonic() < until and not stop.wait(_LOOK_S / 4):
            pass

    async def _keep(self) -> None:
        """Look after what changes by itself: files, and robots that a draining verifier sends elsewhere."""
        next_reload = time.monotonic() + RELOAD_POLL_S
        while True:
            await asyncio.sleep(_LOOK_S)
            if time.monotonic() >= next_reload:
                self._reload()
                next_reload = time.monotonic() + RELOAD_POLL_S
            for connection in list(self._served) if self._draining else ():
                if connection.between_replies(QUIET_S):
                    self._move(connection)

    def _reload(self) -> None:
        if self._certificate is not None:
            self._certificate.reload()
        if self._tokens is None or self._guard is None or not self._tokens.reload():
            return
        self._guard.name_robots()
        for connection in list(self._served):
            if connection.holder is not None and connection.holder not in self._tokens:
                self._end(connection, CloseCode.POLICY_VIOLATION, "its token is no longer taken")

    def _move(self, connection: RobotConnection) -> None:
        self._engine.metrics.moved()
        self._end(connection, CloseCode.SERVICE_RESTART, _SHUTTING_DOWN)

    def _end(self, connection: RobotConnection, code: int, reason: str) -> None:
        """Close a robot's connection, whose link is down from now on."""
        self._served.discard(connection)
        task = asyncio.create_task(connection.close(code, reason[:_MOST_REASON]))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """None for a robot that may connect; a response for others, and for plain HTTP requests."""
        assert isinstance(connection, RobotConnection)
        path, metrics = request.path.partition("?")[0], self._engine.metrics
        if path == "/healthz":
            return respond(connection, request, metrics.registry)
        if path == "/readyz":
            return respond(connection, request, metrics.registry, self.unready())
        if self._tokens is not None:
            connection.holder = self._tokens.shown_by(_single(request.headers.get_all("Authorization")))
            if connection.holder is None:
                metrics.refused("token")
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing bearer token\n")
        if path == "/metrics" and connection.robot:
            sentence = "no robot's token reads what others do; metrics are on the verifier's metrics port\n"
            return connection.respond(http.HTTPStatus.FORBIDDEN, sentence)
        if path == "/metrics":
            return respond(connection, request, metrics.registry)
        return self._refuse(connection)

    def unready(self) -> str:
        """Why this verifier takes no new robot now, in one sentence; empty: it does."""
        if self._draining:
            return _SHUTTING_DOWN
        return "" if self._engine.has_room("") else self._full

    def _refuse(self, connection: RobotConnection) -> Response | None:
        """The answer to a robot that may not connect; None: it may."""
        refusal = _SHUTTING_DOWN if self._draining else ""
        if refusal:
            self._engine.metrics.refused("draining", connection.robot)
        elif not self._engine.has_room(connection.account):
            refusal = self._full
            self._engine.metrics.refused("full", connection.robot)
        else:
            refusal = self.door.refusal(connection)
        if not refusal:
            return None
        return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{refusal}\n")

    async def _handle(self, connection: RobotConnection) -> None:
        """One robot: frames to the engine, the engine's messages back."""
        settings = self._settings
        holder = connection.holder
        sessions = holder.sessions if holder is not None and holder.sessions else settings.sessions_per_address
        peer = RobotLink(connection.address, settings.sessions_per_connection, sessions, connection.robot)
        with self.door.admitted(connection):
            self._served.add(connection)
            try:
                await self._serve_robot(connection, peer)
            finally:
                self._served.discard(connection)

    async def _serve_robot(self, connection: RobotConnection, peer: RobotLink) -> None:
        self._engine.metrics.connected(1)
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def in_loop(action: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                loop.call_soon_threadsafe(action)

        outbox = Outbox(limit=MAX_UNSENT_FRAMES, on_ready=lambda: in_loop(ready.set))
        paused = threading.Event()  # a reply pauses until the outbox is empty

        def answer(message: Message) -> bool:
            if isinstance(message, (SessionReply, QuestionReply)) and not message.error:
                in_loop(lambda: connection.allow_frames_of(self._most_bytes))
            if isinstance(message, SessionReply) and message.error == self._full:
                in_loop(
                    lambda: self._end(connection, CloseCode.TRY_AGAIN_LATER, message.error)
                )  # another verifier may have room
                return True
            if not outbox.put(message):
                in_loop(connection.transport.abort)
            if len(outbox) < PAUSE_FRAMES:
                return True
            paused.set()
            in_loop(ready.set)  # the outbox may be empty by now
            return False

        sender = asyncio.create_task(self._send(connection, peer, outbox, ready, paused))
        try:
            await self._receive(connection, peer, answer)
        except ConnectionClosed:
            pass
        finally:
            self._engine.metrics.connected(-1)
            self._engine.disconnect(peer)
            outbox.close()
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    async def _receive(self, connection: RobotConnection, peer: RobotLink, answer: Answer) -> None:
        """Hand the robot's frames to the engine, until it sends too much nonsense or the engine is closed."""
        metrics, malformed, count = self._engine.metrics, 0, 0
        async for frame in connection:
            count += 1
            if (wait := connection.pause(count)) is not None:
                await asyncio.sleep(wait)
            metrics.received(len(frame))
            try:
                message = decode(_binary(frame))
            except WireError as error:
                malformed += 1
                if malformed > MAX_MALFORMED_FRAMES:
                    await connection.close(1002, "too many malformed frames")
                    return
                refusal = Refusal(0, 0, 0, RefusalCode.MALFORMED, str(error)[:1024])
                metrics.sending(refusal)
                answer(refusal)
                continue
            begins = isinstance(message, Observation) and connection.between_replies(QUIET_S)
            if self._draining and begins:
                self._move(connection)
                return
            connection.carried(message, self._ends)
            if not self._submit(message, answer, peer):
                await connection.close(1001, _SHUTTING_DOWN)
                return

    @property
    def _most_bytes(self) -> int:
        """Of a robot's message: what a full draft or a picture takes."""
        evidence = 4 * MAX_DRAFT_LENGTH * largest_vocabulary(self._engine.model.vocab_size)
        return min(MAX_FRAME_BYTES, max(evidence, self._settings.message_mb << 20) + 4096)

    async def _send(
        self,
        connection: RobotConnection,
        peer: RobotLink,
        outbox: Outbox,
        ready: asyncio.Event,
        paused: threading.Event,
    ) -> None:
        """The Sender of FSD's Algorithm 2: one message at a time, early outcomes only onto a free link.

        The kernel buffers what a slow link cannot carry. The link is free while it holds few bytes unsent.
        """
        link = connection.transport.get_extra_info("socket")
        if UNSENT_OPTION is not None:
            with contextlib.suppress(OSError):  # a kernel without this option buffers more
                link.setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)
        free = select.poll()
        free.register(link.fileno(), select.POLLOUT)
        try:
            while True:
                ready.clear()
                message = outbox.get_nowait(early=bool(free.poll(0)))
                if message is not None:
                    frame = encode(message)
                    await connection.send(frame)
                    connection.carried(message, self._ends)
                    self._engine.metrics.sent(len(frame))
                    continue
                if paused.is_set() and not outbox:
                    paused.clear()
                    self._engine.resume(peer)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ready.wait(), _BUSY_LINK_POLL_S if outbox else None)
        except ConnectionClosed:
            pass


def run_verifier(engine: Served, settings: VerifierSettings) -> None:
    """Print the address and serve until SIGINT or SIGTERM, then close the engine. For the main thread.

    SIGTERM drains the server first, as ``drain_s`` says; another signal ends that. SIGHUP has certificate and tokens
    read again, if they have changed; a changed file is noticed without it within seconds. ServerError or ValueError
    when the settings cannot be served; ServerError when the engine fails for good, so that whoever started the process
    starts it again.
    """
    asked, at_once = threading.Event(), threading.Event()

    def end(number: int, _: object) -> None:
        if asked.is_set() or number == signal.SIGINT:
            at_once.set()
        asked.set()

    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        server = stack.enter_context(VerifierServer(engine, settings))
        metrics = MetricsServer(engine.metrics.registry, settings, server.unready)
        if settings.metrics_port:
            stack.enter_context(metrics)
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: server.reload())
        try:
            print(f"verifier of {engine.model.name} listening on {server.url}", flush=True)
            if metrics.url:
                print(f"metrics at {metrics.url}", flush=True)
            while not asked.wait(ENGINE_POLL_S):
                if not engine.alive:
                    raise ServerError("the verifier's engine has failed; start the verifier again, and see its log")
            server.drain(settings.drain_s, at_once)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _binary(frame: str | bytes) -> bytes:
    if isinstance(frame, str):
        raise WireError("a text frame is not a message of this protocol; send binary frames")
    return frame


def _single(values: Iterable[str]) -> str | None:
    found = list(values)
    return found[0] if len(found) == 1 else None
