"""Where Prometheus fetches a verifier's metrics: GET /metrics over plain HTTP, on a thread of its own.

It answers one request per connection, a few at a time, and waits for nobody: who is slow is cut off. What it says are
counts; it asks for no token, so it listens on this machine alone unless told otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dsd_ros.cloud.settings import LOOPBACK, MetricsSettings, listen_error

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
MAX_REQUEST_BYTES = 8192
PATIENCE_S = 5.0  # for a whole request, and then for the answer to be taken
_PAGE = b"The metrics are at /metrics.\n"


class MetricsEndpoint:
    """Serves a registry until it is closed.

    with MetricsEndpoint(engine.metrics.registry, settings) as endpoint:
        print(endpoint.url)
    """

    def __init__(self, registry: CollectorRegistry, settings: MetricsSettings) -> None:
        """``settings.metrics_port`` 0 takes any free port here; whoever has it as "off" makes no endpoint."""
        self._registry = registry
        self._settings = settings
        self._links: dict[asyncio.Task[None], socket.socket] = {}
        self._stop: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self.url = ""

    def start(self) -> str:
        """Listen, and return the address; ServerError when that is not possible."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        except (OSError, OverflowError) as error:
            raise listen_error(error, "metrics port", port, host, "none") from error
        host, port = listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name="metrics", daemon=True
        )
        self._thread.start()
        ready.wait()
        if self._settings.metrics_host not in LOOPBACK:
            _log.warning("whoever reaches %s can read this verifier's metrics", self.url)
        return self.url

    def close(self) -> None:
        """Cut off who is connected and give back thread and sockets; any number of times."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop()
            thread.join()

    def __enter__(self) -> MetricsEndpoint:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        with listener:
            listener.setblocking(False)
            accepting = asyncio.create_task(self._accept(listener))
            ready.set()
            await stop.wait()
            tasks = [accepting, *self._links]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, _ = await loop.sock_accept(listener)
            except OSError:  # gone again, or this process has no file left
                await asyncio.sleep(0.1)
                continue
            if len(self._links) >= MAX_CONNECTIONS:
                link.close()
                continue
            task = asyncio.create_task(self._handle(link))
            self._links[task] = link
            task.add_done_callback(lambda task: self._links.pop(task).close())

    async def _handle(self, link: socket.socket) -> None:
        loop, head = asyncio.get_running_loop(), b""
        link.setblocking(False)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while b"\r\n\r\n" not in head:
                    more = await loop.sock_recv(link, MAX_REQUEST_BYTES)
                    head += more
                    if not more or len(head) > MAX_REQUEST_BYTES:
                        return
            async with asyncio.timeout(PATIENCE_S):
                await loop.sock_sendall(link, self._answer(head))

    def _answer(self, head: bytes) -> bytes:
        line, *headers = head.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"Only GET is answered here.\n")
        if path != "/metrics":
            return _response("200 OK" if path == "/" else "404 Not Found", _PAGE)
        accept = next((h[7:].strip() for h in headers if h.lower().startswith("accept:")), "")
        encoder, kind = choose_encoder(accept)
        answer = _response("200 OK", encoder(self._registry), kind)
        return answer if method == "GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    ).encode() + body
