# SPDX-License-Identifier: Apache-2.0
"""A store finds its documents, and survives kills, other models and other processes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hashed_words import HashedWords

import dsd_ros.dragon.documents.store as store_module
from dsd_ros.dragon.documents.chunking import Document, DocumentError, key_of
from dsd_ros.dragon.documents.store import Store, StoreError, open_documents
from dsd_ros.paths import DOCUMENTS_FILE

ROOT = Path(__file__).resolve().parents[3]
PLACES = [str(ROOT / "test" / "support"), str(ROOT / "src")]
NOTES = {
    "chairs": "# Chairs\n\nThe Viola chair is red. The Bruno chair is blue.",
    "owner": "The chair that its owner likes is the Viola.",
    "lift": "The lift carries eight persons.",
}


def fill(store: Store, notes: dict[str, str] = NOTES) -> Store:
    for source, text in notes.items():
        store.add(Document(source, text))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "store", HashedWords()) as store:
        fill(store)
    return tmp_path / "store"


def texts(store: Store, query: str, count: int = 3) -> list[str]:
    return [found.text for found in store.retrieve(query, count)]


def test_what_fits_best_comes_first_with_its_cosine_over_the_temperature(folder):
    encoder = HashedWords()
    with Store(folder, encoder) as store:
        found = store.retrieve("which chair does the owner like", 3)
        query, *rows = encoder.encode(["which chair does the owner like", *(one.text for one in found)])
        cosines = [float(query @ row) for row in rows]
        assert cosines == sorted(cosines, reverse=True) and len(found) == 3
        np.testing.assert_allclose([one.relevance for one in found], np.array(cosines) / 0.05, atol=1e-4)
        assert [one.key for one in found] == [key_of(one.text) for one in found]


def test_relevance_does_not_depend_on_what_else_there_is(folder, tmp_path):
    with Store(folder, HashedWords()) as full, Store(tmp_path / "other", HashedWords()) as single:
        single.add(Document("owner", NOTES["owner"]))
        assert single.fingerprint == full.fingerprint
        (alone,) = single.retrieve("the Viola", 1)
        beside = {one.key: one for one in full.retrieve("the Viola", 3)}
        assert beside[alone.key].relevance == pytest.approx(alone.relevance, abs=1e-6)


def test_the_same_text_is_found_once_whatever_documents_hold_it(folder):
    with Store(folder, HashedWords()) as store:
        assert not store.add(Document("owner", NOTES["owner"]))
        assert store.add(Document("copy", NOTES["owner"]))
        assert texts(store, "owner likes").count(NOTES["owner"]) == 1
        assert store.remove("owner") and not store.remove("owner")
        assert NOTES["owner"] in texts(store, "owner likes")  # the copy still says it


def test_a_changed_document_replaces_its_chunks_and_only_the_new_are_embedded(folder):
    encoder = HashedWords()
    lines = [f"# {n}\n\nThing number {n} is here." for n in range(9)]
    with Store(folder, encoder) as store:
        store.add(Document("things", "\n\n".join(lines)))
        encoder.encoded.clear()
        lines[4] = "# 4\n\nThing number four is gone."
        assert store.add(Document("things", "\n\n".join(lines)))
        assert encoder.encoded == ["Thing number four is gone."]
        assert [one.chunks for one in store.documents() if one.source == "things"] == [9]
        assert "Thing number 4 is here." not in texts(store, "thing number 4 is here", 20)
        assert store.texts("things")[3:5] == ["Thing number 3 is here.", "Thing number four is gone."]


def test_any_words_may_be_asked_for(folder):
    with Store(folder, HashedWords()) as store:
        for query in ('"', "NEAR(a, b) OR *", "text: ^x -y", "ÄÖ " * 9000, "\0'--"):
            assert len(store.retrieve(query, 2)) == 2
        for query, count, said in ((" ", 1, "query is empty"), ("x", 0, "ask for 1 or more")):
            with pytest.raises(ValueError, match=said):
                store.retrieve(query, count)
    with Store(folder.parent / "empty", HashedWords()) as empty:
        assert empty.retrieve("anything", 3) == []


def test_only_the_owner_may_read_the_folder(folder):
    assert folder.stat().st_mode & 0o077 == 0


def test_a_store_that_cannot_be_used_is_refused_with_the_remedy(tmp_path, folder):
    with pytest.raises(StoreError, match="made with another embedding model; delete it and add"):
        Store(folder, HashedWords("other"))
    path = folder / DOCUMENTS_FILE
    path.write_bytes(b"no database " * 999)
    with pytest.raises(StoreError, match="is damaged .*; delete it and add its documents again"):
        Store(folder, HashedWords())
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used .*; name a folder that is yours"):
        Store(tmp_path / "file", HashedWords())


def test_a_document_without_a_sentence_is_refused(folder):
    with Store(folder, HashedWords()) as store, pytest.raises(DocumentError, match="holds no sentence"):
        store.add(Document("x", "# Only a heading\n"))


def test_an_open_store_sees_what_others_do(folder):
    with Store(folder, HashedWords()) as reader, Store(folder, HashedWords()) as writer:
        writer.add(Document("new", "The garden is wet."))
        assert texts(reader, "garden wet", 1) == ["The garden is wet."]


WRITER = """
import sys
from pathlib import Path
from hashed_words import HashedWords
from dsd_ros.dragon.documents.chunking import Document
from dsd_ros.dragon.documents.store import Store
store = Store(Path(sys.argv[1]), HashedWords())
for n in range(int(sys.argv[2]), 100_000):
    text = "\\n\\n".join(f"# {part}\\n\\nPart {part} of note {n}." for part in range(300))
    store.add(Document(f"note {n}", text))
    print(n, flush=True)
