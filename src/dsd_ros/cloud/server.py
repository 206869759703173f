# SPDX-License-Identifier: Apache-2.0
"""The engine behind a websocket: TLS, a bearer token, and a bound on sessions and connections for each token.

Floods from strangers are the business of the proxy in front (docs/operations.md).

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
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CollectorRegistry
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from dsd_ros.addresses import is_loopback
from dsd_ros.cloud.connections import RobotConnection
from dsd_ros.cloud.credentials import Certificate, Tokens
from dsd_ros.cloud.metrics import REFUSED_CONNECTIONS, Metrics
from dsd_ros.cloud.metrics_server import MetricsServer, ServerError, listen_error
from dsd_ros.cloud.rounds import Answer
from dsd_ros.cloud.sessions import full
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.logs import LogLimit
from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import MAX_FRAME_BYTES, Message, Observation, Refusal, RefusalCode, SessionReply
from dsd_ros.wire.outbox import UNSENT_BYTES, UNSENT_OPTION, Outbox
from dsd_ros.wire.turns import RobotLink

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
# What strangers send instead of an upgrade request is no news, and the library has a traceback for each.
_library_log = logging.getLogger(f"{__name__}.library")
_library_log.setLevel(logging.CRITICAL)

# A robot reads what it asked for. One that leaves this much unread is gone or hostile.
MAX_UNSENT_FRAMES = 4096
MAX_MALFORMED_FRAMES = 8
OPEN_TIMEOUT_S = 10.0
ENGINE_POLL_S = 1.0
CLOSE_TIMEOUT_S = 0.4
QUIET_S = 5.0  # without a message, a robot is between two replies; one that waits sends again sooner
_LOG_S = 1.0  # between two lines about connections refused for one reason: strangers write a log full
_LOOK_S = 0.2  # how often a draining verifier looks for connections between two replies
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
    def has_room(self) -> bool: ...
    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool: ...
    def disconnect(self, peer: Hashable) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


class VerifierServer:
    """Serves an engine to robots, on a thread and an event loop of its own. The engine stays the caller's.

    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        print(server.url)
    """

    def __init__(self, engine: Served, settings: VerifierSettings) -> None:
        """ServerError or ValueError when tokens, certificate or key cannot be used."""
        self._engine = engine
        self._settings = settings
        self._tokens = Tokens.of(settings.token_file, settings.tokens_file)
        self._certificate = Certificate(settings.certificate, settings.key) if settings.certificate else None
        self._ends = engine.model.eos_token_ids
        self._full = full(settings)
        self.url = ""
        self._server: Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop = asyncio.Event()
        self._failure: Exception | None = None
        self._links: weakref.WeakSet[RobotConnection] = weakref.WeakSet()  # connections, those in their opening too
        self._served: set[RobotConnection] = set()  # connections of robots
        self._draining = False
        self._refusal_lines = {reason: LogLimit(_LOG_S) for reason in REFUSED_CONNECTIONS}
        self._closing: set[asyncio.Task[None]] = set()
        self._name_robots()

    def start(self) -> str:
        """Listen, and return the URL; ServerError when that is not possible."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="verifier", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        if self._tokens is None and not is_loopback(self._settings.host):
            _log.warning("no token file is set: whoever reaches %s can use this verifier", self.url)
        return self.url

    def close(self) -> None:
        """Close every connection and give back thread and sockets, within a second; any number of times."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._in_loop(self._stop.set)
            thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_loop(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the event loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                self._loop.call_soon_threadsafe(action)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        settings, tls = self._settings, self._certificate is not None
        options: dict[str, Any] = {"ssl": self._certificate.context} if self._certificate is not None else {}
        if tls:
            options["ssl_handshake_timeout"] = OPEN_TIMEOUT_S
        try:
            self._server = await serve(
                self._handle,  # type: ignore[arg-type]  # ``_connect`` makes its connections
                settings.host,
                settings.port,
                process_request=self._admit,
                create_connection=self._connect,  # type: ignore[arg-type]  # a factory is as good
                logger=_library_log,
                compression=None,
                max_size=MAX_FRAME_BYTES,
                max_queue=4,
                write_limit=1,  # at 0, asyncio's TLS pauses each write until something comes in
                open_timeout=OPEN_TIMEOUT_S,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=10,
                ping_timeout=20,
                server_header=None,
                **options,
            )
            host, port = next(iter(self._server.sockets)).getsockname()[:2]
            self.url = f"{'wss' if tls else 'ws'}://{f'[{host}]' if ':' in host else host}:{port}"
        except OSError as error:
            self._failure = listen_error(f"port {settings.port} on {settings.host}", "any free one", error)
            return
        finally:
            ready.set()
        await self._stop.wait()
        self._server.close()
        # A peer that does not answer the closing handshake is not waited for.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), 2 * CLOSE_TIMEOUT_S)
        for link in self._links:
            transport = getattr(link, "transport", None)  # None: it never got past the TLS handshake
            if transport is not None:
                transport.abort()

    def _connect(self, *args: Any, **kwargs: Any) -> RobotConnection:
        link = RobotConnection(*args, **kwargs)
        self._links.add(link)
        return link

    def reload(self) -> None:
        """Read certificate and tokens again. From any thread.

        Open connections stay, but those whose token is no longer taken.
        """
        self._in_loop(self._reload)

    def _reload(self) -> None:
        if self._certificate is not None:
            self._certificate.reload()
        if self._tokens is None or not self._tokens.reload():
            return
        self._name_robots()
        for connection in list(self._served):
            if connection.holder is not None and connection.holder not in self._tokens:
                self._end(connection, CloseCode.POLICY_VIOLATION, "its token is no longer taken")

    def _name_robots(self) -> None:
        """Have the metrics count every robot that has a token by now."""
        if self._tokens is not None:
            self._engine.metrics.name_robots(self._tokens.names)

    def drain(self, seconds: float, stop: threading.Event | None = None) -> None:
        """Take no more robots, send each elsewhere after its reply, and return when none is left.

        At the latest after ``seconds``, or when ``stop`` is set. Robots in the middle of a reply go on at another
        verifier. From another thread than the server's.
        """
        server = self._server
        if server is None or seconds <= 0:
            return
        self._draining = True
        self._in_loop(server.server.close)  # accepts no more; open connections stay
        until, stop = time.monotonic() + seconds, stop or threading.Event()
        while self._served and time.monotonic() < until and not stop.wait(_LOOK_S):
            self._in_loop(self._move_idle)

    def _move_idle(self) -> None:
        for connection in list(self._served):
            if connection.between_replies(QUIET_S):
                self._move(connection)

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
        """None for a robot that may connect; a response for others, before they can send a frame."""
        assert isinstance(connection, RobotConnection)
        path = request.path.partition("?")[0]
        if path in ("/healthz", "/readyz"):
            sentence = self.unready() if path == "/readyz" else ""
            status = http.HTTPStatus.SERVICE_UNAVAILABLE if sentence else http.HTTPStatus.OK
            return connection.respond(status, f"{sentence or 'ok'}\n")
        if self._tokens is not None:
            connection.holder = self._tokens.shown_by(_single(request.headers.get_all("Authorization")))
            if connection.holder is None:
                return self._refuse(connection, "token", "wrong or missing bearer token")
        # As many again as sessions: of those that a robot has left, and has not closed.
        robot, most = connection.robot, 2 * self._most_sessions(connection)
        if self._draining:
            return self._refuse(connection, "draining", _SHUTTING_DOWN)
        if len(self._served) >= 2 * self._settings.max_sessions:
            return self._refuse(connection, "full", self._full)
        if robot and sum(other.robot == robot for other in self._served) >= most:
            sentence = (
                f"the robot {robot} already has its {most} connections, two a session; close some, or raise its "
                "'sessions' in the verifier's tokens file"
            )
            return self._refuse(connection, "full", sentence, robot)
        return None

    def _refuse(self, connection: RobotConnection, reason: str, sentence: str, robot: str = "") -> Response:
        """Count and log a refusal for ``reason``; ``robot``: at its own limit."""
        self._engine.metrics.refused(reason, robot)
        limit = self._refusal_lines[reason]
        if limit.due():
            text = f"{sentence}; {limit.left_out} more since the last line" if limit.left_out else sentence
            _log.info("a connection from %s is refused: %s", connection.origin, text, extra=connection.fields)
        denied = reason == "token"
        status = http.HTTPStatus.UNAUTHORIZED if denied else http.HTTPStatus.SERVICE_UNAVAILABLE
        return connection.respond(status, f"{sentence}\n")

    def _most_sessions(self, connection: RobotConnection) -> int:
        """Sessions that a robot may hold. Where robots have no names, all of them share one token."""
        holder, settings = connection.holder, self._settings
        if holder is None or not holder.name:
            return settings.max_sessions
        return holder.sessions or settings.sessions_per_robot

    def unready(self) -> str:
        """Why this verifier takes no new robot now, in one sentence; empty: it does."""
        if self._draining:
            return _SHUTTING_DOWN
        return "" if self._engine.has_room() else self._full

    async def _handle(self, connection: RobotConnection) -> None:
        """One robot: frames to the engine, the engine's messages back."""
        peer = RobotLink(connection.robot, self._most_sessions(connection))
        self._served.add(connection)
        _log.info("connected from %s", connection.origin, extra=connection.fields)
        try:
            await self._serve_robot(connection, peer)
        except Exception:
            _log.exception("a robot's connection failed")
        finally:
            self._served.discard(connection)

    async def _serve_robot(self, connection: RobotConnection, peer: RobotLink) -> None:
        self._engine.metrics.connected(1)
        ready, in_loop = asyncio.Event(), self._in_loop
        outbox = Outbox(limit=MAX_UNSENT_FRAMES, on_ready=lambda: in_loop(ready.set))

        def answer(message: Message) -> None:
            if isinstance(message, SessionReply) and message.error == self._full:
                # Another verifier may have room.
                in_loop(lambda: self._end(connection, CloseCode.TRY_AGAIN_LATER, self._full))
            elif not outbox.put(message):
                in_loop(connection.transport.abort)

        sender = asyncio.create_task(self._send(connection, outbox, ready))
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
        metrics, malformed = self._engine.metrics, 0
        async for frame in connection:
            await asyncio.sleep(0)  # one that sends without pause leaves others their turns
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
            if self._draining and isinstance(message, Observation) and connection.between_replies(QUIET_S):
                self._move(connection)
                return
            connection.carried(message, self._ends)
            if not self._engine.submit(message, answer, peer):
                await connection.close(CloseCode.GOING_AWAY, _SHUTTING_DOWN)
                return

    async def _send(self, connection: RobotConnection, outbox: Outbox, ready: asyncio.Event) -> None:
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
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(ready.wait(), _BUSY_LINK_POLL_S if outbox else None)
        except ConnectionClosed:
            pass


