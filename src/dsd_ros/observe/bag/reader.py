# SPDX-License-Identifier: Apache-2.0
"""Open bags with `rosbags`; MCAP files, whole or not, are read with `mcap`, in the order in which they were written.

Needs no ROS: a bag holds its message types.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcap.records import Channel, Message, Schema
from mcap.stream_reader import StreamReader
from rosbags.interfaces import MessageDefinition, MessageDefinitionFormat
from rosbags.rosbag2 import Reader
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.writer import UNTIL_CLOSED
from dsd_ros.paths import user_path

SUFFIXES = (".mcap", ".db3")
_FORMATS = {"ros2msg": MessageDefinitionFormat.MSG, "ros2idl": MessageDefinitionFormat.IDL}
_PICTURES = ("sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage")
# From one message to the next, in the order of writing; beyond, the clock was set: a robot is not silent for that long.
_BACK_NS, _AHEAD_NS = 1_000_000_000, 600_000_000_000
# Topics that a robot has, the surest first.
_MARKS = [re.compile(rf"(.*)/{name}") for name in ("dsd/reply_progress", "dsd/observation", "dsd/decode_stats", "odom")]


class BagError(ValueError):
    """The bag cannot be read at all; one sentence."""


@dataclass(frozen=True)
class Record:
    """A message: ``at`` is its receive time (ns; see `Bag.messages`), ``data`` its CDR."""

    topic: str
    kind: str
    at: int
    data: bytes


@dataclass
class Bag:
    """An opened bag. ``notes`` are sentences about what is missing or left out."""

    path: Path
    custom: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # topic -> messages
    kinds: dict[str, str] = field(default_factory=dict)  # topic -> type
    definitions: dict[str, MessageDefinition] = field(default_factory=dict)
    namespace: str = ""  # of the robot's topics, with a leading slash; "" for none
    notes: list[str] = field(default_factory=list)
    whole: bool = True  # nothing of the recording is missing or damaged
    files: list[Path] = field(default_factory=list)  # read one by one, each from its beginning; empty: by their index
    _store: Any = None

    def note(self, sentence: str) -> None:
        """Add a sentence, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def damage(self, sentence: str) -> None:
        """Add a sentence about something missing: the bag is not whole."""
        self.whole = False
        self.note(sentence)

    def topic(self, name: str) -> str:
        """The full name of one of the robot's topics."""
        return name if name.startswith("/") else f"{self.namespace}/{name}"

    def messages(self, topics: Collection[str] | None = None) -> Iterator[Record]:
        """Messages of these topics (None: all), in the order of writing; of SQLite in order of time.

        ``at`` goes on steadily where the recorder's clock was set, which is a note.
        """
        shift, first, last = 0, None, 0
        for record in self._recorded():
            at = record.at + shift
            if first is None:
                first = last = at
            if record.kind in _PICTURES:  # may be written long after they came, once a reply names them
                at = at if first <= at <= last + _AHEAD_NS else last
            elif -_BACK_NS <= at - last <= _AHEAD_NS:
                last = at
            else:
                jump = f"{'back' if at < last else 'ahead'} by {abs(at - last) * 1e-9:.1f} s"
                self.note(
                    f"The recorder's clock jumped {jump} after {(last - first) * 1e-9:.1f} s; times leave that out."
                )
                shift, at = shift + last - at, last
            if topics is None or record.topic in topics:
                yield replace(record, at=at)

    def _recorded(self) -> Iterator[Record]:
        """Every message as it was recorded."""
        for path in self.files or [self.path]:
            try:
                yield from self._stream(path) if path.suffix == ".mcap" and self.files else self._indexed(path)
            except Exception as error:  # the libraries raise anything
                self.damage(f"{path} cannot be read to its end ({first_sentence(error)}).")

    def decode(self, record: Record) -> Any:
        """The message as an object with its fields as attributes.

        :raises BagError: when its type is unknown, or the bytes do not match it.
        """
        if self._store is None:
            self._store = get_typestore(Stores.EMPTY)
        if record.kind not in self._store.types:
            self._learn(record.kind)
        try:
            return self._store.deserialize_cdr(record.data, record.kind)
        except Exception as error:
            raise BagError(f"A message on {record.topic} does not match its type: {first_sentence(error)}.") from None

    def _indexed(self, path: Path) -> Iterator[Record]:
        with Reader(path) as reader:
            self.definitions |= {one.msgtype: one.msgdef for one in reader.connections if one.msgdef.data}
            for connection, at, data in reader.messages():
                yield Record(connection.topic, connection.msgtype, at, data)

    def _stream(self, path: Path) -> Iterator[Record]:
        """The messages of a file, without its index: a killed recorder leaves none, and it orders by time."""
        schemas: dict[int, Schema] = {}
        channels: dict[int, Channel] = {}
        with path.open("rb") as file:
            for record in StreamReader(file, record_size_limit=path.stat().st_size).records:
                if isinstance(record, Schema) and record.encoding in _FORMATS:
                    schemas[record.id] = record
                    text = record.data.decode("utf-8", "replace")
                    self.definitions[record.name] = MessageDefinition(_FORMATS[record.encoding], text)
                elif isinstance(record, Channel) and record.message_encoding == "cdr" and record.schema_id in schemas:
                    channels[record.id] = record
                elif isinstance(record, Message) and record.channel_id in channels:
                    channel = channels[record.channel_id]
                    yield Record(channel.topic, schemas[channel.schema_id].name, record.log_time, record.data)

    def _learn(self, kind: str) -> None:
        about = self.definitions.get(kind) or self._installed(kind)
        try:
            if about.format == MessageDefinitionFormat.IDL:
                found = get_types_from_idl(about.data)
            else:
                found = get_types_from_msg(about.data, kind)
            self._store.register({name: what for name, what in found.items() if name not in self._store.types})
        except Exception as error:
            raise BagError(f"The bag's definition of {kind} cannot be read: {first_sentence(error)}.") from None

    def _installed(self, kind: str) -> MessageDefinition:
        """The definition of a type that the bag does not define: SQLite bags of Humble define none."""
        from dsd_ros.observe.ros.message_types import TypeUnknown, definition

        store = get_typestore(Stores.ROS2_HUMBLE)
        try:
            text = store.generate_msgdef(kind, ros_version=2)[0] if kind in store.types else definition(kind)[0]
        except TypeUnknown as error:
            raise BagError(f"The bag does not define {kind}; record it with its definitions. {error}") from None
        self.note("The bag does not define all its message types; this installation's are used.")
        return MessageDefinition(MessageDefinitionFormat.MSG, text)


