# SPDX-License-Identifier: Apache-2.0
"""Write a bag in rosbag2's layout with `rosbags`: a folder with an .mcap file, and metadata.yaml once it is closed.

What a killed recorder saved stays in the file: reader.py reads it from its beginning. Needs no ROS. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rosbags.interfaces import Connection, Qos
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer, WriterError

UNTIL_CLOSED = "recording.json"  # what metadata.yaml gets as custom data when the bag is closed

Define = Callable[[str], tuple[str, str]]  # message type -> definition, RIHS01 hash


class RecordError(ValueError):
    """The bag cannot be written; one sentence."""


class BagWriter:
    """Writes one bag. After a RecordError the saved messages can be read, and further writes are ignored."""

    def __init__(self, folder: Path, define: Define) -> None:
        """Create the folder.

        :param define: gives the definition of a message type, as rosbag2 stores it, and its hash.
        :raises RecordError: when it exists or cannot be created.
        """
        self.folder, self.closed = folder, False
        self.counts: Counter[str] = Counter()  # messages written, by topic
        self._define = define
        self._connections: dict[tuple[str, str], Connection] = {}
        try:
            self._writer = Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP)
            self._writer.set_compression(CompressionMode.STORAGE, CompressionFormat.ZSTD)
            self._writer.open()
        except WriterError:
            raise RecordError(f"{folder} exists already; name a new folder, bags are never overwritten.") from None
        except OSError as error:
            raise RecordError(
                f"The bag {folder} cannot be created ({error.strerror}); choose a folder that can be written."
            ) from None
        self._storage: Any = self._writer.storage

    def set_metadata(self, key: str, text: str) -> None:
        """Store a text in the bag's custom data. Raises RecordError like :meth:`write`."""
        if not self.closed:
            self._writer.set_custom_data(key, text)
            with self._ends_on_error():
                (self.folder / UNTIL_CLOSED).write_text(json.dumps(self._writer.custom_data), encoding="utf-8")

    def write(self, topic: str, kind: str, qos: Sequence[Qos], timestamp: int, data: bytes | memoryview) -> None:
        """Write a CDR message of type ``kind``, received at ``timestamp`` (ns).

        :raises RecordError: when the write fails; the bag is then closed.
        """
        if self.closed:
            return
        with self._ends_on_error():
            connection = self._connections.get((topic, kind)) or self._connect(topic, kind, qos)
            self._writer.write(connection, timestamp, data)
            self.counts[topic] += 1

    def save(self) -> None:
        """Force all messages to the disk, so that a kill loses none of them. Raises RecordError like :meth:`write`."""
        if not self.closed and self._storage.chunk.msgs:
            with self._ends_on_error():
                self._storage.close_chunk()
                self._storage.bio.flush()
                os.fdatasync(self._storage.bio.fileno())

    def close(self) -> None:
        """Write the index and metadata.yaml. May be called twice. Raises RecordError like :meth:`write`."""
        if not self.closed:
            with self._ends_on_error():
                self._writer.close()
                (self.folder / UNTIL_CLOSED).unlink(missing_ok=True)
                self.closed = True

    def _connect(self, topic: str, kind: str, qos: Sequence[Qos]) -> Connection:
        text, digest = self._define(kind)
        connection = self._writer.add_connection(topic, kind, msgdef=text, rihs01=digest, offered_qos_profiles=qos)
        self._connections[topic, kind] = connection
        return connection

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.closed = True
            with contextlib.suppress(OSError):
                self._writer.abort()
            raise RecordError(
                f"The bag {self.folder} cannot be written any further: {error.strerror}. It can be read up to here."
            ) from None
