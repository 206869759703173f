# SPDX-License-Identifier: Apache-2.0
"""Serve the live page: one HTML file and a stream of events, to browsers that only watch.

The stream is server-sent events (HTML standard, section 9.2): it goes one way, so nothing reaches the robot from a
browser. The page sends requests to this server alone, and its Content-Security-Policy makes the browser refuse to.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import cv2
import numpy as np

from dsd_ros.addresses import is_loopback

if TYPE_CHECKING:
    from typing_extensions import Self

PICTURE = "view"  # the kind of event that holds a picture; all others are small
BEAT_S = 1.0  # between two signs of life
_PAUSE_S = 0.05  # between two parts of a stream: events of one moment travel together
_CHUNK = 1 << 16  # bytes sent at once: a slow browser gets _SEND_S for each
_SEND_S = 10.0
_QUALITY = 75  # of JPEG
_PAGE = Path(__file__).with_name("page.html")


class ViewError(RuntimeError):
    """The live page cannot be served; one sentence."""


class _Kept:
    """Encoded events in order, the oldest dropped when they exceed ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._events: deque[tuple[int, bytes]] = deque()

    def add(self, number: int, data: bytes) -> None:
        self._events.append((number, data))
        self._size += len(data)
        while self._size > self._limit and len(self._events) > 1:
            self._size -= len(self._events.popleft()[1])

    def after(self, number: int) -> list[tuple[int, bytes]]:
        """The events with higher numbers, oldest first."""
        found = []
        for event in reversed(self._events):
            if event[0] <= number:
                break
            found.append(event)
        return found[::-1]


