"""Bag files that are as good as written at every moment: what a killed recorder leaves can be read.

rosbags' own writers, but for when they write: everything up to the last ``save`` is in the file, whole, and a
write that fails (a full disk) takes back what it had begun.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from io import BytesIO
from pathlib import Path
from typing import Any

from rosbags.rosbag2.enums import CompressionMode
from rosbags.rosbag2.storage_mcap import McapWriter, PendingChunk
from rosbags.rosbag2.storage_sqlite3 import Sqlite3Writer


class McapFile(McapWriter):  # type: ignore[misc]
    """One .mcap file, of chunks compressed by zstd. Use it from one thread."""

    def __init__(self, path: Path) -> None:
        # The parent's constructor wants a folder and names the file itself: let it write into a folder of that name.
        folder = path.with_suffix("")
        folder.mkdir()
        try:
            super().__init__(folder, CompressionMode.STORAGE)
            self.bio.close()
            head = self.path.read_bytes()
            self.path.unlink()
        finally:
            folder.rmdir()
        self.path = path
        self.bio: Any = _Appended(path)
        self.bio.write(head)
        self.bio.mark()

    def close_chunk(self) -> None:
        chunk = self.chunk
        try:
            super().close_chunk()
        except OSError:
            self.bio.roll_back()
            for connection, messages in chunk.msgs.items():
                self.channel_stats[connection] -= len(messages)
            self.chunk = PendingChunk(2**63 - 1, 0, BytesIO(), defaultdict(list))
            raise
        self.bio.mark()

    def close(self, version: int, metadata: str) -> None:
        try:
            super().close(version, metadata)
        except OSError:
            self.bio.roll_back()
            raise

    def save(self) -> None:
        """Write what is still in memory; OSError when the disk does not take it."""
        if self.chunk.msgs:
            self.close_chunk()
            self.bio.sync()

    def kept(self) -> dict[int, int]:
        """The messages of each connection that have not been lost to a full disk."""
        return {connection: count for connection, count in self.channel_stats.items() if count}

    @property
    def size(self) -> int:
        """Bytes, those still in memory included."""
        return int(self.bio.tell()) + int(self.chunk.bio.tell())


class SqliteFile(Sqlite3Writer):  # type: ignore[misc]
    """One .db3 file. Use it from one thread."""

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
        """Write what is still in memory; sqlite3.OperationalError when the disk does not take it."""
        self.conn.commit()

    def kept(self) -> dict[int, int]:
        """The messages of each topic that have not been lost to a full disk; what was not saved is given up."""
        self.conn.rollback()
        return dict(self.conn.execute("SELECT topic_id, count(*) FROM messages GROUP BY topic_id"))

    @property
    def size(self) -> int:
        return self._written


class _Appended:
    """A file that only grows, written without a buffer, which can take back what is behind the last mark."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._size = self._good = 0

    def write(self, data: bytes | memoryview) -> int:
        left = memoryview(data)
        while left:
            count = os.write(self._fd, left)
            self._size += count
            left = left[count:]
        return len(data)

    def tell(self) -> int:
        return self._size

    def mark(self) -> None:
        self._good = self._size

    def roll_back(self) -> None:
        os.ftruncate(self._fd, self._good)
        os.lseek(self._fd, self._good, os.SEEK_SET)
        self._size = self._good

    def sync(self) -> None:
        """To the disk itself, so that a loss of power takes no more than a kill."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
