# SPDX-License-Identifier: Apache-2.0
"""The verifier's metrics, and whether it lives and has room, over plain HTTP on a port of their own.

The metrics' answers are prometheus_client's; ``/healthz`` and ``/readyz`` are for what restarts and balances verifiers.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from dsd_ros.addresses import is_loopback
from dsd_ros.cloud.settings import MetricsSettings

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)


class ServerError(OSError):
    """A server cannot listen; one sentence with the remedy."""


def listen_error(where: str, zero: str, error: OSError) -> ServerError:
    """Why ``where`` cannot be listened on; ``zero``: what port 0 means there."""
    if error.errno == errno.EADDRINUSE:
        return ServerError(f"{where} is in use; choose another, or 0 for {zero}")
    if error.errno == errno.EACCES:
        return ServerError(f"{where} may not be used by this user; choose one above 1023")
    return ServerError(f"{where} cannot be listened on: {error.strerror or error}")


class MetricsServer:
    """Serves a registry to Prometheus. It asks for no token: the metrics are counts.

    with MetricsServer(engine.metrics.registry, settings) as server:
        print(server.url)
    """

    def __init__(
        self, registry: CollectorRegistry, settings: MetricsSettings, unready: Callable[[], str] = lambda: ""
    ) -> None:
        """Port 0 takes any free port. ``unready``: why the service takes no new client now; empty: it does."""
        self.serve(registry, unready)
        self._host, self._port = settings.metrics_host, settings.metrics_port
        self._server: WSGIServer | None = None
        self.url = ""

    def serve(self, registry: CollectorRegistry, unready: Callable[[], str]) -> None:
        """Serve another registry, also while listening."""
        self._registry, self._metrics, self._unready = registry, make_wsgi_app(registry), unready

    def start(self) -> str:
        """Listen, and return the URL; ServerError when that is not possible."""
        try:
            self._server, _ = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise listen_error(f"metrics port {self._port} on {self._host}", "none", error) from error
        self._server.set_app(self._answer)
        host, port = self._server.server_address[:2]
        self.url = f"http://[{host!s}]:{port}/metrics" if ":" in str(host) else f"http://{host!s}:{port}/metrics"
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

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/healthz", "/readyz"):
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        sentence = self._unready() if path == "/readyz" else ""
        status = "503 Service Unavailable" if sentence else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{sentence or 'ok'}\n".encode()]
