# SPDX-License-Identifier: Apache-2.0
"""Write bags in rosbag2's layout: a folder with metadata.yaml and one or more MCAP or SQLite files.

A bag is readable at every moment: after each ``save`` the files are complete up to that point, so a killed recorder
loses nothing saved, and a failed write (a full disk) is rolled back. Needs no ROS. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rosbags.interfaces import Connection, ConnectionExtRosbag2, MessageDefinition, MessageDefinitionFormat, Qos
from rosbags.rosbag2.enums import CompressionMode
from rosbags.rosbag2.metadata import dump_qos_v9
from rosbags.rosbag2.storage_mcap import McapWriter, PendingChunk
from rosbags.rosbag2.storage_sqlite3 import Sqlite3Writer

STORAGES = {"mcap": ".mcap", "sqlite3": ".db3"}
_VERSION = 9  # of rosbag2's metadata
_RESERVE_BYTES = 2 << 20  # kept free on disk, so that the index and metadata.yaml fit when it is full
_FILE_BYTES = 1 << 30  # a longer recording continues in the next file, to keep each index small

Define = Callable[[str], tuple[str, str]]  # message type -> definition, hash


class RecordError(ValueError):
    """The bag cannot be written; one sentence."""


class BagWriter:
    """Writes one bag. After a RecordError the saved messages are a complete bag, and further writes are ignored."""

    def __init__(self, folder: Path, define: Define, storage: str = "mcap", file_bytes: int = _FILE_BYTES) -> None:
        """Create the folder.

        :raises RecordError: when it exists, cannot be created, or the storage is unknown.
        """
        if storage not in STORAGES:
            raise RecordError(f"There is no storage {storage!r}; use {' or '.join(STORAGES)}.")
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100  # links stay
        self.messages = 0
        self._define, self._storage, self._file_bytes = define, storage, file_bytes
        self._custom: dict[str, str] = {}
        self._connections: dict[tuple[str, str], Connection] = {}
        self._files: list[dict[str, Any]] = []
        self._file: Any = None
        self._announced = set[str]()  # message types defined in the current file
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise RecordError(f"{folder} exists already; name a new folder, bags are never overwritten.") from None
        except OSError as error:
            raise RecordError(f"The bag {folder} cannot be created: {_reason(error)}.") from None
        self._reserve = self.folder / ".reserve"
        try:
            with self._reserve.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
            self._next_file()
            self._write_metadata()
        except (OSError, sqlite3.Error) as error:
            shutil.rmtree(self.folder, ignore_errors=True)  # nothing is recorded yet: the name stays free
            raise RecordError(f"The bag {folder} cannot be created: {_reason(error)}.") from None

    @property
    def closed(self) -> bool:
        return self._file is None

    def set_metadata(self, key: str, text: str) -> None:
        """Store a text in the bag's custom data immediately. Raises RecordError like :meth:`write`."""
        self._custom[key] = text
        if not self.closed:
            with self._ends_on_error():
                self._write_metadata()

    def write(self, topic: str, kind: str, qos: Sequence[Qos], timestamp: int, data: bytes | memoryview) -> None:
        """Write a CDR message of type ``kind``, received at ``timestamp`` (ns).

        :raises RecordError: when the write fails; the bag is then closed.
        """
        if self.closed:
            return
        with self._ends_on_error():
            connection = self._connections.get((topic, kind)) or self._connect(topic, kind, qos)
            self._file.write(connection, timestamp, data)
            about = self._files[-1]
            about["first"] = min(about["first"], timestamp)
            about["last"] = max(about["last"], timestamp)
            about["counts"][connection.id] = about["counts"].get(connection.id, 0) + 1
            self.messages += 1
            if self._file.size > self._file_bytes:
                self._next_file()

    def save(self) -> None:
        """Flush all messages to disk, so that a kill loses none of them. Raises RecordError like :meth:`write`."""
        if not self.closed:
            with self._ends_on_error():
                self._file.save()

    def close(self) -> None:
        """Write the index and metadata.yaml. May be called twice. Raises RecordError like :meth:`write`."""
        if not self.closed:
            with self._ends_on_error():
                self._reserve.unlink(missing_ok=True)
                self._end_file()
                self._write_metadata()

    def _write_metadata(self) -> None:
        """Replace metadata.yaml atomically with the current state."""
        text = yaml.safe_dump({"rosbag2_bagfile_information": self._information()}, sort_keys=False)
        path = self.folder / "metadata.yaml"
        new = path.with_suffix(".yaml.tmp")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _next_file(self) -> None:
        self._end_file()
        name = f"{self.folder.name}_{len(self._files)}{STORAGES[self._storage]}"
        make = McapFile if self._storage == "mcap" else SqliteFile
        self._file = make(self.folder / name)
        self._files.append({"path": name, "first": 2**63 - 1, "last": 0, "counts": {}})
        self._announced.clear()
        for connection in self._connections.values():
            self._announce(connection)

    def _end_file(self) -> None:
        if self._file is None:
            return
        self._file.save()
        self._file.close(_VERSION, yaml.safe_dump(self._information(), sort_keys=False))
        self._file = None

    def _connect(self, topic: str, kind: str, qos: Sequence[Qos]) -> Connection:
        text, digest = self._define(kind)
        connection = Connection(
            id=len(self._connections) + 1,
            topic=topic,
            msgtype=kind,
            msgdef=MessageDefinition(MessageDefinitionFormat.MSG, text),
            digest=digest,
            msgcount=0,
            ext=ConnectionExtRosbag2(serialization_format="cdr", offered_qos_profiles=list(qos)),
            owner=self,
        )
        self._announce(connection)
        self._connections[topic, kind] = connection
        return connection

    def _announce(self, connection: Connection) -> None:
        if connection.msgtype not in self._announced:
            self._announced.add(connection.msgtype)
            self._file.add_msgtype(connection)
        profiles = yaml.safe_dump(dump_qos_v9(list(connection.ext.offered_qos_profiles)))  # type: ignore[union-attr]  # rosbag2's
        self._file.add_connection(connection, profiles)

    def _information(self) -> dict[str, Any]:
        """The content of metadata.yaml (rosbag2, version 9)."""
        filled = [about for about in self._files if about["counts"]]
        counts: Counter[int] = Counter()
        for about in filled:
            counts.update(about["counts"])
        first = min((about["first"] for about in filled), default=0)
        last = max((about["last"] for about in filled), default=0)
        return {
            "version": _VERSION,
            "storage_identifier": self._storage,
            "duration": {"nanoseconds": last - first},
            "starting_time": {"nanoseconds_since_epoch": first},
            "message_count": counts.total(),
            "topics_with_message_count": [
                {
                    "topic_metadata": {
                        "name": c.topic,
                        "type": c.msgtype,
                        "serialization_format": "cdr",
                        "offered_qos_profiles": dump_qos_v9(list(c.ext.offered_qos_profiles)),  # type: ignore[union-attr]  # rosbag2's
                        "type_description_hash": c.digest,
                    },
                    "message_count": counts[c.id],
                }
                for c in self._connections.values()
            ],
            "compression_format": "",
            "compression_mode": "",
            "relative_file_paths": [about["path"] for about in self._files],
            "files": [
                {
                    "path": about["path"],
                    "starting_time": {"nanoseconds_since_epoch": about["first"] if about["counts"] else 0},
                    "duration": {"nanoseconds": max(0, about["last"] - about["first"])},
                    "message_count": sum(about["counts"].values()),
                }
                for about in self._files
            ],
            "custom_data": dict(self._custom),
            "ros_distro": os.environ.get("ROS_DISTRO", "jazzy"),
        }

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise self._fail(error) from None

    def _fail(self, error: Exception) -> RecordError:
        """Free the reserve, save what fits in it, and return the error to raise."""
        self._reserve.unlink(missing_ok=True)
        file, self._file = self._file, None
        if file is not None:
            try:
                self._files[-1]["counts"] = file.message_counts()
                file.close(_VERSION, yaml.safe_dump(self._information(), sort_keys=False))
            except (OSError, sqlite3.Error):
                file.abort()  # leaves the file without an index; readers cope
        with contextlib.suppress(OSError):  # the previous metadata.yaml stays
            self._write_metadata()
        return RecordError(
            f"The bag {self.folder} cannot be written any further: {_reason(error)}. It can be read up to here."
        )


