"""One SQLite file with chunks, their vectors and their words: the searchable half of a store.

Vectors lie in an ordinary table and are compared by sqlite-vec's functions: an exact scan (100 000 of 384 numbers:
0.1 s), so nothing is held in memory, nothing approximated, and text, vector and words change in one transaction.
Its vec0 tables are a third faster, but keep vectors in blobs of a thousand, which rows cannot be checked or deleted
in one by one; faiss is faster still, but a second file, to be kept in step by hand. The words are SQLite's own FTS5
with its bm25. The driver is apsw: Python's own sqlite3 cannot load extensions where it was built without
(pyenv's, python.org's for macOS), and apsw brings one SQLite, the same everywhere, FTS5 included.

Every vector carries a digest of itself and its text's key, and a key is the digest of a text, so that `check` finds
what SQLite's own check of its pages does not: a flipped bit inside a row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import apsw
import numpy as np
import sqlite_vec

from dsd_ros.dragon.documents.chunking import Chunk, Document, key_of

FORMAT = 1
WAIT_MS = 10_000  # for another process's commit
RANK = 60  # of reciprocal rank fusion: Cormack, Clarke and Buettcher 2009
WORDS = 64  # of a query that BM25 looks at
MANY = 64  # chunks that are dropped together

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (id INTEGER PRIMARY KEY, source TEXT UNIQUE NOT NULL, revision INTEGER NOT NULL,
    digest TEXT NOT NULL, place TEXT NOT NULL, time TEXT NOT NULL);
CREATE TABLE chunks (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, text TEXT NOT NULL);
CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE holds (document INTEGER NOT NULL, chunk INTEGER NOT NULL, heading TEXT NOT NULL,
    PRIMARY KEY (document, chunk)) WITHOUT ROWID;
CREATE INDEX held ON holds (chunk);
CREATE VIRTUAL TABLE words USING fts5(text, content='chunks', content_rowid='id', tokenize='porter unicode61');
INSERT INTO words(words, rank) VALUES ('secure-delete', 1);
"""


class IndexDamaged(Exception):
    """The index is not what was written; it can be built again from the texts."""


class Hit(NamedTuple):
    """A chunk found: its cosine similarity to the query, and the documents that hold it."""

    key: str
    text: str
    cosine: float
    holders: list[Holder]


class Holder(NamedTuple):
    source: str
    heading: str
    place: str
    time: str


class Listed(NamedTuple):
    """A document of the index. ``chunks``: how many; ``revision`` counts its changes."""

    source: str
    place: str
    time: str
    chunks: int
    digest: str
    revision: int


