"""A side's documents opened from where they are: text files, or a store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dsd_ros.dragon.documents.chunking import DocumentError, files_in, read_document
from dsd_ros.dragon.documents.store import Store

if TYPE_CHECKING:
    from dsd_ros.dragon.documents.embedding import Encoder


class TemporaryStore(Store):
    """A store of text files that is gone once it is closed; without files an empty one."""

    def __init__(self, encoder: Encoder, files: Iterable[Path] = ()) -> None:
        """DocumentError for a file that cannot be used."""
        documents = [read_document(path) for path in files]
        self._folder = tempfile.TemporaryDirectory(prefix="dsd-documents-")
        try:
            super().__init__(Path(self._folder.name), encoder)
            for document in documents:
                self.add(document)
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def open_documents(folder: Path | None, encoder: Encoder | None = None) -> Store:
    """A folder of text files, or one that `dsd documents` made; None: no documents. The store is the caller's to close.

    What is in text files is indexed in a temporary store. DocumentError, StoreError or EmbeddingError for what
    cannot be used.
    """
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    files = []
    if folder is not None:
        if not folder.is_dir():
            raise DocumentError(f"there is no folder of documents {folder}; check its name")
        if not is_store(folder):
            files = files_in([folder])
    encoder = encoder or SentenceEncoder()
    if folder is not None and is_store(folder):
        return Store(folder, encoder)
    return TemporaryStore(encoder, files)


def measured_in(folder: Path | None) -> Path | None:
    """Where what was measured of a model is kept: beside a store's documents; text files have nothing put beside."""
    return folder if folder is not None and is_store(folder) else None


def is_store(folder: Path) -> bool:
    """Whether `dsd documents` made it."""
    return (folder / "texts").is_dir()
