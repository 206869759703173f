"""The kept half of a store: every document's text in a file of its own, from which the index can be made again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dsd_ros.dragon.documents.chunking import Document, DocumentError, key_of


class StoreError(ValueError):
    """A store cannot do what it is asked: one sentence, with the remedy."""


class Texts:
    """A folder of files ``<digest of the source>-<revision>.json``; of a source, the highest revision counts.

    A file is there whole or not at all, whenever the writer or the power ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def revisions(self) -> dict[str, int]:
        """Digest of the source -> its highest revision."""
        found: dict[str, int] = {}
        for path in self._folder.glob("*-*.json"):
            source, _, revision = path.stem.rpartition("-")
            if revision.isdecimal():
                found[source] = max(int(revision), found.get(source, 0))
        return found

    def write(self, document: Document, revision: int) -> None:
        """Keep a document. OSError where the disk does not take it."""
        told = {
            "source": document.source,
            "place": document.place,
            "time": document.time,
            "digest": document.digest,
            "text": document.text,
        }
        path = self._path(key_of(document.source), revision)
        new = path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as stream:
            json.dump(told, stream, ensure_ascii=False, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
        sync_folder(self._folder)

    def read(self, source: str, revision: int) -> Document:
        """The document of the source with that digest. StoreError where its file is damaged or gone."""
        path = self._path(source, revision)
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            document = Document(told["source"], told["text"], told["place"], told["time"])
            if key_of(document.source) == source and document.digest == told["digest"]:
                return document
        except (OSError, DocumentError, ValueError, TypeError, KeyError, AttributeError):
            pass
        raise StoreError(
            f"the kept text {path} is damaged; delete that file and add its document again, or restore "
            "the file from a backup"
        )

    def drop(self, source: str, below: int | None = None) -> None:
        """Delete the revisions of a source, by its digest; those under ``below`` where that is given."""
        for path in self._folder.glob(f"{source}-*.json"):
            revision = path.stem.rpartition("-")[2]
            if below is None or (revision.isdecimal() and int(revision) < below):
                path.unlink(missing_ok=True)
        sync_folder(self._folder)

    def _path(self, source: str, revision: int) -> Path:
        return self._folder / f"{source}-{revision}.json"


def sync_folder(folder: Path) -> None:
    """Let a folder's changes outlast a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