class Index:
    """An open index; for one thread at a time. Other processes may read while one writes."""

    def __init__(self, path: Path, make: dict[str, str] | None = None) -> None:
        """Open the index at ``path``; where ``make`` is given, make it with those facts about itself."""
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if make is not None else 0)
        self._db = apsw.Connection(str(path), flags=flags)
        self._db.set_busy_timeout(WAIT_MS)
        self._db.enable_load_extension(True)
        self._db.load_extension(sqlite_vec.loadable_path())
        self._db.enable_load_extension(False)
        if make is not None:
            self._db.execute("PRAGMA page_size=8192")  # five vectors a page
            with self._db:
                self._db.execute(_TABLES)
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", list(make.items()))
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # a power cut loses the last changes at worst
        self._db.execute("PRAGMA secure_delete=ON")  # what an owner removes is gone
        self._db.execute("PRAGMA temp_store=FILE")

    def close(self) -> None:
        self._db.close()

    def check(self, facts: dict[str, str], words: bool) -> None:
        """IndexDamaged, saying what, unless all is as it was written and made with ``facts``.

        ``words``: check BM25's half, too, which takes the right to write.
        """
        try:
            told = {name: value for name, value in self._db.execute("SELECT name, value FROM meta")}
            if told != facts:
                other = sorted(name for name in facts if told.get(name) != facts[name])
                raise IndexDamaged(f"it was made with another {', another '.join(other)}")
            for (line,) in self._db.execute("PRAGMA quick_check(1)"):
                if line != "ok":
                    raise IndexDamaged(str(line))
            rows = self._db.execute("SELECT key, text, vector, checksum FROM chunks LEFT JOIN vectors USING (id)")
            for key, text, vector, checksum in rows:
                if key != key_of(text) or vector is None or checksum != _checksum(key, vector):
                    raise IndexDamaged(f"chunk {key} is not as it was written")
            odd = "SELECT count(*) FROM vectors WHERE id NOT IN (SELECT id FROM chunks)"
            if self._db.execute(odd).get:
                raise IndexDamaged("there are vectors without a text")
            if words:
                self._db.execute("INSERT INTO words(words, rank) VALUES ('integrity-check', 1)")
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeDecodeError) as error:
            raise IndexDamaged(str(error)) from error

    def documents(self) -> list[Listed]:
        """Every document, by source."""
        rows = self._db.execute(
            "SELECT source, place, time, (SELECT count(*) FROM holds WHERE document = id), digest, revision"
            " FROM documents ORDER BY source"
        )
        return [Listed(*row) for row in rows]

    def document(self, source: str) -> Listed | None:
        rows = self._db.execute(
            "SELECT source, place, time, 0, digest, revision FROM documents WHERE source = ?", (source,)
        )
        return next((Listed(*row) for row in rows), None)

    def size(self) -> int:
        """How many chunks there are."""
        return int(self._db.execute("SELECT count(*) FROM chunks").get)

    def known(self, keys: Iterable[str]) -> set[str]:
        """Which of ``keys`` have a chunk already."""
        found = (self._db.execute("SELECT key FROM chunks WHERE key = ?", (k,)).get for k in keys)
        return {key for key in found if key}

    def replace(
        self, document: Document, revision: int, parts: Iterator[tuple[Sequence[Chunk], dict[str, np.ndarray]]]
    ) -> None:
        """Put a document in the place of what had its source, all or nothing.

        ``parts``: chunks, and vectors (dimension,) float32 by key of those that `known` does not name.
        """
        with self._db:
            self._db.execute(
                "INSERT INTO documents(source, revision, digest, place, time) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT (source) DO UPDATE SET revision = excluded.revision, digest = excluded.digest,"
                " place = excluded.place, time = excluded.time",
                (document.source, revision, document.digest, document.place, document.time),
            )
            find = "SELECT id FROM documents WHERE source = ?"
            number = self._db.execute(find, (document.source,)).get
            before = {chunk for (chunk,) in self._db.execute("SELECT chunk FROM holds WHERE document = ?", (number,))}
            self._db.execute("DELETE FROM holds WHERE document = ?", (number,))
            for chunks, vectors in parts:
                for chunk in chunks:
                    self._hold(number, chunk, vectors)
            self._drop_unheld(before)

    def remove(self, source: str) -> None:
        """Drop a document and the chunks that no other holds, all or nothing."""
        with self._db:
            number = self._db.execute("SELECT id FROM documents WHERE source = ?", (source,)).get
            before = [chunk for (chunk,) in self._db.execute("SELECT chunk FROM holds WHERE document = ?", (number,))]
            self._db.execute("DELETE FROM holds WHERE document = ?", (number,))
            self._db.execute("DELETE FROM documents WHERE id = ?", (number,))
            self._drop_unheld(before)

    def _hold(self, document: int, chunk: Chunk, vectors: dict[str, np.ndarray]) -> None:
        number = self._db.execute("SELECT id FROM chunks WHERE key = ?", (chunk.key,)).get
        if number is None:
            vector = np.ascontiguousarray(vectors[chunk.key], np.float32).tobytes()
            self._db.execute("INSERT INTO chunks(key, text) VALUES (?, ?)", (chunk.key, chunk.text))
            number = self._db.last_insert_rowid()
            self._db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (number, chunk.text))
            self._db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (number, vector, _checksum(chunk.key, vector)))
        self._db.execute("INSERT OR IGNORE INTO holds VALUES (?, ?, ?)", (document, number, chunk.heading))

    def _drop_unheld(self, numbers: Iterable[int]) -> None:
        held = "SELECT 1 FROM holds WHERE chunk = ? LIMIT 1"
        gone = [number for number in numbers if not self._db.execute(held, (number,)).get]
        many = len(gone) > MANY  # then one rewriting of the words erases them sooner than one of each
        if many:
            self._db.execute("INSERT INTO words(words, rank) VALUES ('secure-delete', 0)")
        for number in gone:
            text = self._db.execute("SELECT text FROM chunks WHERE id = ?", (number,)).get
            self._db.execute("INSERT INTO words(words, rowid, text) VALUES ('delete', ?, ?)", (number, text))
            self._db.execute("DELETE FROM chunks WHERE id = ?", (number,))
            self._db.execute("DELETE FROM vectors WHERE id = ?", (number,))
        if many:
            self._db.execute("INSERT INTO words(words) VALUES ('optimize')")
            self._db.execute("INSERT INTO words(words, rank) VALUES ('secure-delete', 1)")

    def search(self, query: str, vector: np.ndarray, count: int) -> list[Hit]:
        """Up to ``count`` chunks, best first: both retrievers' ranks fused by their reciprocals.

        ``vector`` (dimension,) float32 of length 1. For such, cos = 1 - d^2 / 2 of the distance d.
        """
        pool = max(4 * count, 16)
        with self._db:  # one state of the file for all that is read
            blob = np.ascontiguousarray(vector, np.float32).tobytes()
            near = self._db.execute(
                "SELECT id FROM vectors ORDER BY vec_distance_l2(vector, ?), id LIMIT ?", (blob, pool)
            )
            scores: dict[int, float] = {}
            for rank, (number,) in enumerate(near, 1):
                scores[number] = 1.0 / (RANK + rank)
            asked = list(dict.fromkeys(re.findall(r"\w+", query.casefold())))[:WORDS]
            if asked:
                match = " OR ".join(f'"{word}"' for word in asked)
                said = self._db.execute(
                    "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?", (match, pool)
                )
                for rank, (number,) in enumerate(said, 1):
                    scores[number] = scores.get(number, 0.0) + 1.0 / (RANK + rank)
            best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
            hits = [self._hit(number, blob) for number in best]
        return hits

    def _hit(self, number: int, blob: bytes) -> Hit:
        key, text, distance = self._db.execute(
            "SELECT key, text, vec_distance_l2(vector, ?) FROM chunks JOIN vectors USING (id) WHERE id = ?",
            (blob, number),
        ).get
        holders = self._db.execute(
            "SELECT source, heading, place, time FROM holds JOIN documents ON documents.id = document"
            " WHERE chunk = ? ORDER BY source",
            (number,),
        )
        return Hit(key, text, 1.0 - distance**2 / 2.0, [Holder(*row) for row in holders])


def _checksum(key: str, vector: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + vector, digest_size=8).digest()
