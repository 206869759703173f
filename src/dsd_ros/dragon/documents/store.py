# SPDX-License-Identifier: Apache-2.0
"""A store of documents: what one side knows, searched for what fits a question.

One SQLite file holds the chunks with their vectors, and their words in an FTS5 table; a document is replaced in one
transaction. Any process may read and write: SQLite keeps them apart, and an open store sees what others have written.

Cosine similarity of embeddings and BM25 choose which chunks are found, their ranks fused by reciprocals. A chunk's
relevance R(d, x) is its cosine over ``TEMPERATURE``. The two sides' relevances meet in eta, so they must mean the same
on both: the cosine does, for one embedding model, while BM25 and fused ranks depend on what else a store holds.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dsd_ros.dragon.documents.chunking import Document, DocumentError, chunks, files_in, key_of, read_documents
from dsd_ros.dragon.documents.retrieval import TEMPERATURE, Retrieved
from dsd_ros.paths import DOCUMENTS_FILE

if TYPE_CHECKING:
    from typing_extensions import Self

    from dsd_ros.dragon.documents.embedding import Encoder

WAIT_S = 10.0  # for another process's transaction
RANK = 60  # of reciprocal rank fusion: Cormack, Clarke and Buettcher 2009
WORDS = 64  # words of a query that BM25 looks at
_TOGETHER = 128  # chunks embedded at a time
_SCANNED = 4096  # vectors compared at a time
_ASKED = 8192  # characters of a query

_TABLES = """
TABLE IF NOT EXISTS chunks (id INTEGER PRIMARY KEY, source TEXT NOT NULL, heading TEXT NOT NULL, vector BLOB NOT NULL);
INDEX IF NOT EXISTS sources ON chunks (source);
VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, tokenize='porter unicode61');
"""

# Words that nearly every text has: BM25 gives them no weight, and finding them all takes longest.
_COMMON = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be been but by can could did do does for from had has have how i if in into is it its may "
        "me my not of on or our shall should so than that the their them then there these they this to us was we were "
        "what when where which who whom whose why will with would you your",
    )
)

Progress = Callable[[float, str], None]  # the share done, 0 to 1, and what was done

_log = logging.getLogger(__name__)


class StoreError(ValueError):
    """A store cannot do what it is asked: one sentence, with the remedy."""


class Hit(NamedTuple):
    """A chunk found: its cosine similarity to the query, a document that holds it, and the heading above it there."""

    text: str
    cosine: float
    source: str
    heading: str

    @property
    def relevance(self) -> float:
        """R(d, x), see the module."""
        return self.cosine / TEMPERATURE


class Listed(NamedTuple):
    """A document and its number of chunks."""

    source: str
    chunks: int


class Store:
    """Documents in a folder, or in memory; a ``retrieval.Retriever``. Threads may share one."""

    def __init__(self, directory: Path | None, encoder: Encoder | None) -> None:
        """Open the store in ``directory``, which is created if it is missing; None: in memory, until it is closed.

        :param encoder: None: to list and to remove documents only, for which no model need be loaded.

        StoreError if the folder cannot be used, or was made with another embedding model.
        """
        self._given, self._lock = encoder, threading.Lock()
        self._path = None if directory is None else directory / DOCUMENTS_FILE
        with self._errors_as_sentences():
            if directory is not None:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # private
            # Transactions begin where the code says so.
            self._db = sqlite3.connect(
                self._path or ":memory:", timeout=WAIT_S, isolation_level=None, check_same_thread=False
            )
        made_with = 0 if encoder is None else int(key_of(encoder.fingerprint)[:7], 16) or 1  # 0: not known yet
        if self._version() == 0:
            with self._transaction() as db:
                if self._version() == 0:  # another process may have been first
                    for statement in _TABLES.strip().split("\n"):
                        db.execute(f"CREATE {statement}")
                    db.execute(f"PRAGMA user_version = {made_with}")
        if encoder is not None and self._version() != made_with:
            self.close()
            raise StoreError(
                f"{self._path} was made with another embedding model; delete it and add its documents again"
            )

    @property
    def _encoder(self) -> Encoder:
        assert self._given is not None, "opened to list and to remove only"
        return self._given

    def _version(self) -> int:
        with self._errors_as_sentences():
            return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def fingerprint(self) -> str:
        """Equal for two stores that weigh documents on the same scale."""
        return key_of(f"{self._encoder.fingerprint} {TEMPERATURE!r}")

    # ------------------------------------------------------------------ reading

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        """Up to ``count`` chunks for ``query``, best first."""
        return [
            Retrieved(key_of(hit.text), hit.text, hit.relevance, Path(hit.source).name[:64])
            for hit in self.search(query, count)
        ]

    def search(self, query: str, count: int) -> list[Hit]:
        """``retrieve``, with where each chunk stands. A text that several documents hold is found once."""
        if not query.strip():
            raise ValueError("the query is empty; say what to look for")
        if count < 1:
            raise ValueError(f"{count} documents cannot be found; ask for 1 or more")
        query = query[:_ASKED]
        vector = self._encoder.encode([query])[0]
        pool, found = max(4 * count, 16), dict[str, Hit]()
        with self._transaction("DEFERRED") as db:  # one state of the file for all reads
            scores: dict[int, float] = {}
            for ranked in (self._nearest(db, vector, pool), self._with_words(db, query, pool)):
                for rank, number in enumerate(ranked, 1):
                    scores[number] = scores.get(number, 0.0) + 1.0 / (RANK + rank)
            for number in sorted(scores, key=lambda number: (-scores[number], number)):
                text, source, heading, blob = db.execute(
                    "SELECT text, source, heading, vector FROM chunks JOIN words ON words.rowid = id WHERE id = ?",
                    (number,),
                ).fetchone()
                cosine = float(np.frombuffer(blob, np.float32).astype(float) @ vector.astype(float))
                found.setdefault(text, Hit(text, cosine, source, heading))
                if len(found) == count:
                    break
        return sorted(found.values(), key=lambda hit: -hit.cosine)

    def _nearest(self, db: sqlite3.Connection, vector: np.ndarray, count: int) -> list[int]:
        """Up to ``count`` chunks whose vectors have the largest cosine with ``vector`` (dimension,), best first."""
        numbers, cosines = list[int](), [np.empty(0, np.float32)]
        rows = db.execute("SELECT id, vector FROM chunks ORDER BY id")
        while some := rows.fetchmany(_SCANNED):
            numbers += [number for number, _ in some]
            vectors = np.frombuffer(b"".join(blob for _, blob in some), np.float32)
            cosines.append(vectors.reshape(len(some), -1) @ vector)
        order = np.argsort(-np.concatenate(cosines), kind="stable")
        return [numbers[place] for place in order[:count]]

    def _with_words(self, db: sqlite3.Connection, query: str, count: int) -> list[int]:
        """Up to ``count`` chunks with words of the query, best first."""
        words = dict.fromkeys(re.findall(r"\w+", query.casefold()))
        asked = ([word for word in words if word not in _COMMON] or list(words))[:WORDS]
        if not asked:
            return []
        match = " OR ".join(f'"{word}"' for word in asked)
        ranked = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?"
        return [number for (number,) in db.execute(ranked, (match, count))]

    def documents(self) -> list[Listed]:
        """Every document, by source."""
        with self._transaction("DEFERRED") as db:
            rows = db.execute("SELECT source, count(*) FROM chunks GROUP BY source ORDER BY source").fetchall()
        return [Listed(*row) for row in rows]

    def texts(self, source: str) -> list[str]:
        """The chunks of the document of that source, in its order; empty if there is none."""
        return [text for text, _, _ in self._held(source)]

    def _held(self, source: str) -> list[tuple[str, str, bytes]]:
        """Text, heading and vector of a document's chunks."""
        with self._transaction("DEFERRED") as db:
            return db.execute(
                "SELECT text, heading, vector FROM chunks JOIN words ON words.rowid = id WHERE source = ? ORDER BY id",
                (source,),
            ).fetchall()

    def __len__(self) -> int:
        """The number of chunks."""
        return sum(listed.chunks for listed in self.documents())

    # ------------------------------------------------------------------ writing

    def add(self, document: Document, progress: Progress | None = None) -> bool:
        """Add a document, in place of the one of the same source; False if it is there already.

        DocumentError if it holds no sentence; StoreError if it cannot be written.
        """
        pieces = list(chunks(document.text, self._encoder.count_tokens))
        if not pieces:
            raise DocumentError(f"{document.source} holds no sentence; write one below its headings")
        before = self._held(document.source)
        if [(chunk.text, chunk.heading) for chunk in pieces] == [(text, heading) for text, heading, _ in before]:
            return False
        vectors = {text: vector for text, _, vector in before}
        new = [text for text in dict.fromkeys(chunk.text for chunk in pieces) if text not in vectors]
        for start in range(0, len(new), _TOGETHER):
            some = new[start : start + _TOGETHER]
            vectors |= {
                text: row.astype(np.float32).tobytes()
                for text, row in zip(some, self._encoder.encode(some), strict=True)
            }
            if progress is not None:
                progress((start + len(some)) / len(new), document.source)
        with self._transaction() as db:
            _delete(db, document.source)
            for chunk in pieces:
                row = db.execute(
                    "INSERT INTO chunks(source, heading, vector) VALUES (?, ?, ?)",
                    (document.source, chunk.heading, vectors[chunk.text]),
                )
                db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (row.lastrowid, chunk.text))
        return True

    def remove(self, source: str) -> bool:
        """Remove a document; False if there is none of that source."""
        with self._transaction() as db:
            return _delete(db, source) > 0

    # ------------------------------------------------------------------ SQLite

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """All or nothing, for one thread at a time."""
        with self._lock, self._errors_as_sentences():
            self._db.execute(f"BEGIN {kind}")
            with self._db:
                yield self._db

    @contextmanager
    def _errors_as_sentences(self) -> Iterator[None]:
        """Turn errors of SQLite and the system into a StoreError of one sentence."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:  # locked, full, not to be written, no folder
            raise StoreError(
                f"{self._path} cannot be used ({error}); name a folder that is yours, or wait until no other process "
                "writes there"
            ) from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is damaged ({error}); delete it and add its documents again") from error


def _delete(db: sqlite3.Connection, source: str) -> int:
    """Delete a document's chunks; returns how many there were."""
    db.execute("DELETE FROM words WHERE rowid IN (SELECT id FROM chunks WHERE source = ?)", (source,))
    return db.execute("DELETE FROM chunks WHERE source = ?", (source,)).rowcount


def open_documents(folder: Path | None, encoder: Encoder | None = None) -> Store:
    """A folder of text files, or one made by `dsd documents`; None: no documents. The caller closes the store.

    Files are read into a store in memory, anew each time; a warning names each that cannot be used. DocumentError,
    StoreError or EmbeddingError where nothing can.
    """
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    if folder is not None and not folder.is_dir():
        raise DocumentError(f"there is no folder of documents {folder}; check its name")
    if folder is not None and (folder / DOCUMENTS_FILE).is_file():
        return Store(folder, encoder or SentenceEncoder())
    refused: list[str] = []
    documents = [] if folder is None else read_documents(files_in([folder]), refused.append)
    if refused and not documents:
        raise DocumentError(refused[0])
    for sentence in refused:
        _log.warning("%s", sentence)
    store = Store(None, encoder or SentenceEncoder())
    try:
        for document in documents:
            store.add(document)
    except BaseException:
        store.close()
        raise
    return store
