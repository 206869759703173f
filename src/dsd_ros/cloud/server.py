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
import ssl
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.connections import Door, DoorLimits, Listener, RobotConnection, library_log
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.metrics_server import CLOSE_TIMEOUT_S, MetricsServer, ServerError, ServerThread, respond
from dsd_ros.cloud.sessions import Answer
from dsd_ros.cloud.settings import RECEIVING_BYTES_OF_A_MB, VerifierSettings, is_loopback
from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.limits import largest_vocabulary
from dsd_ros.paths import user_path
from dsd_ros.wire.channel import read_token, shows_token
from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import (
    FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    Message,
    QuestionReply,
    Refusal,
    RefusalCode,
    SessionReply,
)
from dsd_ros.wire.outbox import UNSENT_BYTES, Outbox
from dsd_ros.wire.turns import RobotLink

_log = logging.getLogger(__name__)

# A robot reads what it asked for. One that leaves this much unread is gone or hostile.
MAX_UNSENT_FRAMES = 4096
MAX_MALFORMED_FRAMES = 8
OPEN_TIMEOUT_S = 10.0
CERTIFICATE_POLL_S = 5.0

_BUSY_LINK_POLL_S = 0.002
_UNSENT_OPTION = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)


class Served(Protocol):
    """What answers messages: a ``VerifierEngine``, alone or with a service for questions."""

    @property
    def model(self) -> Any: ...
    @property
    def metrics(self) -> Metrics: ...
    def submit(self, message: Message, reply: Answer, peer: Hashable) -> bool: ...
    def disconnect(self, peer: Hashable) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


