# SPDX-License-Identifier: Apache-2.0
"""Open bags, including truncated or damaged ones, and repair them. Needs no ROS: a bag holds its message types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rosbags.interfaces import Nodetype
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.storage import (
    SUFFIXES,
    BagError,
    Findings,
    Record,
    first_sentence,
    is_storage,
    message_bytes,
    plain_name,
    read_file,
)
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.paths import user_path

_METADATA_LIMIT = 4 << 20  # bytes of metadata.yaml
_METADATA_DEPTH = 50
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NUMBERED = re.compile(r"(.*)_(\d{1,9})(\.\w+)")
# Topics that a robot has, the surest first.
_MARKS = [re.compile(rf"(.*)/{name}") for name in ("dsd/reply_progress", "dsd/observation", "dsd/decode_stats", "odom")]
_SHOWN = 5  # names that a note lists
_ARRAY_LIMIT = 1 << 20  # elements of an array of fixed length, and of all that it contains


@dataclass(kw_only=True)
class Bag(Findings):
    """An opened bag."""

    path: Path
    files: list[Path] = field(default_factory=list)
    custom: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # topic -> messages
    kinds: dict[str, str] = field(default_factory=dict)  # topic -> type
    namespace: str = ""  # of the robot's topics, with a leading slash; "" for none
    _store: Any = None

    def topic(self, name: str) -> str:
        """The full name of one of the robot's topics."""
        return name if name.startswith("/") else f"{self.namespace}/{name}"

    def messages(self, topics: Collection[str] | None = None) -> Iterator[Record]:
        """Messages of these topics (None: all) in the order in which they were written."""
        for path in self.files:
            for record in read_file(path, Findings()):
                if topics is not None and record.topic not in topics:
                    continue
                try:
                    data = message_bytes(record.data)
                except Exception as error:  # the libraries raise anything
                    self.damage(f"Messages on {record.topic} cannot be decompressed ({first_sentence(error)}).")
                    continue
                yield record if data is record.data else Record(record.topic, record.kind, record.at, data)

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

    def _learn(self, kind: str) -> None:
        form, text = self.definitions.get(kind) or self._installed(kind)
        try:
            found = get_types_from_idl(text) if form == "idl" else get_types_from_msg(text, kind)
            new = {name: what for name, what in found.items() if name not in self._store.types}
            for name in new:
                _elements(name, {**self._store.fielddefs, **new})
            self._store.register(new)
        except Exception as error:
            raise BagError(f"The bag's definition of {kind} cannot be read: {first_sentence(error)}.") from None

    def _installed(self, kind: str) -> tuple[str, str]:
        """The definition of a type that the bag does not define: SQLite bags of Humble and before define none."""
        from dsd_ros.observe.ros.message_types import TypeUnknown, definition

        store = get_typestore(Stores.ROS2_HUMBLE)
        try:
            text = store.generate_msgdef(kind)[0] if kind in store.types else definition(kind)[0]
        except TypeUnknown as error:
            raise BagError(f"The bag does not define {kind}; record it with its definitions. {error}") from None
        self.note("The bag does not define all its message types; this installation's are used.")
        self.definitions[kind] = "msg", text
        return self.definitions[kind]


def _elements(kind: str, types: Any, outer: tuple[str, ...] = ()) -> int:
    """How many elements a message has at least.

    :raises ValueError: when a few bytes could take endless loops to read.
    """
    if kind in outer or kind not in types:
        raise ValueError(f"{kind} contains itself, or is not defined")
    total = 1
    for _, (form, about) in types[kind][1]:
        (inner, name), length = about if form in (Nodetype.ARRAY, Nodetype.SEQUENCE) else ((form, about), 1)
        count = _elements(name, types, (*outer, kind)) if inner == Nodetype.NAME else 1
        total += count * (length if form == Nodetype.ARRAY else 1)
        if total > _ARRAY_LIMIT or (form == Nodetype.ARRAY and not length):
            raise ValueError(f"{kind} has an array of no elements, or more than {_ARRAY_LIMIT} of fixed length")
    return total


def open_bag(path: Path | str, namespace: str | None = None) -> Bag:
    """Open and index a bag: a folder, or a single file.

    :param namespace: of the robot, in a bag of several; None takes the first and names the others in a note.
    :raises BagError: when nothing in it can be read, or there is no such robot.
    """
    path = user_path(path)
    bag = Bag(path=path)
    files, counted = _files_of(path, bag)
    for file in files:
        noted = len(bag.notes)
        found = Counter((record.topic, record.kind) for record in read_file(file, bag))
        if found:
            bag.files.append(file)
        elif len(bag.notes) == noted:
            bag.note(f"{file.name} holds no message.")
        for (topic, kind), count in found.items():
            bag.counts[topic] = bag.counts.get(topic, 0) + count
            bag.kinds[topic] = kind
    if bag.foreign:
        names = _listed(
            [f"{n} on {topic} ({form or 'no encoding'})" for (topic, form), n in sorted(bag.foreign.items())]
        )
        bag.note(f"Messages that are not CDR of ROS 2 types are left out: {names}.")
    there = sum(bag.counts.values()) + bag.foreign.total()
    if counted > there:
        bag.damage(f"metadata.yaml counts {counted} messages, and {there} can be read.")
    if not bag.files:
        raise BagError(f"{path} holds nothing that can be read: {' '.join(bag.notes)}")
    _choose_robot(bag, namespace)
    return bag


