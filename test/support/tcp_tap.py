# SPDX-License-Identifier: Apache-2.0
"""A wiretap on websocket connections: a TCP relay that records every byte in both directions."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self


class TcpTap:
    """Relays to the listener at ``target`` (a ws:// address). Use as a context; dial ``url``."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        self.up: list[bytearray] = []  # of each connection
        self.down: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10.0)
        for one in self._sockets:
            one.close()

    def _begin(self, work, *arguments) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                robot, _ = self._listener.accept()
            except OSError:
                return
            cloud = socket.create_connection(self._target)
            self._sockets += [robot, cloud]
            self.up.append(bytearray())
            self.down.append(bytearray())
            self._begin(self._relay, robot, cloud, self.up[-1])
            self._begin(self._relay, cloud, robot, self.down[-1])

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept += data
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def unmasked(stream: bytes) -> bytes:
    """What one way of a connection says (RFC 6455, 5.2): the upgrade's head, and every frame without its mask."""
    head, _, rest = bytes(stream).partition(b"\r\n\r\n")
    parts, at = [head], 0
    while at + 2 <= len(rest):
        assert not rest[at] & 0x70, "an extension, such as compression, is in use"
        masked, size = rest[at + 1] >> 7, rest[at + 1] & 127
        at += 2
        if size > 125:
            width = 2 if size == 126 else 8
            size = int.from_bytes(rest[at : at + width], "big")
            at += width
        mask = rest[at : at + 4] if masked else bytes(4)
        at += 4 * masked
        payload = rest[at : at + size]
        long = (mask * (len(payload) // 4 + 1))[: len(payload)]
        parts.append((int.from_bytes(payload, "big") ^ int.from_bytes(long, "big")).to_bytes(len(payload), "big"))
        at += size
    return b"\0\0\0\0".join(parts)
