"""Read bags, including truncated or damaged ones, and repair them. Needs no ROS: the bag holds its message types."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from mcap.records import Channel, Message, Schema
from mcap.stream_reader import StreamReader
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.paths import user_path

_RECORD_LIMIT = 256 << 20  # bytes of one record; anything larger is a corrupted length
_SUFFIXES = (".mcap", ".db3")
_Note = Callable[[str], None]
_Definitions = dict[str, tuple[str, str]]  # type -> format ("msg" or "idl"), definition


class BagError(ValueError):
    """The bag cannot be read at all; one sentence."""


@dataclass(frozen=True)
class Record:
    """A message: ``at`` is its receive time (ns), ``data`` its CDR."""

    topic: str
    kind: str
    at: int
    data: bytes


@dataclass
class Bag:
    """An opened bag. ``notes`` describe its damage, one sentence each."""

    path: Path
    files: list[Path]
    custom: dict[str, str]
    definitions: _Definitions
    counts: dict[str, int]  # topic -> messages
    kinds: dict[str, str]  # topic -> type
    notes: list[str] = field(default_factory=list)
    namespace: str = ""  # of the robot's topics, with a leading slash; "" for none
    _store: Any = None

    def topic(self, name: str) -> str:
        """The full name of one of the robot's topics."""
        return name if name.startswith("/") else f"{self.namespace}/{name}"

    def messages(self, topics: Collection[str] | None = None) -> Iterator[Record]:
        """Messages of these topics (None: all) in the order in which they were written."""
        for path in self.files:
            for record in _records(path, lambda _: None, {}):
                if topics is None or record.topic in topics:
                    yield record

    def decode(self, record: Record) -> Any:
        """The message as an object with its fields as attributes.

        :raises BagError: when the bag does not define its type, or the bytes do not match it.
        """
        if self._store is None:
            self._store = get_typestore(Stores.EMPTY)
        if record.kind not in self._store.types:
            self._learn(record.kind)
        try:
            return self._store.deserialize_cdr(record.data, record.kind)
        except Exception as error:
            raise BagError(f"A message on {record.topic} does not match its type: {error}.") from None

    def _learn(self, kind: str) -> None:
        form, text = self.definitions.get(kind, ("", ""))
        if not text:
            raise BagError(f"The bag does not define {kind}; record it with its definitions.")
        try:
            found = get_types_from_idl(text) if form == "idl" else get_types_from_msg(text, kind)
            new = {name: what for name, what in found.items() if name not in self._store.types}
            self._store.register(new)
        except Exception as error:
            raise BagError(f"The bag's definition of {kind} cannot be read: {error}.") from None


def open_bag(path: Path | str) -> Bag:
    """Open and index a bag: a folder, or a single file.

    :raises BagError: when nothing in it can be read.
    """
    path = user_path(path)
    files, about = _files_of(path)
    custom = {str(k): str(v) for k, v in (about.get("custom_data") or {}).items()}
    bag = Bag(path, [], custom, {}, {}, {})
    for file in files:
        notes = len(bag.notes)
        found = Counter((record.topic, record.kind) for record in _records(file, bag.notes.append, bag.definitions))
        if found:
            bag.files.append(file)
        elif len(bag.notes) == notes:
            bag.notes.append(f"{file.name} holds no message.")
        for (topic, kind), count in found.items():
            bag.counts[topic] = bag.counts.get(topic, 0) + count
            bag.kinds[topic] = kind
    if not bag.files:
        raise BagError(f"{path} holds nothing that can be read: {' '.join(bag.notes)}")
    for name in ("/reply_progress", "/observation", "/decode_stats", "/odom"):
        owners = [topic for topic in bag.counts if topic.endswith(name)]
        if owners:
            bag.namespace = owners[0].removesuffix(name)
            break
    return bag


