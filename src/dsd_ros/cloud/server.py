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
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.metrics_server import CLOSE_TIMEOUT_S, MetricsServer, ServerError, ServerThread, respond
from dsd_ros.cloud.sessions import Answer
from dsd_ros.cloud.settings import VerifierSettings, is_loopback
from dsd_ros.wire.channel import read_token, shows_token
from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import MAX_FRAME_BYTES, Message, Refusal, RefusalCode
from dsd_ros.wire.outbox import Outbox

_log = logging.getLogger(__name__)

# A robot reads what it asked for. One that leaves this much unread is gone or hostile.
MAX_UNSENT_FRAMES = 4096
MAX_MALFORMED_FRAMES = 8

# The kernel buffers what a slow link cannot carry, and nothing overtakes what it holds. So early outcomes wait here
# while the kernel holds more than this unsent.
UNSENT_BYTES = 2048
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


class VerifierServer(ServerThread):
    """Serves an engine to robots. The engine stays the caller's.

    with VerifierEngine(model) as engine, VerifierServer(engine, settings) as server:
        print(server.url)
    """

    def __init__(self, engine: Served, settings: VerifierSettings) -> None:
        """ServerError or ValueError when token, certificate or key cannot be used."""
        super().__init__(settings.host, settings.port)
        self._engine = engine
        self._settings = settings
        self._token = read_token(settings.token_file) if settings.token_file else None
        self._submit = engine.submit
        if self._token is not None:
            self._submit = Authenticator(engine, self._token, settings.max_sessions).submit
        self._tls = _server_tls(settings) if settings.certificate else None
        self._connections = 0

    def start(self) -> str:
        url = super().start()
        if self._token is None and not is_loopback(self.host):
            _log.warning("no token file is set: whoever reaches %s can use this verifier", url)
        return url

    async def listen(self) -> Server:
        return await serve(
            self._handle,
            self.host,
            self.port,
            ssl=self._tls,
            process_request=self._admit,
            create_connection=self.connect,  # type: ignore[arg-type]  # a factory is as good
            compression=None,
            max_size=MAX_FRAME_BYTES,
            max_queue=4,
            write_limit=0,
            open_timeout=10,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=10,
            ping_timeout=20,
            server_header=None,
        )

    def url_of(self, address: str) -> str:
        return f"{'wss' if self._tls is not None else 'ws'}://{address}"

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
        if self._connections >= 2 * self._settings.max_sessions:
            self._engine.metrics.refused_connections["full"].inc()
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "the verifier has too many connections\n")
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        """One robot: frames to the engine, the engine's messages back."""
        self._connections += 1
        self._engine.metrics.connected(1)
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()

        def in_loop(action: Callable[[], object]) -> None:
            with contextlib.suppress(RuntimeError):  # the server has shut down
                loop.call_soon_threadsafe(action)

        outbox = Outbox(limit=MAX_UNSENT_FRAMES, on_ready=lambda: in_loop(ready.set))

        def answer(message: Message) -> None:
            if not outbox.put(message):
                in_loop(connection.transport.abort)

        sender = asyncio.create_task(self._send(connection, outbox, ready))
        try:
            await self._receive(connection, outbox, answer)
        except ConnectionClosed:
            pass
        finally:
            self._connections -= 1
            self._engine.metrics.connected(-1)
            self._engine.disconnect(connection)
            outbox.close()
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sender

    async def _receive(self, connection: ServerConnection, outbox: Outbox, answer: Answer) -> None:
        """Hand the robot's frames to the engine, until it sends too much nonsense or the engine is closed."""
        metrics, malformed = self._engine.metrics, 0
        async for frame in connection:
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
            if not self._submit(message, answer, connection):
                await connection.close(1001, "the verifier is shutting down")
                return

    async def _send(self, connection: ServerConnection, outbox: Outbox, ready: asyncio.Event) -> None:
        """The Sender of FSD's Algorithm 2: one message at a time, early outcomes only onto a free link."""
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


def _server_tls(settings: VerifierSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise ServerError(
            f"certificate {settings.certificate} with key {settings.key} cannot be used: {error}"
        ) from error
    return context
