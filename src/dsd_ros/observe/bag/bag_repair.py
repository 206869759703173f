"""Writes what can be read of a damaged bag as a whole one, which any program opens."""

from __future__ import annotations

from pathlib import Path

from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from dsd_ros.observe.bag.reader import Bag
from dsd_ros.observe.bag.writer import BagWriter


def repair(bag: Bag, folder: Path, storage: str = "mcap") -> int:
    """Copy the readable messages into a new bag; how many there were.

    :raises ValueError: when the folder is there already, or cannot be written.
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
        if record.at - saved > 1_000_000_000:  # in chunks as a recorder makes them
            writer.save()
            saved = record.at
        writer.write(record.topic, record.kind, (), record.at, record.data)
    writer.close()
    return writer.messages