def _files_of(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """A bag's storage files in order, and the content of its metadata.yaml."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise BagError(f"{path} is not a bag; name a folder, or a file {' or '.join(_SUFFIXES)}.")
        return [path], {}
    if not path.is_dir():
        raise BagError(f"There is no bag {path}.")
    about: dict[str, Any] = {}
    try:
        text = (path / "metadata.yaml").read_text(encoding="utf-8")
        about = yaml.safe_load(text)["rosbag2_bagfile_information"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        pass  # the storage files repeat most of it
    if not isinstance(about, dict):
        about = {}
    listed = [path / Path(str(name)).name for name in about.get("relative_file_paths") or []]
    # Files started after metadata.yaml was written, ordered by number.
    found = sorted((p for p in path.iterdir() if p.suffix in _SUFFIXES), key=lambda p: (len(p.name), p.name))
    files = [p for p in listed if p.is_file()] + [p for p in found if p not in listed]
    if not files:
        raise BagError(f"{path} is not a bag: it contains no file {' or '.join(_SUFFIXES)} in it.")
    return files, about


def _records(path: Path, note: _Note, definitions: _Definitions) -> Iterator[Record]:
    """A file's messages; adds its types to ``definitions``, and calls ``note`` with a sentence if it is incomplete."""
    read = _of_database if path.suffix == ".db3" else _of_mcap
    return read(path, note, definitions)


def _of_mcap(path: Path, note: _Note, definitions: _Definitions) -> Iterator[Record]:
    """The messages of an .mcap file from its beginning, without its index: a killed recorder leaves none."""
    schemas: dict[int, Schema] = {}
    channels: dict[int, Channel] = {}
    count = 0
    with path.open("rb") as file:
        records = StreamReader(file, record_size_limit=_RECORD_LIMIT).records
        while True:
            try:
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # a damaged file makes the library raise anything
                reason = str(error) or "its end is missing"
                break
            if isinstance(record, Schema):
                schemas[record.id] = record
                form = "idl" if record.encoding == "ros2idl" else "msg"
                definitions.setdefault(record.name, (form, record.data.decode("utf-8", "replace")))
            elif isinstance(record, Channel):
                channels[record.id] = record
            elif isinstance(record, Message) and record.channel_id in channels:
                channel = channels[record.channel_id]
                schema = schemas.get(channel.schema_id)
                count += 1
                yield Record(channel.topic, "" if schema is None else schema.name, record.log_time, record.data)
    if count:
        note(
            f"{path.name} was not closed (the recorder was killed, or the file is truncated); "
            f"{count} messages before the damage can be read."
        )
    else:
        note(f"{path.name} cannot be read ({reason}).")


def _of_database(path: Path, note: _Note, definitions: _Definitions) -> Iterator[Record]:
    journal = path.with_name(path.name + "-journal")
    count = 0
    with tempfile.TemporaryDirectory(prefix="dsd_bag_") as folder:
        if journal.exists():  # killed in mid-write: let SQLite roll back in a copy
            for file in (path, journal):
                shutil.copy(file, folder)
            path = Path(folder) / path.name
        try:
            base = sqlite3.connect(path.resolve().as_uri() + ("" if journal.exists() else "?mode=ro"), uri=True)
            with base:
                for kind, form, text in base.execute(
                    "SELECT topic_type, encoding, encoded_message_definition FROM message_definitions"
                ):
                    definitions.setdefault(kind, ("idl" if form == "ros2idl" else "msg", text))
                closed = base.execute("SELECT count(*) FROM metadata").fetchone()[0] > 0
                for row in base.execute(
                    "SELECT topics.name, topics.type, timestamp, data FROM messages "
                    "JOIN topics ON topics.id = topic_id ORDER BY timestamp, messages.id"
                ):
                    count += 1
                    yield Record(*row)
            if not closed:
                note(f"{path.name} was not closed; all {count} messages in it can be read.")
        except sqlite3.Error as error:
            note(f"{path.name} is damaged ({error}); {count} messages before the damage can be read.")


def repair(bag: Bag, folder: Path, storage: str = "mcap") -> int:
    """Copy the readable messages of a damaged bag into a new one; returns their number.

    :raises ValueError: when the folder exists or cannot be written.
    """

    def define(kind: str) -> tuple[str, str]:
        text = bag.definitions[kind][1]
        store = get_typestore(Stores.EMPTY)
        store.register(get_types_from_msg(text, kind))
        return text, store.hash_rihs01(kind)

    writer = BagWriter(folder, define, storage)
    for key, text in bag.custom.items():
        writer.set_metadata(key, text)
    saved = 0
    for record in bag.messages():
        if record.at - saved > 1_000_000_000:  # one chunk per second, like the recorder
            writer.save()
            saved = record.at
        writer.write(record.topic, record.kind, (), record.at, record.data)
    writer.close()
    return writer.messages