class _Certificate:
    """A TLS certificate and its key, which are read again when their files change."""

    def __init__(self, certificate: str, key: str) -> None:
        """ServerError when they cannot be used."""
        self._files = user_path(certificate), user_path(key)
        self._read = self._state()
        self._watcher: asyncio.Task[None] | None = None
        try:
            self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ssl.SSLError) as error:
            raise ServerError(f"certificate {certificate} with key {key} cannot be used: {error}") from error

    def watch(self) -> None:
        """Look at the files every few seconds. In the event loop."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    def reload(self) -> None:
        """Use what the files hold now for new connections. What cannot be used is logged, and the last one stays."""
        state = self._state()
        if state == self._read:
            return
        self._read = state
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # only a whole pair may replace the one in use
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            _log.warning(
                "the changed certificate %s with key %s cannot be used, and the one before stays in use: %s",
                *self._files, error,
            )  # fmt: skip
        else:
            _log.info("the certificate %s has changed and is in use for new connections", self._files[0])

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files, self._password)
        return context

    def _password(self) -> str:
        """Refuse an encrypted key, also when it is loaded again: a service has no terminal to ask on."""
        raise ssl.SSLError(
            f"the key {self._files[-1]} is encrypted; decrypt it with 'openssl pkey' into a file that only the "
            "verifier's user can read"
        )

    def _state(self) -> list[tuple[int, int, int]]:
        """What changes when a file is replaced or written; nothing of a file that is not there."""
        found = []
        for file in self._files:
            with contextlib.suppress(OSError):
                status = Path(file).stat()
                found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        return found

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CERTIFICATE_POLL_S)
            self.reload()


class VerifierServer(ServerThread):
    """Serves an engine to robots. The engine stays the caller's.

    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        print(server.url)
    """

    connection_type = RobotConnection

    def __init__(self, engine: Served, settings: VerifierSettings) -> None:
        """ServerError or ValueError when token, certificate or key cannot be used."""
        super().__init__(settings.host, settings.port)
        self._engine = engine
        self._settings = settings
        self._token = read_token(settings.token_file) if settings.token_file else None
        self._submit = engine.submit
        if self._token is not None:
            self._submit = Authenticator(engine, self._token, settings.max_sessions).submit
        self._certificate = _Certificate(settings.certificate, settings.key) if settings.certificate else None
        limits = DoorLimits(
            2 * settings.max_sessions,
            settings.connections_per_address,
            settings.messages_per_second,
            settings.memory_mb * RECEIVING_BYTES_OF_A_MB,
        )
        self.door = Door(limits, lambda reason: engine.metrics.refused_connections[reason].inc())

    def start(self) -> str:
        url = super().start()
        if self._token is None and not is_loopback(self.host):
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
            self._certificate.watch()
        return await serve(
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

    def url_of(self, address: str) -> str:
        return f"{'wss' if self._certificate is not None else 'ws'}://{address}"

    def reload_certificate(self) -> None:
        """Read certificate and key again if their files have changed; open connections stay. From any thread."""
        if self._certificate is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                self._loop.call_soon_threadsafe(self._certificate.reload)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """None for a robot that may connect; a response for others, and for plain HTTP requests."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            return respond(connection, request, self._engine.metrics.registry)
        if self._token is not None and not shows_token(_single(request.headers.get_all("Authorization")), self._token):
            self._engine.metrics.refused_connections["token"].inc()
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing bearer token\n")
        if path == "/metrics":
            return respond(connection, request, self._engine.metrics.registry)
        refusal = self.door.refusal(connection.address)  # type: ignore[attr-defined]
        if refusal:
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{refusal}\n")
        return None

    async def _handle(self, connection: RobotConnection) -> None:
        """One robot: frames to the engine, the engine's messages back."""
        settings = self._settings
        peer = RobotLink(connection.address, settings.sessions_per_connection, settings.sessions_per_address)
        with self.door.admitted(connection.address):
            await self._serve_robot(connection, peer)

    async def _serve_robot(self, connection: RobotConnection, peer: RobotLink) -> None:
        self._engine.metrics.connected(1)
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def in_loop(action: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                loop.call_soon_threadsafe(action)

        outbox = Outbox(limit=MAX_UNSENT_FRAMES, on_ready=lambda: in_loop(ready.set))

        def answer(message: Message) -> None:
            if isinstance(message, (SessionReply, QuestionReply)) and not message.error:
                in_loop(lambda: connection.allow_frames_of(self._most_bytes))
            if not outbox.put(message):
                in_loop(connection.transport.abort)

        sender = asyncio.create_task(self._send(connection, outbox, ready))
        try:
            await self._receive(connection, peer, outbox, answer)
        except ConnectionClosed:
            pass
        finally:
            self._engine.metrics.connected(-1)
            self._engine.disconnect(peer)
            outbox.close()
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    async def _receive(self, connection: RobotConnection, peer: RobotLink, outbox: Outbox, answer: Answer) -> None:
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
            outbox.adopt_policy(message)
            if not self._submit(message, answer, peer):
                await connection.close(1001, "the verifier is shutting down")
                return

    @property
    def _most_bytes(self) -> int:
        """Of a robot's message: what a full draft or a picture takes."""
        evidence = 4 * MAX_DRAFT_LENGTH * largest_vocabulary(self._engine.model.vocab_size)
        return min(MAX_FRAME_BYTES, max(evidence, self._settings.message_mb << 20) + 4096)

    async def _send(self, connection: ServerConnection, outbox: Outbox, ready: asyncio.Event) -> None:
        """The Sender of FSD's Algorithm 2: one message at a time, early outcomes only onto a free link.

        The kernel buffers what a slow link cannot carry. The link is free while it holds few bytes unsent.
        """
        link = connection.transport.get_extra_info("socket")
        if _UNSENT_OPTION is not None:
            with contextlib.suppress(OSError):  # a kernel without this option buffers more
                link.setsockopt(socket.IPPROTO_TCP, _UNSENT_OPTION, UNSENT_BYTES)
        free = select.poll()
        free.register(link.fileno(), select.POLLOUT)
        try:
            while True:
                ready.clear()
                message = outbox.get_nowait(early=bool(free.poll(0)))
                if message is not None:
                    frame = encode(message)
                    await connection.send(frame)
                    self._engine.metrics.sent(len(frame))
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), _BUSY_LINK_POLL_S if outbox else None)
        except ConnectionClosed:
            pass


def run_verifier(engine: Served, settings: VerifierSettings) -> None:
    """Print the address and serve until SIGINT or SIGTERM, then close the engine. For the main thread.

    SIGHUP has the certificate read again, if it has changed; a changed file is noticed without it within seconds.
    ServerError or ValueError when the settings cannot be served.
    """
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine)
        server = stack.enter_context(VerifierServer(engine, settings))
        metrics = MetricsServer(engine.metrics.registry, settings)
        if settings.metrics_port:
            stack.enter_context(metrics)
        before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: server.reload_certificate())
        try:
            print(f"verifier of {engine.model.name} listening on {server.url}", flush=True)
            if metrics.url:
                print(f"metrics at {metrics.url}", flush=True)
            stop.wait()
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
