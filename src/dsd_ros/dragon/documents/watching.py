# SPDX-License-Identifier: Apache-2.0
"""A folder whose documents are kept in a store: what is added, changed or deleted there follows in the store.

The folder is looked through every few seconds, which works on every file system, network shares included. A file that
cannot be used is named once, and again when it has changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dsd_ros.dragon.documents.chunking import DocumentError, files_below, read_document
from dsd_ros.dragon.documents.store import Progress, Store

_Stamp = tuple[int, int, int]  # inode, size, time of change in ns


class Change(NamedTuple):
    """What became of a file: "added", "unchanged", "removed", or "refused" with the reason."""

    kind: str
    path: Path
    reason: str = ""


class FolderWatch:
    """Keeps a store in step with a folder; one thread at a time."""

    def __init__(self, store: Store, folder: Path, place: str = "", about: str = "", settled_s: float = 1.0) -> None:
        """``place`` and ``about`` (a time): of documents that do not say. DocumentError if there is no such folder.

        ``settled_s``: a file that changed within this time may still be being written, and waits for another ``sync``.
        """
        if not folder.is_dir():
            raise DocumentError(f"there is no folder {folder} to watch; check its name")
        self._store, self._folder, self._place, self._about = store, folder.absolute(), place, about
        self._settled_s = settled_s
        self._seen: dict[Path, _Stamp] = {}

    def sync(self, progress: Progress | None = None) -> list[Change]:
        """Take over what has changed since the last call; everything, at the first one."""
        changes: list[Change] = []
        found = {path: stamp for path in files_below(self._folder)[0] if (stamp := _stamp(path)) is not None}
        latest = time.time() - self._settled_s if self._settled_s else math.inf
        settled = {path: stamp for path, stamp in found.items() if stamp[2] / 1e9 <= latest}
        new = [path for path, stamp in settled.items() if self._seen.get(path) != stamp]
        for done, path in enumerate(new):

            def report(share: float, line: str, done: int = done) -> None:
                if progress is not None:
                    progress((done + share) / len(new), line)

            changes.append(self._take(path, report))
            self._seen[path] = settled[path]
            report(1.0, str(path))
        for listed in self._store.documents():
            path = Path(listed.source)
            if path.is_relative_to(self._folder) and path not in found and not path.exists():
                self._store.remove(listed.source)
                changes.append(Change("removed", path))
        self._seen = {path: stamp for path, stamp in self._seen.items() if path in found}
        return changes

    def _take(self, path: Path, report: Callable[[float, str], None]) -> Change:
        """Add one file. What is refused leaves the store as it is, an earlier version included."""
        try:
            document = read_document(path, self._place, self._about)
            return Change("added" if self._store.add(document, report) else "unchanged", path)
        except DocumentError as error:
            return Change("refused", path, str(error))


def _stamp(path: Path) -> _Stamp | None:
    """What changes when a file does; None if it is gone."""
    try:
        about = path.stat()
    except OSError:
        return None
    return about.st_ino, about.st_size, about.st_mtime_ns