def open_bag(path: Path | str, namespace: str | None = None) -> Bag:
    """Open a bag: a folder, or a single file.

    :param namespace: of the robot, in a bag of several; None takes the first and names the others in a note.
    :raises BagError: when nothing in it can be read, or there is no such robot.
    """
    bag = Bag(user_path(path))
    path = bag.path
    if not path.is_dir() and not path.is_file():
        raise BagError(f"There is no bag {path}; name the folder that `dsd record` or `record:=` wrote.")
    files = [path] if path.is_file() else sorted(path.iterdir(), key=lambda file: (len(file.name), file.name))
    files = [file for file in files if file.suffix in SUFFIXES and file.is_file()]
    if not files and not (path / "metadata.yaml").exists():
        raise BagError(f"{path} is not a bag; name a folder with files {' or '.join(SUFFIXES)}, or such a file.")
    with contextlib.suppress(OSError, ValueError):
        bag.custom = json.loads((path / UNTIL_CLOSED).read_text(encoding="utf-8"))
    try:
        with Reader(path) as reader:
            for connection in reader.connections:
                if connection.msgcount:
                    bag.kinds[connection.topic] = connection.msgtype
                    bag.counts[connection.topic] = bag.counts.get(connection.topic, 0) + connection.msgcount
            metadata: Any = reader.storage
            bag.custom |= metadata.metadata.custom or {}
            if metadata.metadata.compression_mode not in ("file", "message"):
                bag.files = [Path(one.path) for one in getattr(metadata, "storages", [metadata])]
                bag.files = bag.files if all(one.suffix == ".mcap" for one in bag.files) else []
    except Exception as error:  # the libraries raise anything
        unfinished = path.is_dir() and not (path / "metadata.yaml").exists()
        reason = "there is no metadata.yaml" if unfinished else first_sentence(error)
        bag.damage(f"{path} was not closed, or is damaged ({reason}); what can be read of its files is.")
        bag.files = files
        for record in bag.messages():
            bag.kinds[record.topic] = record.kind
            bag.counts[record.topic] = bag.counts.get(record.topic, 0) + 1
    if not bag.counts:
        raise BagError(f"{path} holds no message that can be read. {' '.join(bag.notes)}".rstrip())
    _choose_robot(bag, namespace)
    return bag


def _choose_robot(bag: Bag, wanted: str | None) -> None:
    owners = [found[1] for mark in _MARKS for topic in bag.counts if (found := mark.fullmatch(topic))]
    robots = list(dict.fromkeys(owners))
    names = {robot: robot or "/" for robot in robots}
    if wanted is not None:
        bag.namespace = "/" + wanted.strip("/") if wanted.strip("/") else ""
        if bag.namespace not in robots:
            raise BagError(f"{bag.path} holds no robot {wanted!r}; it holds {', '.join(names.values()) or 'none'}.")
    elif robots:
        bag.namespace = robots[0]
    others = [name for robot, name in names.items() if robot != bag.namespace]
    if others:
        bag.note(
            f"Other robots of this bag are left out: {', '.join(others)}; "
            f"this is {bag.namespace or '/'}, and --namespace chooses another."
        )


def first_sentence(error: Any) -> str:
    """An error's text on one line, cut to a readable length."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