class PageFeed:
    """What the page shows, as events. Keeps those that fit into ``memory_mb`` for later browsers. Thread-safe.

    :param live: whether the robot is there; False: what is shown was recorded.
    """

    def __init__(self, memory_mb: int, live: bool = True, title: str = "") -> None:
        self._about = {"live": live, "title": title}
        self._run = secrets.token_hex(4)
        self._began = self._heard = time.monotonic()
        self._news = threading.Condition()
        self._number = 0
        self._fixed: dict[str, tuple[int, bytes]] = {}  # kinds of which only the newest counts
        room = memory_mb << 20
        self._pictures, self._rest = _Kept(room * 3 // 4), _Kept(room // 4)
        self._watchers = 0
        self._closed = False

    def add(self, kind: str, value: Any, at: float | None = None, fixed: bool = False) -> None:
        """Add an event: ``value`` is anything that JSON can hold; ``at``: s since the view began (default: now).

        Of ``fixed`` events only the newest of its kind is kept, and never dropped.
        """
        at = time.monotonic() - self._began if at is None else at
        text = json.dumps({"k": kind, "t": round(at, 3), "v": value}, separators=(",", ":"), allow_nan=False)
        with self._news:
            self._number += 1
            data = f"id: {self._run}-{self._number}\ndata: {text}\n\n".encode()
            if fixed:
                self._fixed[kind] = (self._number, data)
            else:
                (self._pictures if kind == PICTURE else self._rest).add(self._number, data)
            self._news.notify_all()

    def picture(self, image: np.ndarray, at: float | None = None) -> None:
        """Add a picture: uint8 (H, W, 3), BGR."""
        _, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        self.add(PICTURE, base64.b64encode(data.tobytes()).decode(), at)

    def heard(self, at: float) -> None:
        """Note when the robot was heard last, monotonic s."""
        self._heard = at

    @property
    def watched(self) -> bool:
        """Whether a browser has the page open."""
        return self._watchers > 0

    def close(self) -> None:
        """End all streams."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    @contextlib.contextmanager
    def watcher(self) -> Iterator[None]:
        """Count a browser while it watches."""
        with self._news:
            self._watchers += 1
        try:
            yield
        finally:
            with self._news:
                self._watchers -= 1

    def stream(self, after: str) -> Iterator[bytes]:
        """The parts of one browser's stream, until the feed closes.

        :param after: id of the last event that the browser has; other values: it has none.
        """
        run, _, number = after.partition("-")
        seen = int(number) if run == self._run and re.fullmatch(r"\d{1,15}", number) else 0
        began, beaten = bool(seen), 0.0
        yield self._sign("hello", {"run": self._run, **self._about})
        while True:
            with self._news:
                if self._number == seen and not self._closed:
                    self._news.wait(BEAT_S)
                if self._closed:
                    return
                pictures = self._pictures.after(seen)
                events = [event for event in self._fixed.values() if event[0] > seen] + self._rest.after(seen)
                seen = self._number
            # A browser that cannot follow gets the newest picture only; what happened before it came, it gets whole.
            events += pictures[-1:] if began else pictures
            began = True
            yield b"".join(data for _, data in sorted(events))
            if time.monotonic() - beaten >= BEAT_S:
                beaten = time.monotonic()
                yield self._sign("beat", {"silent": round(beaten - self._heard, 2)})
            time.sleep(_PAUSE_S)

    def _sign(self, kind: str, value: dict[str, Any]) -> bytes:
        at = round(time.monotonic() - self._began, 3)
        return f"data: {json.dumps({'k': kind, 't': at, 'v': value})}\n\n".encode()


class WebServer:
    """Serves the page and its events on one port (0, or where it is taken: any free one), as a context manager.

    :param bind: address to listen on; a loopback address keeps the view on this machine.
    :raises ViewError: when it cannot listen there.
    """

    def __init__(self, feed: PageFeed, bind: str, port: int) -> None:
        self.bind, self._feed = bind, feed
        try:
            try:
                self._server = _Server((bind, port), feed)
            except OSError:
                self._server = _Server((bind, 0), feed)
        except OSError as error:
            raise ViewError(f"The live page cannot listen on {bind}: {error}.") from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="live page", daemon=True)
        self._thread.start()

    def page(self, host: str = "") -> str:
        """The address to open in a browser; ``host``: this machine's name as seen by the browser."""
        return f"http://{host or _host(self.bind)}:{self.port}/"

    def close(self) -> None:
        self._feed.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], feed: PageFeed) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.feed = feed
        self.local = is_loopback(address[0])
        self.page = _PAGE.read_bytes()
        hashes = [
            base64.b64encode(hashlib.sha256(found).digest()).decode()
            for found in re.findall(rb"<(?:style|script)>(.*?)</(?:style|script)>", self.page, re.DOTALL)
        ]
        style, script = hashes
        self.policy = (
            f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a browser has gone, or sent what is no request."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / and GET /events."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SEND_S

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if self.server.local and not is_loopback(name):
            # Another site whose name its owner points at this machine must not read the page (DNS rebinding).
            self._answer(403, b"This page is for this machine alone: open it as 127.0.0.1.", "text/plain")
        elif url.path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        elif url.path == "/events":
            self._stream(parse_qs(url.query).get("after", [""])[0])
        else:
            self._answer(404, b"Only / is here.", "text/plain")

    def _stream(self, after: str) -> None:
        with self.server.feed.watcher():
            self.close_connection = True
            self._begin(200, "text/event-stream")
            self.end_headers()
            for part in self.server.feed.stream(after):
                for place in range(0, len(part), _CHUNK):
                    self.wfile.write(part[place : place + _CHUNK])

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self._begin(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _begin(self, status: int, kind: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer", "Content-Security-Policy": self.server.policy,
        }  # fmt: skip
        for header, value in headers.items():
            self.send_header(header, value)

    def log_message(self, *_: object) -> None:
        """Log nothing: what is watched is no event of the robot's."""


def open_browser(page: str) -> None:
    """Open the page where a browser can open a window; a text browser would take over this terminal."""
    if sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(page)


def _host(bind: str) -> str:
    """The host name under which this machine reaches ``bind``."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        return bind
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{bind}]" if address.version == 6 else bind
