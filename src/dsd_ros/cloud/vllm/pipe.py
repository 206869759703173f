# SPDX-License-Identifier: Apache-2.0
"""Drafted tokens on their way from the verifier to the engine's process: a named pipe, which neither side waits for.

A pipe, since a datagram socket may hold as few as ten messages until the next step. Each message is written at once,
and so arrives whole; into a full pipe none is written, which costs speed alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dsd_ros.wire.codec import WireError, decode, encode
from dsd_ros.wire.messages import DraftTokens

_AT_ONCE = 1 << 16  # bytes that a pipe holds
_LENGTH = 2  # bytes before each message: how many follow


class DraftReader:
    """The engine's end: one for each of its schedulers."""

    def __init__(self, directory: str) -> None:
        path = Path(directory) / f"drafts-{os.getpid()}"
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer, so that it never ends
        self._rest = b""

    def read(self) -> Iterator[DraftTokens]:
        """What has come since; nothing that is no message of its kind."""
        with contextlib.suppress(BlockingIOError):
            self._rest += os.read(self._pipe, _AT_ONCE)
        while len(self._rest) >= _LENGTH:
            end = _LENGTH + int.from_bytes(self._rest[:_LENGTH], "little")
            if len(self._rest) < end:
                return
            data, self._rest = self._rest[_LENGTH:end], self._rest[end:]
            with contextlib.suppress(WireError):
                if isinstance(message := decode(data), DraftTokens):
                    yield message


class DraftWriter:
    """The verifier's end of all pipes in a directory."""

    def __init__(self, directory: str) -> None:
        self._pipes = [os.open(path, os.O_WRONLY | os.O_NONBLOCK) for path in Path(directory).glob("drafts-*")]

    def send(self, message: DraftTokens) -> None:
        """Write a message to each pipe that has room. Never waits or raises."""
        data = encode(message)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                os.write(pipe, len(data).to_bytes(_LENGTH, "little") + data)

    def close(self) -> None:
        """Close the pipes."""
        for pipe in self._pipes:
            os.close(pipe)