def _choose_robot(bag: Bag, wanted: str | None) -> None:
    owners = [found[1] for mark in _MARKS for topic in bag.counts if (found := mark.fullmatch(topic))]
    robots = list(dict.fromkeys(owners))
    if wanted is not None:
        bag.namespace = "/" + wanted.strip("/") if wanted.strip("/") else ""
        if bag.namespace not in robots:
            raise BagError(f"{bag.path} holds no robot {wanted!r}; it holds {_listed(_shown(robots)) or 'none'}.")
    elif robots:
        bag.namespace = robots[0]
    others = [robot for robot in robots if robot != bag.namespace]
    if others:
        bag.note(
            f"Other robots of this bag are left out: {_listed(_shown(others))}; "
            f"this is {bag.namespace or '/'}, and --namespace chooses another."
        )


def _shown(robots: Iterable[str]) -> list[str]:
    return [robot or "/" for robot in robots]


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _files_of(path: Path, bag: Bag) -> tuple[list[Path], int]:
    """A bag's storage files in order, and the number of messages that its metadata counts."""
    if path.is_file():
        if not is_storage(path):
            raise BagError(f"{path} is not a bag; name a folder, or a file {' or '.join(SUFFIXES)}.")
        return [path], 0
    if not path.is_dir():
        raise BagError(f"There is no bag {path}; name the folder that `dsd record` or `record:=` wrote.")
    # By name and number; where a file is there packed and unpacked, the unpacked one.
    there = sorted((file for file in path.iterdir() if is_storage(file) and file.is_file()), key=lambda file: file.name)
    found = {plain_name(file): file for file in reversed(there)}
    names = sorted(found, key=lambda name: (len(name), name))
    if not names:
        raise BagError(f"{path} is not a bag: it contains no file {' or '.join(SUFFIXES)} in it.")
    about = _metadata(path, bag)
    if isinstance(custom := about.get("custom_data"), dict):
        bag.custom = {str(k): str(v) for k, v in custom.items() if isinstance(v, (str, int))}
    paths = about.get("relative_file_paths")
    listed = [plain_name(Path(name)) for name in paths if isinstance(name, str)] if isinstance(paths, list) else []
    listed = list(dict.fromkeys(name for name in listed if name))
    missing = [name for name in listed or _gaps(names) if name not in found]
    if missing:
        bag.damage(f"Files of the bag are missing, with all messages in them: {_listed(missing)}.")
    # Files begun after metadata.yaml was written belong to it; a converted copy beside it does not.
    series = {_series(name) for name in listed}
    later = [name for name in names if name not in listed and (not listed or _series(name) in series)]
    stray = [name for name in names if name not in listed and name not in later]
    if stray and len(stray) < len(names):
        bag.note(f"Files that metadata.yaml does not list are left out: {_listed(stray)}.")
    elif stray:
        later = stray
    counted = about.get("message_count")
    return (
        [found[name] for name in (*(name for name in listed if name in found), *later)],
        counted if isinstance(counted, int) else 0,
    )


def _series(name: str) -> tuple[str, str]:
    """What the names of a recording's files have in common."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], found[3]) if found else (name, "")


def _gaps(names: list[str]) -> list[str]:
    """The names that are missing in the count of a recording's files, which begins at 0."""
    missing = []
    for series in sorted({_series(name) for name in names}):
        numbers = {int(found[2]) for name in names if (found := _NUMBERED.fullmatch(name)) and _series(name) == series}
        last = max(numbers, default=-1)
        if last < 10 * len(names) + 10:  # else the number is a date
            missing += [f"{series[0]}_{number}{series[1]}" for number in range(last) if number not in numbers]
    return missing


def _metadata(folder: Path, bag: Bag) -> dict[str, Any]:
    """The content of metadata.yaml; empty when it is missing or cannot be read."""
    path = folder / "metadata.yaml"
    if not path.exists():
        bag.note("There is no metadata.yaml: the recorded parameters are unknown, and so is whether files are missing.")
        return {}
    try:
        if not path.is_file() or path.stat().st_size > _METADATA_LIMIT:
            raise ValueError(f"it is no file of at most {_METADATA_LIMIT} bytes")
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=_YAML):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _METADATA_DEPTH:
                raise ValueError("it has aliases or deep nesting, which no recorder writes")
        about = _YAML(text).get_single_data()["rosbag2_bagfile_information"]
        if not isinstance(about, dict):
            raise ValueError("it describes no bag")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError) as error:
        bag.damage(f"metadata.yaml cannot be read ({first_sentence(error)}); whether files are missing is unknown.")
        return {}
    return about


def repair(bag: Bag, folder: Path, storage: str = "mcap") -> int:
    """Copy the readable messages of a damaged bag into a new one; returns their number.

    :raises ValueError: when the folder exists or cannot be written.
    """

    def define(kind: str) -> tuple[str, str]:
        form, text = bag.definitions.get(kind, ("", ""))
        try:
            store = get_typestore(Stores.EMPTY)
            store.register(get_types_from_idl(text) if form == "idl" else get_types_from_msg(text, kind))
            return (store.generate_msgdef(kind)[0] if form == "idl" else text), store.hash_rihs01(kind)
        except Exception:  # a definition that only other programs read: its messages are kept all the same
            return ("" if form == "idl" else text), ""

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