def _reason(error: Exception) -> str:
    """What the system says; a full disk by the same name from files and from SQLite."""
    full = getattr(error, "errno", None) == errno.ENOSPC or "disk is full" in str(error)
    return "the disk is full (ENOSPC)" if full else getattr(error, "strerror", None) or str(error)


class McapFile(McapWriter):
    """An .mcap file of zstd-compressed chunks."""

    def __init__(self, path: Path) -> None:
        # The parent's constructor takes a folder and names the file itself, so let it write into a temporary folder.
        folder = path.with_suffix("")
        folder.mkdir()
        try:
            super().__init__(folder, CompressionMode.STORAGE)
            self.bio.close()
            head = self.path.read_bytes()
            self.path.unlink()
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # not empty after an error
        self.path = path
        self.bio: Any = _Appended(path)
        self.bio.write(head)
        self.bio.commit()

    def close_chunk(self) -> None:
        chunk = self.chunk
        try:
            super().close_chunk()
        except OSError:
            self.bio.roll_back()
            for connection, messages in chunk.msgs.items():
                self.channel_stats[connection] -= len(messages)
            self.chunk = PendingChunk(2**63 - 1, 0, io.BytesIO(), defaultdict(list))
            raise
        self.bio.commit()

    def close(self, version: int, metadata: str) -> None:
        try:
            super().close(version, metadata)
        except OSError:
            self.bio.roll_back()
            raise

    def save(self) -> None:
        """Write and sync what is still in memory; raises OSError when that fails."""
        if self.chunk.msgs:
            self.close_chunk()
            os.fdatasync(self.bio.fileno())  # so that a power failure loses no more than a kill does

    def message_counts(self) -> dict[int, int]:
        """Messages per connection that reached the disk."""
        return {connection: count for connection, count in self.channel_stats.items() if count}

    @property
    def size(self) -> int:
        """Bytes, including those still in memory."""
        return int(self.bio.tell()) + int(self.chunk.bio.tell())


class SqliteFile(Sqlite3Writer):
    """A .db3 (SQLite) file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.conn = sqlite3.connect(path)
        self.conn.executescript(self.SQLITE_SCHEMA)
        self.cursor = self.conn.cursor()
        self._written = 0

    def write(self, connection: Any, timestamp: int, data: bytes | memoryview) -> None:
        super().write(connection, timestamp, data)
        self._written += len(data)

    def save(self) -> None:
        """Commit what was written; raises sqlite3.OperationalError when that fails."""
        self.conn.commit()

    def message_counts(self) -> dict[int, int]:
        """Messages per topic that reached the disk; uncommitted ones are rolled back."""
        self.conn.rollback()
        return dict(self.conn.execute("SELECT topic_id, count(*) FROM messages GROUP BY topic_id"))

    @property
    def size(self) -> int:
        return self._written


class _Appended(io.FileIO):
    """An unbuffered new file that can be rolled back to its last commit."""

    _good = 0

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:
            left = left[super().write(left) :]
        return len(data)

    def commit(self) -> None:
        self._good = self.tell()

    def roll_back(self) -> None:
        self.truncate(self._good)
        self.seek(self._good)
