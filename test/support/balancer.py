# SPDX-License-Identifier: Apache-2.0
"""A small TCP balancer: each connection goes to the backend that has the fewest, and that accepts it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Balancer:
    """Least connections, as HAProxy's `balance leastconn`. Backends are ports of this machine; the list may change."""

    def __init__(self, *ports: int) -> None:
        self.backends = list(ports)
        self.taken: list[int] = []  # the backend of each connection, in their order
        self.open: Counter[int] = Counter()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client:
            for port in sorted(self.backends, key=lambda port: self.open[port]):
                try:
                    server = socket.create_connection(("127.0.0.1", port), timeout=5)
                except OSError:
                    continue  # it is down: the next one
                server.settimeout(None)
                with self._lock:
                    self.taken.append(port)
                    self.open[port] += 1
                with server:
                    back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
                    back.start()
                    self._copy(client, server)
                    back.join()
                with self._lock:
                    self.open[port] -= 1
                return

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
