# SPDX-License-Identifier: Apache-2.0
"""What stands in front of a verifier that is being deployed: answers every connection alike, and counts them."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Gateway:
    """Use as a context manager; answers on ``port`` with ``answer``, or at a free one."""

    def __init__(self, answer: bytes, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._answer, self._tls = answer, tls
        self.dialled = 0
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.dialled += 1
            with connection, suppress(OSError):
                connection.settimeout(5)
                link = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
                link.recv(4096)
                link.sendall(self._answer)
                if self._tls is None:
                    connection.shutdown(socket.SHUT_WR)


def response(status: str, *headers: str, body: bytes = b"default backend\n") -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode() + body
