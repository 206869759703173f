# SPDX-License-Identifier: Apache-2.0
"""One SQLite file with chunks, their vectors and their words: the searchable half of a store.

sqlite-vec scans the signs of the vectors' numbers for the likeliest few hundred (by Hamming distance), and compares
those exactly; FTS5 ranks the words by bm25, without very common ones. Of 100 000 vectors of 384 numbers the first takes
15 to 25 ms (an exact scan 94), and the words take 1 to 15. All are ordinary rows, so text, vector and words change in
one transaction. apsw is the driver because Python's own sqlite3 is often built without loadable extensions.

SQLite's page checks do not see a bit that flips inside a row. So each text is checked against its key, which is its
digest, and each vector against a checksum.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import numpy as np
import sqlite_vec

from dsd_ros.dragon.documents.chunking import Chunk, Document, key_of

FORMAT = 3
TEMPERATURE = 0.05  # of relevances: the embedding model was trained with a softmax over 20 cos
WAIT_MS = 10_000  # for another process's commit
RANK = 60  # of reciprocal rank fusion: Cormack, Clarke and Buettcher 2009
WORDS = 64  # words of a query that BM25 looks at
RANKED = 10_000  # chunks that BM25 ranks at most, unless one word alone is in more
SCANNED = 512  # vectors nearest by their signs that are compared exactly
MANY = 64  # deleted chunks from which erasing their words one by one costs more than rewriting all words

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE documents (id INTEGER PRIMARY KEY, source TEXT UNIQUE NOT NULL, digest TEXT NOT NULL,
    place TEXT NOT NULL, time TEXT NOT NULL);
CREATE TABLE chunks (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, text TEXT NOT NULL);
CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE signs (id INTEGER PRIMARY KEY, bits BLOB NOT NULL);
CREATE TABLE holds (document INTEGER NOT NULL, chunk INTEGER NOT NULL, heading TEXT NOT NULL,
    PRIMARY KEY (document, chunk)) WITHOUT ROWID;
CREATE INDEX held ON holds (chunk);
CREATE VIRTUAL TABLE words USING fts5(text, content='chunks', content_rowid='id', tokenize='porter unicode61');
INSERT INTO words(words, rank) VALUES ('secure-delete', 1);
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


class IndexDamaged(Exception):
    """The index is not what was written; it can be rebuilt from the texts."""


class Holder(NamedTuple):
    """A document that holds a chunk, and the heading above it there."""

    source: str
    heading: str
    place: str
    time: str


class Hit(NamedTuple):
    """A chunk found: its cosine similarity to the query, and the documents that hold it."""

    key: str
    text: str
    cosine: float
    holders: list[Holder]

    @property
    def relevance(self) -> float:
        """R(d, x), see ``store``."""
        return self.cosine / TEMPERATURE

    @property
    def name(self) -> str:
        """The first document that holds it, without its folder."""
        return Path(self.holders[0].source).name[:64] if self.holders else ""


class Listed(NamedTuple):
    """A document of the index and its number of chunks."""

    source: str
    place: str
    time: str
    chunks: int
    digest: str


class Index:
    """An open index, for one thread at a time. Other processes may read while one writes."""

    def __init__(self, path: Path, make: dict[str, str] | None = None) -> None:
        """Open the index at ``path``; with ``make``, create it and record those facts about it."""
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
        self._db.execute("PRAGMA synchronous=NORMAL")  # after a power cut, the newest texts are indexed again
        self._db.execute("PRAGMA secure_delete=ON")  # what an owner removes is overwritten
        self._db.execute("PRAGMA temp_store=FILE")

    def close(self) -> None:
        self._db.close()

    def check(self, facts: dict[str, str]) -> None:
        """IndexDamaged, with the reason, unless everything is as it was written, with ``facts``."""
        try:
            found = dict(self._db.execute("SELECT name, value FROM meta"))
            if found != facts:
                other = sorted(name for name in facts if found.get(name) != facts[name])
                raise IndexDamaged(f"it was made with another {', another '.join(other)}")
            for (line,) in self._db.execute("PRAGMA quick_check(1)"):
                if line != "ok":
                    raise IndexDamaged(str(line))
            rows = self._db.execute("SELECT key, text, vector, checksum FROM chunks LEFT JOIN vectors USING (id)")
            for key, text, vector, checksum in rows:
                if key != key_of(text) or vector is None or checksum != _checksum(key, vector):
                    raise IndexDamaged(f"chunk {key} is not as it was written")
            if self._db.execute("SELECT count(*) FROM vectors WHERE id NOT IN (SELECT id FROM chunks)").get:
                raise IndexDamaged("there are vectors without a text")
            counts = self._db.execute(
                "SELECT (SELECT count(*) FROM vectors JOIN signs USING (id) WHERE bits = vec_quantize_binary(vector)),"
                " (SELECT count(*) FROM signs), count(*) FROM vectors"
            ).fetchone()
            if len(set(counts or ())) > 1:
                raise IndexDamaged("there are signs that are not those of the vectors")
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError, UnicodeDecodeError) as error:
            raise IndexDamaged(str(error)) from error

    def check_words(self) -> None:
        """IndexDamaged unless the words are those of the texts. Needs the right to write."""
        try:
            self._db.execute("INSERT INTO words(words, rank) VALUES ('integrity-check', 1)")
        except (apsw.CorruptError, apsw.SQLError) as error:
            raise IndexDamaged(str(error)) from error

    def documents(self) -> list[Listed]:
        """Every document, by source."""
        rows = self._db.execute(
            "SELECT source, place, time, (SELECT count(*) FROM holds WHERE document = id), digest"
            " FROM documents ORDER BY source"
        )
        return [Listed(*row) for row in rows]

    def digest_of(self, source: str) -> str | None:
        """The digest of the document of that source; None if there is none."""
        digest: str | None = self._db.execute("SELECT digest FROM documents WHERE source = ?", (source,)).get
        return digest

    def size(self) -> int:
        """The number of chunks."""
        return int(self._db.execute("SELECT count(*) FROM chunks").get)

    def known(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that already have a chunk."""
        return {key for key in keys if self._db.execute("SELECT 1 FROM chunks WHERE key = ?", (key,)).get}

    def replace(self, document: Document, parts: Iterable[tuple[Sequence[Chunk], dict[str, np.ndarray]]]) -> None:
        """Replace what had the document's source, all or nothing.

        ``parts``: chunks, and vectors (dimension,) float32 by key for those that ``known`` does not name.
        """
        with self._db:
            self._db.execute(
                "INSERT INTO documents(source, digest, place, time) VALUES (?, ?, ?, ?) ON CONFLICT (source) DO UPDATE"
                " SET digest = excluded.digest, place = excluded.place, time = excluded.time",
                (document.source, document.digest, document.place, document.time),
            )
            with self._changing(document.source) as number:
                for chunks, vectors in parts:
                    for chunk in chunks:
                        self._hold(number, chunk, vectors)

    def remove(self, source: str) -> None:
        """Remove a document and the chunks that no other holds, all or nothing."""
        with self._db, self._changing(source) as number:
            self._db.execute("DELETE FROM documents WHERE id = ?", (number,))

    @contextmanager
    def _changing(self, source: str) -> Iterator[int]:
        """Take a document's chunks from it; afterwards delete those that no document holds any more."""
        number = self._db.execute("SELECT id FROM documents WHERE source = ?", (source,)).get
        before = [chunk for (chunk,) in self._db.execute("SELECT chunk FROM holds WHERE document = ?", (number,))]
        self._db.execute("DELETE FROM holds WHERE document = ?", (number,))
        yield number
        held = "SELECT 1 FROM holds WHERE chunk = ? LIMIT 1"
        gone = [chunk for chunk in before if not self._db.execute(held, (chunk,)).get]
        many = len(gone) > MANY  # then rewriting all words once erases them sooner
        if many:
            self._db.execute("INSERT INTO words(words, rank) VALUES ('secure-delete', 0)")
        for chunk in gone:
            text = self._db.execute("SELECT text FROM chunks WHERE id = ?", (chunk,)).get
            self._db.execute("INSERT INTO words(words, rowid, text) VALUES ('delete', ?, ?)", (chunk, text))
            self._db.execute("DELETE FROM chunks WHERE id = ?", (chunk,))
            self._db.execute("DELETE FROM vectors WHERE id = ?", (chunk,))
            self._db.execute("DELETE FROM signs WHERE id = ?", (chunk,))
        if many:
            self._db.execute("INSERT INTO words(words) VALUES ('optimize')")
            self._db.execute("INSERT INTO words(words, rank) VALUES ('secure-delete', 1)")

    def _hold(self, document: int, chunk: Chunk, vectors: dict[str, np.ndarray]) -> None:
        number = self._db.execute("SELECT id FROM chunks WHERE key = ?", (chunk.key,)).get
        if number is None:
            vector = _blob(vectors[chunk.key])
            self._db.execute("INSERT INTO chunks(key, text) VALUES (?, ?)", (chunk.key, chunk.text))
            number = self._db.last_insert_rowid()
            self._db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (number, chunk.text))
            self._db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (number, vector, _checksum(chunk.key, vector)))
            self._db.execute("INSERT INTO signs VALUES (?, vec_quantize_binary(?))", (number, vector))
        self._db.execute("INSERT OR IGNORE INTO holds VALUES (?, ?, ?)", (document, number, chunk.heading))

    def search(self, query: str, vector: np.ndarray, count: int) -> list[Hit]:
        """Up to ``count`` chunks, best first: the ranks of both retrievers, fused by their reciprocals.

        ``vector`` (dimension,) float32 of length 1.
        """
        pool, blob = max(4 * count, 16), _blob(vector)
        scores: dict[int, float] = {}
        with self._db:  # one state of the file for all reads
            near = (
                "SELECT id FROM vectors WHERE id IN (SELECT id FROM signs ORDER BY"
                " vec_distance_hamming(vec_bit(bits), vec_quantize_binary(?)), id LIMIT ?)"
                " ORDER BY vec_distance_l2(vector, ?), id LIMIT ?"
            )
            ranked: list[Any] = [self._db.execute(near, (blob, max(SCANNED, 8 * pool), blob, pool)).fetchall()]
            said_words = dict.fromkeys(re.findall(r"\w+", query.casefold()))
            asked = self._rarest(([word for word in said_words if word not in _COMMON] or list(said_words))[:WORDS])
            if asked:
                match = " OR ".join(f'"{word}"' for word in asked)
                said = "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words), rowid LIMIT ?"
                ranked.append(self._db.execute(said, (match, pool)).fetchall())
            for found in ranked:
                for rank, (number,) in enumerate(found, 1):
                    scores[number] = scores.get(number, 0.0) + 1.0 / (RANK + rank)
            best = sorted(scores, key=lambda number: (-scores[number], number))[:count]
            hits = [self._hit(number, blob) for number in best]
        return hits

    def _rarest(self, words: Sequence[str]) -> list[str]:
        """The rarest of these words, as many as are in ``RANKED`` chunks together; one at least.

        BM25 ranks every chunk with any of its words, and gives those that many have the least weight.
        """
        count = "SELECT count(*) FROM (SELECT 1 FROM words WHERE words MATCH ? LIMIT ?)"
        counts = {word: int(self._db.execute(count, (f'"{word}"', RANKED)).get) for word in words}
        found = list(accumulate(sorted(counts.values())))
        return sorted(words, key=lambda word: counts[word])[: max(1, sum(total <= RANKED for total in found))]

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
        # cos = 1 - d^2 / 2 for vectors of length 1 at distance d
        return Hit(key, text, 1.0 - distance**2 / 2.0, [Holder(*row) for row in holders])


def _blob(vector: np.ndarray) -> bytes:
    return np.ascontiguousarray(vector, np.float32).tobytes()


def _checksum(key: str, vector: bytes) -> bytes:
    return hashlib.blake2b(key.encode() + vector, digest_size=8).digest()
