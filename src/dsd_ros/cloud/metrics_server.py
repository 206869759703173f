# SPDX-License-Identifier: Apache-2.0
"""The verifier's metrics over plain HTTP on a port of their own, and why a server cannot listen."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from dsd_ros.cloud.settings import MetricsSettings, is_loopback

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

    def __init__(self, registry: CollectorRegistry, settings: MetricsSettings) -> None:
        """Port 0 takes any free port."""
        self._registry = registry
        self._host, self._port = settings.metrics_host, settings.metrics_port
        self._server: WSGIServer | None = None
        self.url = ""

    def start(self) -> str:
        """Listen, and return the URL; ServerError when that is not possible."""
        try:
            self._server, _ = start_http_server(self._port, self._host, self._registry)
        except OSError as error:
            raise listen_error(f"metrics port {self._port} on {self._host}", "none", error) from error
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
