# SPDX-License-Identifier: Apache-2.0
"""A websocket server on a thread of its own, its answers to plain HTTP (/metrics, /healthz, /readyz), and the metrics
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http
import logging
import math
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from asyncio import BaseTransport
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from dsd_ros.cloud.connections import Door, DoorLimits, Listener, library_log, listeners, report_failure
from dsd_ros.cloud.settings import MetricsSettings, is_loopback

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)

MAX_SCRAPES = 16
SCRAPE_TIMEOUT_S = 5.0  # for a whole request, and then for the answer to be read
CLOSE_TIMEOUT_S = 0.4


class ServerError(OSError):
    """A server cannot listen; one sentence with the remedy."""


class ServerThread(ABC):
    """A websocket server that runs on a thread and an event loop of its own until it is closed."""

    what = "port"  # in errors, as is what port 0 means
    port_zero = "any free one"
    connection_type = ServerConnection

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.url = ""
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._links: weakref.WeakSet[ServerConnection] = weakref.WeakSet()
        self._servers: list[Server] = []
        self.door = Door(DoorLimits(MAX_SCRAPES, MAX_SCRAPES, math.inf, sys.maxsize))

    @abstractmethod
    async def listen(self, listener: Listener) -> Server:
        """Begin to serve a socket, with ``connect`` as ``create_connection``."""

    @abstractmethod
    def url_of(self, address: str) -> str:
        """The URL of the server at ``address``, a host and a port."""

    def connect(self, *args: Any, **kwargs: Any) -> ServerConnection:
        """A new connection, which ends with the server at the latest."""
        link = self.connection_type(*args, **kwargs)
        self._links.add(link)
        return link

    def start(self) -> str:
        """Listen, and return the URL; ServerError when that is not possible."""
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(ready)), name=type(self).__name__, daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self.url

    def close(self) -> None:
        """Close every connection and give back thread and sockets, within a second; any number of times."""
        loop, stop, thread = self._loop, self._stop, self._thread
        if thread is None:
            return
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)
        thread.join()
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(report_failure)
        self.door.open()
        sockets: list[Listener] = []
        try:
            sockets = listeners(self.host, self.port, self.door)
            self._servers = [await self.listen(listener) for listener in sockets]
            host, port = sockets[0].getsockname()[:2]
            self.url = self.url_of(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except Exception as error:
            for listener in sockets:
                listener.close()
            self.door.close()
            self._failure = self._listen_error(error)
            return
        finally:
            ready.set()
        await self._stop.wait()
        for server in self._servers:
            server.close()
        # A peer that does not answer the closing handshake is not waited for.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(s.wait_closed() for s in self._servers)), 2 * CLOSE_TIMEOUT_S)
        for link in self._links:
            transport = getattr(link, "transport", None)  # None: it never got past the TLS handshake
            if transport is not None:
                transport.abort()
        self.door.close()

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay. In the event loop."""
        for server in self._servers:
            server.server.close()

    def _listen_error(self, error: Exception) -> ServerError:
        where = f"{self.what} {self.port} on {self.host}"
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            return ServerError(f"{where} is in use; choose another, or 0 for {self.port_zero}")
        if number == errno.EACCES:
            return ServerError(f"{where} may not be used by this user; choose one above 1023")
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return ServerError(f"{where} cannot be listened on: {reason}")


class _Scrape(ServerConnection):
    """A connection that ends at once when there are too many others."""

    others: set[ServerConnection]  # those open, with this one: versions of websockets keep different lists of them

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self.others.add(self)
        if len(self.others) > MAX_SCRAPES:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.others.discard(self)
        super().connection_lost(exc)


class MetricsServer(ServerThread):
    """Serves a registry to Prometheus over plain HTTP, on a port of its own.

    It asks for no token: the metrics are counts. It answers a few requests at a time and cuts off slow clients.

    with MetricsServer(engine.metrics.registry, settings) as server:
        print(server.url)
    """

    what, port_zero = "metrics port", "none"
    connection_type = _Scrape

    def __init__(
        self, registry: CollectorRegistry, settings: MetricsSettings, unready: Callable[[], str] = lambda: ""
    ) -> None:
        """Port 0 takes any free port. ``unready``: why the service takes no new client now; empty: it does."""
        super().__init__(settings.metrics_host, settings.metrics_port)
        self._registry, self._unready = registry, unready
        self._scrapes: set[ServerConnection] = set()

    def connect(self, *args: Any, **kwargs: Any) -> ServerConnection:
        link = super().connect(*args, **kwargs)
        assert isinstance(link, _Scrape)
        link.others = self._scrapes
        return link

    def start(self) -> str:
        url = super().start()
        if not is_loopback(self.host):
            _log.warning("whoever reaches %s can read this verifier's metrics", url)
        return url

    async def listen(self, listener: Listener) -> Server:
        server: Server = await serve(
            _no_websocket,
            sock=listener,
            logger=library_log,
            process_request=lambda connection, request: respond(connection, request, self._registry, self._unready()),
            create_connection=self.connect,  # type: ignore[arg-type]  # a factory is as good
            open_timeout=SCRAPE_TIMEOUT_S,
            close_timeout=SCRAPE_TIMEOUT_S,
            server_header=None,
        )
        return server

    def url_of(self, address: str) -> str:
        return f"http://{address}/metrics"


async def _no_websocket(connection: ServerConnection) -> None:
    """Never called: every request is answered over HTTP."""


def respond(connection: ServerConnection, request: Request, registry: CollectorRegistry, unready: str = "") -> Response:
    """The answer to a plain HTTP request; ``unready``: what /readyz says instead of ok."""
    path = request.path.partition("?")[0]
    method = getattr(request, "method", "GET")  # websockets 16, the last for Python 3.10, reads GET alone
    if method not in ("GET", "HEAD"):
        return connection.respond(http.HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is answered here.\n")
    if path == "/healthz":
        response = connection.respond(http.HTTPStatus.OK, "ok\n")
    elif path == "/readyz":
        status = http.HTTPStatus.SERVICE_UNAVAILABLE if unready else http.HTTPStatus.OK
        response = connection.respond(status, f"{unready or 'ok'}\n")
    elif path == "/metrics":
        encoder, kind = choose_encoder(request.headers.get("Accept", ""))
        response = connection.respond(http.HTTPStatus.OK, encoder(registry).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = kind
    else:
        status = http.HTTPStatus.OK if path == "/" else http.HTTPStatus.NOT_FOUND
        response = connection.respond(status, "The metrics are at /metrics.\n")
    response.headers["Cache-Control"] = "no-store"
    if method == "HEAD":
        response.body = b""
    return response
