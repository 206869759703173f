# SPDX-License-Identifier: Apache-2.0
"""A store finds its documents, and survives kills, flipped bits, other models and other processes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import apsw
import numpy as np
import pytest
from hashed_words import HashedWords

import dsd_ros.dragon.documents.index as index_module
from dsd_ros.dragon.documents.chunking import Document, DocumentError, files_in, key_of, read_document
from dsd_ros.dragon.documents.index import MANY
from dsd_ros.dragon.documents.store import Store, StoreError

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


def index_of(folder: Path) -> Path:
    (path,) = folder.glob("index-*.db")
    return path


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


def test_the_same_text_is_one_chunk_in_any_document(folder):
    with Store(folder, HashedWords()) as store:
        assert not store.add(Document("owner", NOTES["owner"]))
        assert store.add(Document("copy", NOTES["owner"], place="hall"))
        assert len(store) == 3
        (found,) = store.search("owner likes", 1)
        assert [(holder.source, holder.place) for holder in found.holders] == [("copy", "hall"), ("owner", "")]
        assert store.remove("owner") and not store.remove("owner")
        assert len(store) == 3  # the copy still says it


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
    assert len(list((folder / "texts").iterdir())) == 4


def test_where_and_when_are_kept_and_change_alone(folder):
    with Store(folder, HashedWords()) as store:
        assert store.add(Document("lift", NOTES["lift"], "hall", "2026-11-22"))
        listed = {one.source: (one.place, one.time, one.chunks) for one in store.documents()}
        assert listed["lift"] == ("hall", "2026-11-22", 1) and len(store) == 3


def test_any_words_may_be_asked_for(folder):
    with Store(folder, HashedWords()) as store:
        for query in ('"', "NEAR(a, b) OR *", "text: ^x -y", "ÄÖ " * 9000, "\0'--"):
            assert len(store.retrieve(query, 2)) == 2
        for query, count, said in ((" ", 1, "query is empty"), ("x", 0, "ask for 1 or more")):
            with pytest.raises(ValueError, match=said):
                store.retrieve(query, count)
    with Store(folder.parent / "empty", HashedWords()) as empty:
        assert empty.retrieve("anything", 3) == []


def test_words_that_too_many_chunks_have_are_left_out(folder, monkeypatch):
    with Store(folder, HashedWords()) as store:
        fill(store, {f"n{n}": f"The parcel {n} came by boat." for n in range(8)} | {"z": "The zither is in a parcel."})
        with store._index() as index:
            assert sorted(index._rarest(["parcel", "zither", "boat"])) == ["boat", "parcel", "zither"]
            monkeypatch.setattr(index_module, "RANKED", 4)
            assert index._rarest(["parcel", "zither", "boat"]) == ["zither"]
            assert len(index._rarest(["parcel", "boat"])) == 1
        assert texts(store, "zither parcel", 1) == ["The zither is in a parcel."]
        assert len(texts(store, "parcel boat", 3)) == 3


@pytest.mark.parametrize("lines", [1, 2 * MANY])
def test_what_is_removed_is_gone_from_the_disk(folder, lines):
    with Store(folder, HashedWords()) as store:
        said = [f"# {n}\n\nCombination {n} is zanzibar." for n in range(lines)]
        store.add(Document("secret", "\n\n".join(said)))
        assert len(store) == 3 + lines
        assert store.remove("secret")
    for path in folder.rglob("*"):
        assert not path.is_file() or b"zanzibar" not in path.read_bytes().lower(), path
    assert folder.stat().st_mode & 0o077 == 0


def flip(path: Path, there: bytes) -> None:
    data = bytearray(path.read_bytes())
    place = data.find(there)
    assert place >= 0
    while place >= 0:
        data[place + 2] ^= 1
        place = data.find(there)
    path.write_bytes(data)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "another file":
        path.write_bytes(b"no database " * 999)
    elif how == "a page of zeros":
        path.write_bytes(data[:8192] + bytes(8192) + data[16384:])
    else:
        vector = HashedWords().encode([NOTES["lift"]])[0].tobytes()
        flip(path, {"vector": vector, "text": b"The lift carries", "words": b"person"}[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "another file", "a page of zeros", "vector", "text", "words"])
def test_a_damaged_index_is_rebuilt_from_the_texts(folder, caplog, how):
    with Store(folder, HashedWords()) as store:
        before = store.retrieve("lift chair", 5)
    spoil(index_of(folder), how)
    with caplog.at_level(logging.WARNING), Store(folder, HashedWords()) as store:
        assert store.retrieve("lift chair", 5) == before
    assert "is rebuilt" in caplog.text
    caplog.clear()
    with Store(folder, HashedWords()):
        assert not caplog.text


def test_texts_damaged_too_are_refused_with_the_remedy(folder):
    kept = folder / "texts" / f"{key_of('owner')}.json"
    told = json.loads(kept.read_text())
    kept.write_text(json.dumps({**told, "text": "The chair that its owner likes is the Bruno."}))
    with Store(folder, HashedWords()) as store:  # the index is whole, and right
        assert texts(store, "owner", 1) == [NOTES["owner"]]
        with pytest.raises(StoreError, match="kept text .* is damaged; delete that file and add"):
            store.rebuild()
        assert len(store) == 3
    spoil(index_of(folder), "truncated")
    with pytest.raises(StoreError, match=f"{kept.name} is damaged; delete that file"):
        Store(folder, HashedWords())
    kept.unlink()
    with Store(folder, HashedWords()) as store:  # the remedy
        assert store.add(Document("owner", NOTES["owner"])) and len(store) == 3


def test_a_rebuild_would_not_forget_what_has_no_text_any_more(folder, caplog):
    (folder / "texts" / f"{key_of('owner')}.json").unlink()
    with Store(folder, HashedWords()) as store:
        assert "kept text of owner is gone" in caplog.text
        with pytest.raises(StoreError, match="kept text of owner is gone; add that document again"):
            store.rebuild()


def test_another_embedding_model_has_all_embedded_again(folder, caplog):
    other = HashedWords("other")
    shares = []
    with Store(folder, other, progress=lambda share, _: shares.append(share)) as store:
        assert "another embedding model" in caplog.text
        assert sorted(other.encoded) == sorted(texts(store, "x", 9)) and len(store) == 3
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_an_open_store_sees_what_others_do(folder):
    with Store(folder, HashedWords()) as reader, Store(folder, HashedWords()) as writer:
        writer.rebuild()
        writer.add(Document("new", "The garden is wet."))
        assert texts(reader, "garden wet", 1) == ["The garden is wet."]
        assert len(list(folder.glob("index-*.db"))) == 1


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


def test_a_killed_writer_leaves_a_store_that_is_whole_beside_a_reader(folder, caplog):
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
    assert "is rebuilt" not in caplog.text


def test_a_store_with_revisions_in_its_file_names_is_read(folder):
    for path in (folder / "texts").iterdir():
        path.rename(path.with_stem(f"{path.stem}-3"))
    index_of(folder).unlink()
    with Store(folder, HashedWords()) as store:
        assert len(store) == 3 and store.read("owner") == Document("owner", NOTES["owner"])


class Killed(BaseException):
    pass


def test_a_document_kept_but_not_indexed_is_indexed_at_the_next_opening(folder, monkeypatch):
    encoder = HashedWords()
    with Store(folder, encoder) as store:
        monkeypatch.setattr(encoder, "encode", lambda _: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            store.add(Document("owner", "The chair that its owner likes is the Bruno."))
        monkeypatch.undo()
        assert NOTES["owner"] in texts(store, "owner", 9)
    with Store(folder, HashedWords()) as store:
        assert texts(store, "owner likes", 1) == ["The chair that its owner likes is the Bruno."]
        assert len(store) == 3
    assert len(list((folder / "texts").iterdir())) == 3


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file cannot be used .*; name another folder"):
        Store(tmp_path / "file", HashedWords())
    with Store(folder, HashedWords()) as store, pytest.raises(DocumentError, match="holds no sentence"):
        store.add(Document("x", "# Only a heading\n"))


def test_the_shipped_documents_answer_the_demos_question(tmp_path):
    from dsd_ros.dragon.documents.embedding import SentenceEncoder

    encoder = SentenceEncoder()
    found = {}
    for side in ("robot", "cloud"):
        with Store(tmp_path / side, encoder) as store:
            for path in files_in([ROOT / "config" / "documents" / side]):
                store.add(read_document(path))
            found[side] = texts(store, "bring me to the chair I like", 2)
            if side == "cloud":  # a name that the embedding does not know is found by its letters
                store.add(Document("parts", "Order number QX77 is a castor."))
                assert "QX77" in " ".join(texts(store, "QX77", 1))
    assert found["robot"][0] == "The chair that its owner likes is the Viola."
    assert "The Viola chair is red." in found["cloud"][0]


def test_a_locked_store_names_the_lock_and_the_remedy(folder, monkeypatch):
    monkeypatch.setattr(index_module, "WAIT_MS", 50)
    with Store(folder, HashedWords()) as store:
        store.add(Document("a", "The lamp is on."))
        path = next(folder.glob("index-*.db"))
        other = apsw.Connection(str(path))
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=rf"{path.name} is locked by another process; wait"):
            store.add(Document("b", "The lamp is off."))
        other.execute("ROLLBACK")
        other.close()
        assert store.add(Document("b", "The lamp is off."))
