# SPDX-License-Identifier: Apache-2.0
"""Read the storage files of a bag, MCAP or SQLite, compressed or damaged, within limits. Needs no ROS.

A file of a stranger must not take more memory, disk or time than its size justifies: every length is compared with what
is there before anything is allocated, and what a file unpacks to is bounded by its size.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sqlite3
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import lz4.frame  # type: ignore[import-untyped]
import zstandard
from mcap.data_stream import ReadDataStream
from mcap.opcode import Opcode
from mcap.records import Channel, Chunk, Schema
from mcap.stream_reader import MAGIC_SIZE

PACKED = ".zstd"  # the further suffix of a file compressed as a whole
SUFFIXES = (".mcap", ".db3")
_MAGIC = b"\x89MCAP0\r\n"
_MESSAGE = struct.Struct("<HIQQ")  # channel, sequence, log time, publish time
_WANTED = frozenset({Opcode.SCHEMA, Opcode.CHANNEL, Opcode.MESSAGE, Opcode.CHUNK, Opcode.FOOTER})
_SCHEMAS = {"ros2msg": "msg", "ros2idl": "idl", "omgidl": "idl"}
_ZSTD, _LZ4 = b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18"  # how their frames begin; CDR begins with 0
_RECORD_LIMIT = 256 << 20  # bytes of one record, chunk or message
_DEFINITION_LIMIT = 256 << 10  # characters of a message definition
_SPARE_BYTES, _RATIO = 256 << 20, 256  # a file may unpack to this much, and this much for each of its bytes
_SPARE_RECORDS = 1_000_000  # a file may hold this many records, and one more for each of its bytes
_SPARE_STEPS, _STEPS = 20_000_000, 40  # of SQLite's machine for a file, and for each of its bytes
_LATEST = 2**63  # ns; later times are damage


class BagError(ValueError):
    """The bag cannot be read at all; one sentence."""


class _Damaged(ValueError):
    """A part cannot be read; says why, as half a sentence."""


class _Unbounded(_Damaged):
    """A file holds more than its size justifies."""


@dataclass(frozen=True)
class Record:
    """A message: ``at`` is its receive time (ns), ``data`` its CDR, possibly still compressed."""

    topic: str
    kind: str
    at: int
    data: bytes


@dataclass(kw_only=True)
class Findings:
    """What reading a bag found besides its messages. ``notes`` are sentences about what is missing or left out."""

    definitions: dict[str, tuple[str, str]] = field(default_factory=dict)  # type -> "msg" or "idl", definition
    notes: list[str] = field(default_factory=list)
    whole: bool = True  # nothing of the recording is missing or damaged
    foreign: Counter[tuple[str, str]] = field(default_factory=Counter)  # (topic, encoding) -> messages that are no CDR

    def note(self, sentence: str) -> None:
        """Add a sentence, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def damage(self, sentence: str) -> None:
        """Add a sentence about something missing: the bag is not whole."""
        self.whole = False
        self.note(sentence)


def read_file(path: Path, about: Findings) -> Iterator[Record]:
    """The messages of a storage file, in order of writing (MCAP) or of time (SQLite); what else it holds to ``about``.

    :raises BagError: when there is no room to unpack it.
    """
    with contextlib.ExitStack() as stack:
        beside = [path.with_name(path.name + end) for end in ("-wal", "-journal")]
        beside = [file for file in beside if file.exists()]
        if path.suffix == PACKED or beside:  # SQLite has to write beside the file to recover it: let it, in a copy
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsd_bag_")))
            try:
                path = _unpacked(path, folder) if path.suffix == PACKED else _copied(path, beside, folder)
            except _Damaged as error:
                about.damage(f"{path.name} cannot be read ({error}).")
                return
            except OSError as error:
                raise BagError(
                    f"{path.name} has to be unpacked into {folder.parent}, which fails: {error.strerror}; "
                    "free space there, or set TMPDIR to another folder."
                ) from None
        read = _of_database if path.suffix == ".db3" else _of_mcap
        yield from read(path, about)


def message_bytes(data: bytes) -> bytes:
    """A message's CDR: rosbag2 compresses each message by itself in its mode MESSAGE.

    :raises ValueError: when it cannot be decompressed.
    """
    form = {_ZSTD: "zstd", _LZ4: "lz4"}.get(bytes(data[:4]))
    if form is None:
        return data
    limit = min(_RECORD_LIMIT, _SPARE_BYTES // 4 + _RATIO * len(data))
    raw = _decompressed(form, data, limit)
    if len(raw) > limit:
        raise _Unbounded(f"it has more than {limit} bytes when decompressed")
    return raw


def _copied(path: Path, beside: list[Path], folder: Path) -> Path:
    for file in (path, *beside):
        shutil.copyfile(file, folder / file.name)
    return folder / path.name


def _unpacked(path: Path, folder: Path) -> Path:
    """A file without the compression of rosbag2's mode FILE, in ``folder``; the readable part if it is cut."""
    out = folder / path.stem
    left = _SPARE_BYTES + _RATIO * path.stat().st_size
    with path.open("rb") as packed, out.open("wb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        try:
            while block := stream.read(1 << 20):
                left -= len(block)
                if left < 0:
                    raise _Unbounded("it unpacks to more than its size justifies")
                file.write(block)
        except zstandard.ZstdError as error:
            if not file.tell():
                raise _Damaged(f"it is no zstd file: {error}") from None
    return out


def _decompressed(form: str, data: bytes, limit: int) -> bytes:
    """Decompressed bytes, cut after ``limit`` + 1; the sizes that frames claim for themselves are not trusted."""
    if form == "zstd":
        return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read(limit + 1)
    if form == "lz4":
        return bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit + 1))
    if form:
        raise _Damaged(f"unknown compression {form!r}")
    return data


