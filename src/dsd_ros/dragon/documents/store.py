# SPDX-License-Identifier: Apache-2.0
"""A store of documents: what one side knows, searched for what fits a question.

A folder holds ``texts/``, every document as it was given, and ``index-<n>.db``, made from them (see ``index``). A
document is first kept, then indexed. Opening a store finishes what a killed writer began, and rebuilds an index that
is damaged, missing or of another embedding model. One process writes at a time; any number read meanwhile.

Cosine similarity of embeddings and BM25 choose which chunks are found. A chunk's relevance R(d, x) is its cosine over
``TEMPERATURE``. The two sides' relevances meet in eta, so they must mean the same on both: the cosine does, for one
embedding model, while BM25 and fused ranks depend on what else a store holds.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import numpy as np

from dsd_ros.dragon.documents.chunking import (
    CHUNK_TOKENS,
    OVERLAP_TOKENS,
    Chunk,
    Document,
    DocumentError,
    chunks,
    files_in,
    key_of,
    read_documents,
)
from dsd_ros.dragon.documents.index import FORMAT, TEMPERATURE, Hit, Index, IndexDamaged, Listed
from dsd_ros.dragon.documents.retrieval import Retrieved

if TYPE_CHECKING:
    from typing_extensions import Self

    from dsd_ros.dragon.documents.embedding import Encoder

_TOGETHER = 128  # chunks embedded at a time
_ASKED = 8192  # characters of a query

Progress = Callable[[float, str], None]  # the share done, 0 to 1, and what was done

_log = logging.getLogger(__name__)


class StoreError(ValueError):
    """A store cannot do what it is asked: one sentence, with the remedy."""


class Store:
    """Documents in a folder; a ``retrieval.Retriever``. Threads may share one."""

    def __init__(self, directory: Path, encoder: Encoder, progress: Progress | None = None) -> None:
        """Open the store in ``directory``, which is created if it is missing.

        ``progress`` is called while an index is rebuilt. StoreError if the folder cannot be used, or if a text that
        is not indexed is damaged.
        """
        self._directory, self._encoder, self._texts = directory, encoder, directory / "texts"
        self._facts = {
            "format": str(FORMAT),
            "embedding model": encoder.fingerprint,
            "length of chunks": f"{CHUNK_TOKENS} tokens, {OVERLAP_TOKENS} of them again",
        }
        with self._errors_as_sentences():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private
            self._texts.mkdir(exist_ok=True)
            self._open(progress)

    def close(self) -> None:
        """Nothing stays open between calls; a temporary store deletes its folder."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def relevance(self, text: str, documents: Sequence[Retrieved]) -> list[float]:
        """R(d, x) of any store's documents for another text, such as a question and its answer so far."""
        vectors = self._encoder.encode([text[:_ASKED], *(found.text for found in documents)])
        return [float(cosine) / TEMPERATURE for cosine in vectors[1:] @ vectors[0]]

    @property
    def fingerprint(self) -> str:
        """Equal for two stores that weigh documents on the same scale."""
        return key_of(f"{self._encoder.fingerprint} {TEMPERATURE!r}")

    # ------------------------------------------------------------------ reading

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        """Up to ``count`` chunks for ``query``, best first."""
        return [Retrieved(hit.key, hit.text, hit.relevance, hit.name) for hit in self.search(query, count)]

    def search(self, query: str, count: int) -> list[Hit]:
        """``retrieve``, with the documents that hold each chunk."""
        if not query.strip():
            raise ValueError("the query is empty; say what to look for")
        if count < 1:
            raise ValueError(f"{count} documents cannot be found; ask for 1 or more")
        query = query[:_ASKED]
        vector = self._encoder.encode([query])[0]
        with self._index() as index:
            hits = index.search(query, vector, count)
        return sorted(hits, key=lambda hit: -hit.cosine)

    def documents(self) -> list[Listed]:
        """Every document, by source."""
        with self._index() as index:
            return index.documents()

    def read(self, source: str) -> Document | None:
        """The document of that source as it was given; None if there is none."""
        path = self._text_of(source)
        with self._errors_as_sentences():
            return _read_text(path) if path.exists() else None

    def __len__(self) -> int:
        """The number of chunks."""
        with self._index() as index:
            return index.size()

    # ------------------------------------------------------------------ writing

    def add(self, document: Document, progress: Progress | None = None) -> bool:
        """Keep and index a document, replacing the one of the same source; False if it is there already.

        DocumentError if it holds no sentence; StoreError if it cannot be written.
        """
        if next(self._cut(document), None) is None:
            raise DocumentError(f"{document.source} holds no sentence; write one below its headings")
        with self._writing(), self._index() as index:
            if index.digest_of(document.source) == document.digest:
                return False
            _write_text(self._text_of(document.source), document)
            index.replace(document, self._embedded(index, document, progress))
        return True

    def remove(self, source: str) -> bool:
        """Remove a document and the chunks that only it holds; False if there is none of that source."""
        with self._writing(), self._index() as index:
            if index.digest_of(source) is None:
                return False
            index.remove(source)
            self._text_of(source).unlink(missing_ok=True)
            _sync_folder(self._texts)
        return True

    def rebuild(self, progress: Progress | None = None) -> None:
        """Rebuild the index from the kept texts; StoreError if one of these is damaged or gone."""
        with self._writing():
            with suppress(IndexDamaged, apsw.Error), closing(self._connect()) as index:
                index.check(self._facts)
                for source in self._without_text(index):
                    raise StoreError(
                        f"the kept text of {source} is gone; add that document again or remove it, then rebuild"
                    )
            self._make(progress)

    # ------------------------------------------------------------------ keeping texts and index in step

    def _open(self, progress: Progress | None) -> None:
        """Check the index, rebuild it if it is missing or damaged, and index what was kept but not indexed."""
        with self._writing(wait=False) as alone:
            if not alone and self._sound(alone=False):
                return  # whoever is writing has checked the rest
        with self._writing():
            for old in sorted(self._texts.glob("*-*.json")):  # with a revision, as of format 1
                old.replace(self._texts / f"{old.stem.partition('-')[0]}.json")
            if not self._sound(alone=True):
                self._make(progress)
            with self._index() as index:
                self._finish(index, progress)

    def _sound(self, alone: bool) -> bool:
        """Whether the index is as it was written; BM25's half is checked only when ``alone``."""
        if not self._newest():
            return False
        try:
            with closing(self._connect()) as index:
                index.check(self._facts)
                if alone:
                    index.check_words()
        except (IndexDamaged, apsw.CantOpenError, apsw.CorruptError, apsw.NotADBError, apsw.IOError) as damage:
            _log.warning("the index of %s is rebuilt: %s", self._directory, damage)
            return False
        return True

    def _finish(self, index: Index, progress: Progress | None) -> None:
        """Index what a killed writer had kept and not yet indexed."""
        indexed = {key_of(listed.source): listed.digest for listed in index.documents()}
        for path in sorted(self._texts.glob("*.json")):
            try:
                document = _read_text(path)
            except StoreError as error:
                if path.stem not in indexed:
                    raise
                _log.warning("%s", error)
                continue
            if indexed.get(path.stem) != document.digest:
                index.replace(document, self._embedded(index, document, progress))
        for source in self._without_text(index):
            _log.warning("the kept text of %s is gone; add that document again", source)

    def _without_text(self, index: Index) -> list[str]:
        return [listed.source for listed in index.documents() if not self._text_of(listed.source).exists()]

    def _make(self, progress: Progress | None) -> None:
        """Make a new index beside the present one, then let it take its place."""
        paths = sorted(self._texts.glob("*.json"))
        new = self._directory / "making.db"
        _delete(new)
        with closing(Index(new, make=self._facts)) as index:
            for done, path in enumerate(paths, 1):
                document = _read_text(path)
                index.replace(document, self._embedded(index, document, None))
                if progress is not None:
                    progress(done / len(paths), document.source)
        # A new name: SQLite's files beside an index must never meet another one.
        number = self._newest() + 1
        new.rename(self._path(number))
        _sync_folder(self._directory)
        for old in self._directory.glob("index-*.db"):
            if old != self._path(number):
                _delete(old)

    def _cut(self, document: Document) -> Iterator[Chunk]:
        return chunks(document.text, self._encoder.count_tokens)

    def _embedded(
        self, index: Index, document: Document, progress: Progress | None
    ) -> Iterator[tuple[Sequence[Chunk], dict[str, np.ndarray]]]:
        """A document's chunks, some at a time, with the vectors of those not known yet."""
        pieces, done = self._cut(document), 0
        while some := list(islice(pieces, _TOGETHER)):
            texts = {chunk.key: chunk.text for chunk in some}
            for key in index.known(list(texts)):
                del texts[key]
            vectors = self._encoder.encode(list(texts.values()))
            yield some, dict(zip(texts, vectors, strict=True))
            done += sum(len(chunk.text) for chunk in some)
            if progress is not None:
                progress(min(1.0, done / len(document.text)), document.source)
        if progress is not None:
            progress(1.0, document.source)

    # ------------------------------------------------------------------ files

    def _text_of(self, source: str) -> Path:
        return self._texts / f"{key_of(source)}.json"

    def _path(self, number: int) -> Path:
        return self._directory / f"index-{number}.db"

    def _newest(self) -> int:
        """The highest number of an index; 0 if there is none."""
        stems = (path.stem.partition("-")[2] for path in self._directory.glob("index-*.db"))
        return max((int(stem) for stem in stems if stem.isdecimal()), default=0)

    def _connect(self) -> Index:
        number = self._newest()
        try:
            return Index(self._path(number))
        except apsw.CantOpenError:
            if self._newest() == number:
                raise
            return self._connect()  # another process has just rebuilt it

    @contextmanager
    def _index(self) -> Iterator[Index]:
        """The newest index, on a connection of its own."""
        with self._errors_as_sentences(), closing(self._connect()) as index:
            yield index

    @contextmanager
    def _writing(self, wait: bool = True) -> Iterator[bool]:
        """Take the lock to write, among processes and threads; yields whether it was taken."""
        with self._errors_as_sentences(), (self._directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True

    @contextmanager
    def _errors_as_sentences(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into a StoreError of one sentence."""
        try:
            yield
        except (IndexDamaged, apsw.CorruptError, apsw.NotADBError) as error:
            raise StoreError(
                f"the index of {self._directory} is damaged ({error}); run dsd documents rebuild"
            ) from error
        except (apsw.BusyError, apsw.LockedError) as error:
            raise StoreError(
                f"{self._path(self._newest())} is locked by another process; wait until it is done, or end it "
                "(fuser names it), then try again"
            ) from error
        except apsw.FullError as error:
            raise StoreError(f"no space is left for {self._directory}; make some") from error
        except (apsw.Error, OSError) as error:
            raise StoreError(
                f"the store {self._directory} cannot be used ({error}); name another folder, or one that is yours"
            ) from error


class TemporaryStore(Store):
    """A store of files, deleted when it is closed; empty without files."""

    def __init__(self, encoder: Encoder, files: Iterable[Path] = ()) -> None:
        """A warning names each file that cannot be used; DocumentError if none can."""
        refused: list[str] = []
        documents = read_documents(files, refused=refused.append)
        if refused and not documents:
            raise DocumentError(refused[0])
        for sentence in refused:
            _log.warning("%s", sentence)
        self._folder = tempfile.TemporaryDirectory(prefix="dsd-documents-")
        try:
            super().__init__(Path(self._folder.name), encoder)
            for document in documents:
                self.add(document)
        except BaseException:
            self._folder.cleanup()
            raise

    def close(self) -> None:
        self._folder.cleanup()


def open_documents(folder: Path | None, encoder: Encoder | None = None) -> Store:
    """A folder of text files, or one made by `dsd documents`; None: no documents. The caller closes the store.

    Files are indexed in a temporary store. DocumentError, StoreError or EmbeddingError for what cannot be used.
    """
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    if folder is not None and not folder.is_dir():
        raise DocumentError(f"there is no folder of documents {folder}; check its name")
    if folder is not None and (folder / "texts").is_dir():
        return Store(folder, encoder or SentenceEncoder())
    files = [] if folder is None else files_in([folder])
    return TemporaryStore(encoder or SentenceEncoder(), files)


def _write_text(path: Path, document: Document) -> None:
    """Keep a document: its file is there whole or not at all, whenever the process or the power ends."""
    content = {
        "source": document.source,
        "place": document.place,
        "time": document.time,
        "digest": document.digest,
        "text": document.text,
    }
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, ensure_ascii=False, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _read_text(path: Path) -> Document:
    """The document kept in a file; StoreError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        document = Document(content["source"], content["text"], content["place"], content["time"])
        if key_of(document.source) == path.stem and document.digest == content["digest"]:
            return document
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # DocumentError is a ValueError
        pass
    raise StoreError(
        f"the kept text {path} is damaged; delete that file and add its document again, or restore the file from a "
        "backup"
    )


def _delete(path: Path) -> None:
    """Delete an index and SQLite's files beside it: these first, so that no later index inherits them."""
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        path.with_name(name).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a folder's changes survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
