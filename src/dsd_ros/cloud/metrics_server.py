# SPDX-License-Identifier: Apache-2.0
"""The verifier's metrics, and whether it lives and has room, over plain HTTP on a port of their own.

The answers are prometheus_client's; ``/healthz`` and ``/readyz`` are for what restarts and balances verifiers.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from dsd_ros.cloud.settings import MetricsSettings, is_loopback

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)
_TEXT = "Content-Type", "text/plain; charset=utf-8"


class ServerError(OSError):
    """A server cannot listen; one sentence with the remedy."""


def listen_error(where: str, zero: str, error: OSError) -> ServerError:
    """Why ``where`` cannot be listened on; ``zero``: what port 0 means there."""
    if error.errno == errno.EADDRINUSE:
        return ServerError(f"{where} is in use; choose another, or 0 for {zero}")
    if error.errno == errno.EACCES:
        return ServerError(f"{where} may not be used by this user; choose one above 1023")
    return ServerError(f"{where} cannot be listened on: {error.strerror or error}")


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # s, for a client that neither asks nor reads

    def log_message(self, *_: object) -> None:
        """Scrapes are not logged."""


class _Server(ThreadingWSGIServer):
    def __init__(self, host: str, port: int, answer: Callable[..., Iterable[bytes]]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)
        self.set_app(answer)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""
        _log.debug("a request for metrics failed", exc_info=True)


class MetricsServer:
    """Serves a registry to Prometheus. It asks for no token: the metrics are counts.

    with MetricsServer(engine.metrics.registry, settings) as server:
        print(server.url)
    """

    def __init__(
        self, registry: CollectorRegistry, settings: MetricsSettings, unready: Callable[[], str] = lambda: ""
    ) -> None:
        """Port 0 takes any free port. ``unready``: why the service takes no new client now; empty: it does."""
        self._host, self._port = settings.metrics_host, settings.metrics_port
        self._metrics, self._unready = make_wsgi_app(registry), unready
        self._server: _Server | None = None
        self.url = ""

    def start(self) -> str:
        """Listen, and return the URL; ServerError when that is not possible."""
        try:
            self._server = _Server(self._host, self._port, self._answer)
        except OSError as error:
            raise listen_error(f"metrics port {self._port} on {self._host}", "none", error) from error
        host, port = self._server.server_address[:2]
        self.url = f"http://[{host!s}]:{port}/metrics" if ":" in str(host) else f"http://{host!s}:{port}/metrics"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()
        if not is_loopback(self._host):
            _log.warning("whoever reaches %s can read this verifier's metrics", self.url)
        return self.url

    def close(self) -> None:
        """Give back thread and socket; any number of times."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        if path not in ("/healthz", "/readyz"):
            start_response("404 Not Found", [_TEXT])
            return [b"The metrics are at /metrics.\n"]
        sentence = self._unready() if path == "/readyz" else ""
        start_response("503 Service Unavailable" if sentence else "200 OK", [_TEXT])
        return [f"{sentence or 'ok'}\n".encode()]