class _Budget:
    """What may be read from a file of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.records = _SPARE_RECORDS + size
        self.content = _SPARE_BYTES * 4 + _RATIO * size

    def spend(self, records: int, content: int = 0) -> None:
        self.records -= records
        self.content -= content
        if min(self.records, self.content) < 0:
            raise _Unbounded("it holds more than its size justifies")


def _frames(file: BinaryIO, end: int, budget: _Budget) -> Iterator[tuple[int, bytes]]:
    """MCAP's records up to ``end``, as opcode and content, without those that are not used here."""
    at = file.tell()
    while at < end:
        head = file.read(9)
        budget.spend(1)
        opcode, length = struct.unpack("<BQ", head) if len(head) == 9 else (0, 0)
        at += 9 + length
        if not opcode or at > end:
            raise _Damaged("its end is missing")
        if opcode not in _WANTED:
            file.seek(at)
            continue
        if length > _RECORD_LIMIT:
            raise _Unbounded(f"it has a record of {length} bytes, and {_RECORD_LIMIT} are read at most")
        yield opcode, file.read(length)
        if opcode == Opcode.FOOTER:
            return


def _chunk(content: bytes, budget: _Budget) -> bytes:
    """The records of a chunk."""
    chunk = Chunk.read(ReadDataStream(io.BytesIO(content)))
    size = chunk.uncompressed_size
    if size > _RECORD_LIMIT:
        raise _Unbounded(f"it has a chunk of {size} bytes, and {_RECORD_LIMIT} are read at most")
    budget.spend(0, size)
    raw = _decompressed(chunk.compression, chunk.data, size)
    if len(raw) != size or (chunk.uncompressed_crc and zlib.crc32(raw) != chunk.uncompressed_crc):
        raise _Damaged("a chunk does not match its checksum")
    return raw


def _of_mcap(path: Path, about: Findings) -> Iterator[Record]:
    """The messages of an .mcap file from its beginning, without its index: a killed recorder leaves none."""
    reading = _McapReading(about)
    reason = ""
    with path.open("rb") as file:
        size = path.stat().st_size
        budget = _Budget(size)
        try:
            if file.read(MAGIC_SIZE) != _MAGIC:
                raise _Damaged("it is not an MCAP file")
            for opcode, content in _frames(file, size, budget):
                yield from reading.take(opcode, content, budget)
            if not reading.closed:
                raise _Damaged("its end is missing")
        except _Unbounded as error:
            reason = f"{path.name} is not read to its end: {error}; {reading.count} messages before that are read."
        except (_Damaged, OSError) as error:
            reason = (
                f"{path.name} was not closed (the recorder was killed, or the file is truncated); "
                f"{reading.count} messages before the damage can be read."
            )
            if not reading.count:
                reason = f"{path.name} cannot be read ({error})."
    if reason:
        about.damage(reason)
    if reading.damaged:
        about.damage(f"{reading.damaged} records of {path.name} are damaged and left out.")


class _McapReading:
    """Turns the records of one MCAP file into messages."""

    def __init__(self, about: Findings) -> None:
        self._about = about
        self._schemas: dict[int, Schema] = {}
        self._channels: dict[int, Channel] = {}
        self.count = self.damaged = 0
        self.closed = False  # the footer was read

    def take(self, opcode: int, content: bytes, budget: _Budget, nested: bool = False) -> Iterator[Record]:
        """The messages of one record. Raises _Unbounded; a damaged record is counted, and reading goes on after it."""
        try:
            if opcode == Opcode.MESSAGE:
                record = self._message(content)
                if record is not None:
                    yield record
            elif opcode == Opcode.SCHEMA:
                schema = Schema.read(ReadDataStream(io.BytesIO(content)))
                self._schemas[schema.id] = schema
                if schema.encoding in _SCHEMAS and len(schema.data) <= _DEFINITION_LIMIT:
                    found = (_SCHEMAS[schema.encoding], schema.data.decode("utf-8", "replace"))
                    self._about.definitions.setdefault(schema.name, found)
            elif opcode == Opcode.CHANNEL:
                channel = Channel.read(ReadDataStream(io.BytesIO(content)))
                self._channels[channel.id] = channel
            elif opcode == Opcode.CHUNK and not nested:
                raw = _chunk(content, budget)
                for inner, part in _frames(io.BytesIO(raw), len(raw), budget):
                    yield from self.take(inner, part, budget, nested=True)
            elif opcode == Opcode.FOOTER and not nested:
                self.closed = True
        except _Unbounded:
            raise
        except Exception:  # a damaged record makes the libraries raise anything
            self.damaged += 1

    def _message(self, content: bytes) -> Record | None:
        channel_id, _, at, _ = _MESSAGE.unpack_from(content)
        channel = self._channels[channel_id]
        schema = self._schemas.get(channel.schema_id)
        if channel.message_encoding != "cdr" or schema is None or schema.encoding not in _SCHEMAS:
            form = channel.message_encoding if channel.message_encoding != "cdr" else "CDR without a ROS 2 type"
            self._about.foreign[channel.topic, form] += 1
            return None
        if at >= _LATEST:
            raise _Damaged("a time that no clock shows")
        self.count += 1
        return Record(channel.topic, schema.name, at, content[_MESSAGE.size :])


