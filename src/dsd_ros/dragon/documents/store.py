"""A store of documents: what one side knows, searched for what fits a question.

A folder holds two halves: ``texts/``, every document as it was given, and ``index-<n>.db``, made from them
(`dsd_ros.dragon.documents.index`). A document is first kept, then indexed; opening a store finishes what a killed
writer began, and rebuilds an index that is damaged, missing or of another embedding model. One process
writes at a time, any number read meanwhile.

Two retrievers, cosine of embeddings and BM25, choose which chunks are found (reciprocal ranks). How relevant one
is, R(d, x), is the cosine over a temperature. The two sides' relevances meet in eta, so they must mean the same on
both: the cosine does, for one embedding model, while BM25 and fused ranks depend on what else the store holds. The
temperature is 1/20, by which the model was trained: a softmax over 20 cos told the fitting sentence from others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
    read_document,
)
from dsd_ros.dragon.documents.index import FORMAT, Hit, Index, IndexDamaged, Listed
from dsd_ros.dragon.documents.retrieval import Retrieved

if TYPE_CHECKING:
    from dsd_ros.dragon.documents.embedding import Encoder

TEMPERATURE = 0.05
_TOGETHER = 128  # chunks embedded at a time
_ASKED = 8192  # characters of a query

Progress = Callable[[float, str], None]  # the share done, 0 to 1, and what was done


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
        _sync_folder(self._folder)

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
        _sync_folder(self._folder)

    def _path(self, source: str, revision: int) -> Path:
        return self._folder / f"{source}-{revision}.json"


class Found(NamedTuple):
    """A chunk that was found, with the documents that hold it, and its relevance."""

    hit: Hit
    relevance: float


class Store:
    """Documents in a folder, as `dsd_ros.dragon.documents.retrieval.Retriever`. Threads may share one."""

    def __init__(
        self,
        directory: Path,
        encoder: Encoder,
        temperature: float = TEMPERATURE,
        size: int = CHUNK_TOKENS,
        overlap: int = OVERLAP_TOKENS,
        progress: Progress | None = None,
    ) -> None:
        """Open the store in ``directory``, which is made where it is missing.

        ``size``, ``overlap``: of its chunks, in tokens. ``progress`` is called while an index is rebuilt.
        StoreError where the folder cannot be used, or the index is damaged and so are the texts.
        """
        if not 0.0 < temperature < float("inf"):
            raise ValueError(f"a temperature of {temperature} cannot weigh documents; give one > 0")
        self._directory, self._encoder, self._temperature = directory, encoder, temperature
        self._size, self._overlap = size, overlap
        self._facts = {
            "format": str(FORMAT),
            "embedding model": encoder.fingerprint,
            "length of chunks": f"{size} tokens, {overlap} of them again",
        }
        self._texts = Texts(directory / "texts")
        self._guard = threading.Lock()
        self._index: Index | None = None
        self._number = 0
        with self._errors_as_sentences():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private
            (directory / "texts").mkdir(exist_ok=True)
            self._open(progress)

    def close(self) -> None:
        with self._guard:
            if self._index is not None:
                self._index.close()
                self._index = None
                self._number = 0

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def relevance(self, text: str, documents: Sequence[Retrieved]) -> list[float]:
        """R(d, x) of documents for another text, e.g. a question and its answer so far; of any store's documents."""
        vectors = self._encoder.encode([text[:_ASKED], *(found.text for found in documents)])
        return [float(cosine) / self._temperature for cosine in vectors[1:] @ vectors[0]]

    @property
    def fingerprint(self) -> str:
        """Two stores whose fingerprints are equal weigh documents on the same scale."""
        return key_of(f"{self._encoder.fingerprint} {self._temperature!r}")

    # -- reading -------------------------------------------------------------------------------------------

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        """Up to ``count`` chunks for ``query``, best first."""
        return [Retrieved(found.hit.key, found.hit.text, found.relevance) for found in self.search(query, count)]

    def search(self, query: str, count: int) -> list[Found]:
        """``retrieve``, with the documents that hold each chunk."""
        if not query.strip():
            raise ValueError("the query is empty; say what to look for")
        if count < 1:
            raise ValueError(f"{count} documents cannot be found; ask for 1 or more")
        query = query[:_ASKED]
        vector = self._encoder.encode([query])[0]
        with self._errors_as_sentences(), self._guard:
            hits = self._current().search(query, vector, count)
        hits.sort(key=lambda hit: -hit.cosine)
        return [Found(hit, hit.cosine / self._temperature) for hit in hits]

    def documents(self) -> list[Listed]:
        """Every document, by source."""
        with self._errors_as_sentences(), self._guard:
            return self._current().documents()

    def read(self, source: str) -> Document | None:
        """The document of that source as it was given; None where there is none."""
        with self._errors_as_sentences():
            revision = self._texts.revisions().get(key_of(source))
            return None if revision is None else self._texts.read(key_of(source), revision)

    def __len__(self) -> int:
        """How many chunks there are."""
        with self._errors_as_sentences(), self._guard:
            return self._current().size()

    # -- writing -------------------------------------------------------------------------------------------

    def add(self, document: Document, progress: Progress | None = None) -> bool:
        """Keep and index a document, replacing that of the same source; False if it is there already.

        DocumentError where it holds no sentence; StoreError where the disk does not take it.
        """
        if next(self._cut(document), None) is None:
            raise DocumentError(f"{document.source} holds no sentence; write one below its headings")
        with self._errors_as_sentences(), self._writing(), self._writer() as index:
            known = index.document(document.source)
            if known is not None and known.digest == document.digest:
                return False
            kept = self._texts.revisions().get(key_of(document.source), 0)
            revision = 1 + max(kept, known.revision if known else 0)
            self._texts.write(document, revision)
            index.replace(document, revision, self._embedded(index, document, progress))
            self._texts.drop(key_of(document.source), below=revision)
        return True

    def remove(self, source: str) -> bool:
        """Remove a document and the chunks that only it holds; False if there is none of that source."""
        with self._errors_as_sentences(), self._writing(), self._writer() as index:
            if index.document(source) is None:
                return False
            index.remove(source)
            self._texts.drop(key_of(source))
        return True

    def rebuild(self, progress: Progress | None = None) -> None:
        """Rebuild the index from the kept texts; StoreError if one of these is damaged or gone."""
        with self._errors_as_sentences(), self._writing():
            with contextlib.suppress(IndexDamaged, apsw.Error), self._writer() as index:
                index.check(self._facts, words=False)
                kept = self._texts.revisions()
                for listed in index.documents():
                    if key_of(listed.source) not in kept:
                        raise StoreError(
                            f"the kept text of {listed.source} is gone; add that document again or remove it, "
                            "then rebuild"
                        )
            self._make(progress)
        with self._errors_as_sentences(), self._guard:
            self._current()

    # -- the two halves ------------------------------------------------------------------------------------

    def _open(self, progress: Progress | None) -> None:
        """Check the index; make it where it is missing or damaged; index what was kept but not indexed."""
        with self._writing(wait=False) as alone:
            if not alone and self._sound(words=False):
                return  # who is writing has seen to the rest
        with self._writing():
            if not self._sound(words=True):
                self._make(progress)
            with self._writer() as index:
                self._finish(index, progress)

    def _sound(self, words: bool) -> bool:
        if not _newest(self._directory):
            return False
        try:
            with self._writer() as index:
                index.check(self._facts, words)
        except apsw.CantOpenError:  # another process has just rebuilt it
            return False
        except (IndexDamaged, apsw.CorruptError, apsw.NotADBError, apsw.IOError) as damage:
            logging.getLogger(__name__).warning("the index of %s is made anew: %s", self._directory, damage)
            return False
        return True

    def _finish(self, index: Index, progress: Progress | None) -> None:
        """Bring the index to the texts' state: what a killed writer had kept and not yet indexed."""
        indexed = {key_of(listed.source): listed for listed in index.documents()}
        for source, revision in self._texts.revisions().items():
            listed = indexed.get(source)
            if listed is None or listed.revision < revision:
                document = self._texts.read(source, revision)
                index.replace(document, revision, self._embedded(index, document, progress))
            self._texts.drop(source, below=revision)
        kept = self._texts.revisions()
        for source, listed in indexed.items():
            if source not in kept:
                logging.getLogger(__name__).warning(
                    "the kept text of %s is gone; add that document again", listed.source
                )

    def _make(self, progress: Progress | None) -> None:
        """Make a new index beside the present one, then let it take its place."""
        sources = sorted(self._texts.revisions().items())
        documents = ((self._texts.read(*each), each[1]) for each in sources)
        new = self._directory / "making.db"
        _delete(new)
        index = Index(new, make=self._facts)
        try:
            for done, (document, revision) in enumerate(documents):

                def tell(share: float, line: str, done: int = done) -> None:
                    if progress is not None:
                        progress((done + share) / len(sources), line)

                index.replace(document, revision, self._embedded(index, document, tell))
        except BaseException:
            index.close()
            _delete(new)
            raise
        index.close()  # and so writes back and ends its journal
        before = _newest(self._directory)
        new.rename(_path(self._directory, before + 1))
        _sync_folder(self._directory)
        for path in self._directory.glob("index-*.db"):
            if path != _path(self._directory, before + 1):
                _delete(path)

    def _cut(self, document: Document) -> Iterator[Chunk]:
        return chunks(document.text, self._encoder.count_tokens, self._size, self._overlap)

    def _embedded(
        self, index: Index, document: Document, progress: Progress | None
    ) -> Iterator[tuple[Sequence[Chunk], dict[str, np.ndarray]]]:
        """A document's chunks, some at a time, with the vectors of those not known yet."""
        pieces = self._cut(document)
        done = 0
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

    def _current(self) -> Index:
        """The newest index, open for reading; the caller holds the guard."""
        for attempt in range(3):
            number = _newest(self._directory)
            if self._index is not None and number == self._number:
                return self._index
            if self._index is not None:
                self._index.close()
                self._index = None
            try:
                self._index = Index(_path(self._directory, number))
            except apsw.CantOpenError:  # another process has just rebuilt it
                if attempt == 2:
                    raise
                continue
            self._number = number
            return self._index
        raise AssertionError

    @contextlib.contextmanager
    def _writer(self) -> Iterator[Index]:
        """A connection of its own, so that readers never see half a change."""
        index = Index(_path(self._directory, _newest(self._directory)))
        try:
            yield index
        finally:
            index.close()

    @contextlib.contextmanager
    def _writing(self, wait: bool = True) -> Iterator[bool]:
        """Take the lock to write, among processes and threads; yields whether it was taken."""
        with (self._directory / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def _errors_as_sentences(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into a StoreError of one sentence."""
        try:
            yield
        except (IndexDamaged, apsw.CorruptError, apsw.NotADBError) as error:
            raise StoreError(
                f"the index of {self._directory} is damaged ({error}); run dsd documents rebuild"
            ) from error
        except apsw.FullError as error:
            raise StoreError(f"no space is left for {self._directory}; make some") from error
        except (apsw.Error, OSError) as error:
            raise StoreError(
                f"the store {self._directory} cannot be used ({error}); name another folder, or one that is yours"
            ) from error


class TemporaryStore(Store):
    """A store of text files, deleted when it is closed; empty without files."""

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
    """Where a model's measurements are kept: in a store's folder; None for a folder of text files."""
    return folder if folder is not None and is_store(folder) else None


def is_store(folder: Path) -> bool:
    """Whether `dsd documents` made it."""
    return (folder / "texts").is_dir()


def _path(directory: Path, number: int) -> Path:
    return directory / f"index-{number}.db"


def _newest(directory: Path) -> int:
    """The highest number of an index there, 0 where there is none."""
    stems = (path.stem.partition("-")[2] for path in directory.glob("index-*.db"))
    return max((int(stem) for stem in stems if stem.isdecimal()), default=0)


def _delete(path: Path) -> None:
    """An index and SQLite's files beside it: these first, so that no later index inherits them."""
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        path.with_name(name).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a folder's changes survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