"""


def writer(folder: Path, start: int) -> subprocess.Popen:
    path = f"import sys; sys.path[:0] = {PLACES!r}\n"
    command = [sys.executable, "-c", path + WRITER, str(folder), str(start)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_writer_leaves_a_store_that_is_whole_beside_a_reader(folder):
    with Store(folder, HashedWords()) as reader:
        for round_ in range(3):
            child = writer(folder, 1000 * round_)
            assert child.stdout is not None
            said = [int(child.stdout.readline())]
            for _ in range(4 * round_ + 1):  # while it writes, documents are there whole or not at all
                assert {one.chunks for one in reader.documents() if "note" in one.source} == {300}
                assert texts(reader, "lift carries persons", 1) == [NOTES["lift"]]
            child.kill()
            said += [int(line) for line in child.stdout.read().split()]
            child.wait()
            with Store(folder, HashedWords()) as store:
                listed = {one.source: one.chunks for one in store.documents()}
                notes = {f"note {n}" for n in said}
                assert notes <= listed.keys() and {listed[name] for name in notes} == {300}
                assert len(store) == 3 + sum(one for name, one in listed.items() if "note" in name)


def test_the_shipped_documents_answer_the_demos_question():
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    encoder = SentenceEncoder()
    found = {}
    for side in ("robot", "cloud"):
        with open_documents(ROOT / "config" / "documents" / side, encoder) as store:
            found[side] = texts(store, "bring me to the chair I like", 2)
            if side == "cloud":  # a name that the embedding does not know is found by its letters
                store.add(Document("parts", "Order number QX77 is a castor."))
                assert "QX77" in " ".join(texts(store, "QX77", 1))
    assert found["robot"][0] == "The chair that its owner likes is the Viola."
    assert "The Viola chair is red." in found["cloud"][0]


def test_a_locked_store_is_named_with_the_remedy(folder, monkeypatch):
    monkeypatch.setattr(store_module, "WAIT_S", 0.05)
    with Store(folder, HashedWords()) as store:
        other = sqlite3.connect(folder / DOCUMENTS_FILE)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=rf"{DOCUMENTS_FILE} cannot be used .*locked.*; .* wait until"):
            store.add(Document("b", "The lamp is off."))
        other.close()
        assert store.add(Document("b", "The lamp is off."))