def run_verifier(engine: contextlib.AbstractContextManager[Served], settings: VerifierSettings) -> None:
    """Print the address and serve until SIGINT or SIGTERM, then close the engine. For the main thread.

    ``engine``: itself, or what loads it; meanwhile ``/readyz`` at the metrics' port says "loading".
    SIGTERM drains the server first, as ``drain_s`` says; another signal ends that. SIGHUP has certificate and tokens
    read again. ServerError or ValueError when the settings cannot be served; ServerError when the engine fails for
    good, so that whoever started the process starts it again.
    """
    asked, at_once = threading.Event(), threading.Event()

    def end(number: int, _: object) -> None:
        if asked.is_set() or number == signal.SIGINT:
            at_once.set()
        asked.set()

    with contextlib.ExitStack() as stack:
        metrics = MetricsServer(CollectorRegistry(), settings, lambda: "loading")
        if settings.metrics_port:
            stack.enter_context(metrics)
        served = stack.enter_context(engine)
        server = stack.enter_context(VerifierServer(served, settings))
        metrics.serve(served.metrics.registry, server.unready)
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: server.reload())
        try:
            print(f"verifier of {served.model.name} listening on {server.url}", flush=True)
            if metrics.url:
                print(f"metrics at {metrics.url}", flush=True)
            while not asked.wait(ENGINE_POLL_S):
                if not served.alive:
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