def _of_database(path: Path, about: Findings) -> Iterator[Record]:
    """The messages of a .db3 file, of any version of rosbag2's schema."""
    count = 0
    size = sum(file.stat().st_size for file in (path, path.with_name(path.name + "-wal")) if file.exists())
    steps = iter(range((_SPARE_STEPS + _STEPS * size) // 10_000))
    try:
        with contextlib.closing(_connected(path)) as base:
            base.set_progress_handler(lambda: next(steps, None) is None, 10_000)
            tables = _tables(base)
            if "message_definitions" in tables:
                _learn_definitions(base, about)
            closed = "metadata" not in tables or base.execute("SELECT 1 FROM metadata LIMIT 1").fetchone() is not None
            for record in _rows(base, size, about):
                count += 1
                yield record
        if not closed:
            about.damage(f"{path.name} was not closed; all {count} messages in it can be read.")
    except (sqlite3.Error, _Damaged) as error:
        reason = str(error) if next(steps, None) is not None else "it holds more than its size justifies"
        about.damage(f"{path.name} is damaged ({reason}); {count} messages before the damage can be read.")


def _connected(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing beside the file: it may lie on a medium that cannot be written."""
    with path.open("rb") as file:
        wal = file.read(20)[18:] == b"\x02\x02"
    alone = not path.with_name(path.name + "-wal").exists()
    journal = path.with_name(path.name + "-journal")
    options = "?immutable=1" if wal and alone else "?mode=ro" if alone and not journal.exists() else ""
    base = sqlite3.connect(path.resolve().as_uri() + options, uri=True)
    if sys.version_info >= (3, 11):
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _RECORD_LIMIT)
    return base


def _tables(base: sqlite3.Connection) -> set[str]:
    """The names of the tables. A bag has plain ones alone; a view or a virtual table can compute rows without end."""
    found = base.execute("SELECT type, name, rootpage FROM sqlite_master").fetchall()
    plain = {name for form, name, root in found if form == "table" and root}
    if not {"messages", "topics"} <= plain or any(form in ("view", "trigger") for form, _, _ in found):
        raise _Damaged("it does not have the tables of a bag")
    return plain


def _learn_definitions(base: sqlite3.Connection, about: Findings) -> None:
    for kind, form, text in base.execute(
        "SELECT topic_type, encoding, encoded_message_definition FROM message_definitions "
        "WHERE length(encoded_message_definition) <= ?",
        (_DEFINITION_LIMIT,),
    ):
        if isinstance(kind, str) and isinstance(text, str):
            about.definitions.setdefault(kind, ("idl" if form == "ros2idl" else "msg", text))


def _rows(base: sqlite3.Connection, size: int, about: Findings) -> Iterator[Record]:
    """The messages in order of time. Only their numbers are sorted, so that SQLite sorts no pictures."""
    topics = {
        number: (name, kind, form)
        for number, name, kind, form in base.execute("SELECT id, name, type, serialization_format FROM topics")
    }
    one = base.cursor()
    left = size
    for (number,) in base.execute("SELECT id FROM messages ORDER BY timestamp, id LIMIT ?", (size,)):
        query = "SELECT topic_id, timestamp, length(data), data FROM messages WHERE id = ? AND length(data) <= ?"
        topic, at, length, data = one.execute(query, (number, min(left, _RECORD_LIMIT))).fetchone() or (0, 0, 0, None)
        name, kind, form = topics.get(topic, ("", "", ""))
        if not (isinstance(data, bytes) and isinstance(at, int) and isinstance(name, str) and isinstance(kind, str)):
            raise _Damaged("a row is not a message, or is larger than the file")
        left -= length
        if form != "cdr":
            about.foreign[name, str(form)] += 1
            continue
        yield Record(name, kind, at, data)


def plain_name(path: Path) -> str:
    """A storage file's name without the compression of the whole file."""
    return path.name.removesuffix(PACKED)


def is_storage(path: Path) -> bool:
    """Whether a file's name is that of a storage file."""
    return Path(plain_name(path)).suffix in SUFFIXES


def first_sentence(error: Any) -> str:
    """An error's text on one line, cut to a readable length."""
    return " ".join(str(error).split())[:200]
