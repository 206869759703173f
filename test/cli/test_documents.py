# SPDX-License-Identifier: Apache-2.0
"""`dsd documents`: add, list, search and remove; a mistake gives one sentence."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hashed_words import HashedWords
from in_process import dsd

from dsd_ros.cli import shared
from dsd_ros.dragon.documents import embedding
from dsd_ros.paths import DOCUMENTS_FILE, data_directory


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Another embedding, quick to load, and a person without documents."""
    monkeypatch.setattr(embedding, "SentenceEncoder", HashedWords)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "chairs.md").write_text("# Chairs\n\nThe Viola chair is red.\n")
    (folder / "lift.txt").write_text("The lift carries eight persons.\n")
    return folder


def test_documents_are_added_found_and_removed(capsys, notes):
    code, out, _ = dsd(capsys, "documents", "add", str(notes))
    assert code == 0 and out.endswith("2 chunks in all\n") and out.count("added     ") == 2
    assert (data_directory() / "documents" / DOCUMENTS_FILE).is_file()
    (notes / "lift.txt").write_text("The lift is broken.\n")
    code, out, _ = dsd(capsys, "documents", "add", str(notes))
    assert f"unchanged {notes / 'chairs.md'}" in out and f"added     {notes / 'lift.txt'}" in out
    code, out, _ = dsd(capsys, "documents", "list")
    assert f"     1 {notes / 'chairs.md'}\n" in out and out.endswith("2 documents, 2 chunks\n")
    code, out, _ = dsd(capsys, "documents", "search", "which chair is red", "--count", "1")
    assert "The Viola chair is red.\n" in out and f"{notes / 'chairs.md'} (Chairs)" in out
    code, out, _ = dsd(capsys, "documents", "remove", str(notes / "lift.txt"), "other.md")
    assert code == shared.EXIT_GOAL_MISSED and "not there: other.md" in out


def test_no_model_is_loaded_to_list_and_to_remove(capsys, notes, monkeypatch):
    monkeypatch.setattr(embedding, "SentenceEncoder", None)
    assert dsd(capsys, "documents", "list")[:2] == (0, "0 documents, 0 chunks\n")
    monkeypatch.setattr(embedding, "SentenceEncoder", HashedWords)
    assert dsd(capsys, "documents", "add", str(notes))[0] == 0  # into the store that was listed before
    monkeypatch.setattr(embedding, "SentenceEncoder", None)
    assert dsd(capsys, "documents", "list")[1].endswith("2 documents, 2 chunks\n")
    assert dsd(capsys, "documents", "remove", str(notes / "lift.txt"))[:2] == (0, f"removed {notes / 'lift.txt'}\n")
    script = (
        "import sys; from dsd_ros.cli.main import main; main(['documents', 'list']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


def test_the_answers_as_json(capsys, notes, tmp_path):
    store = ("--store", str(tmp_path / "store"))
    _, out, _ = dsd(capsys, "documents", "add", str(notes), *store, "--json", "-")
    assert json.loads(out)["chunks"] == 2
    _, out, _ = dsd(capsys, "documents", "search", "chair", *store, "--json", "-")
    best = json.loads(out)["found"][0]
    assert best["text"] == "The Viola chair is red." and best["heading"] == "Chairs"
    assert best["relevance"] == pytest.approx(best["cosine"] / 0.05)
    _code, out, _ = dsd(capsys, "documents", "list", *store, "--json")
    assert [row["chunks"] for row in json.loads(out)["documents"]] == [1, 1]


def test_slips_are_one_sentence(capsys, notes, tmp_path):
    (tmp_path / "file").touch()
    (notes / "latin.txt").write_bytes(b"Gr\xfc\xdfe")
    for line, said in (
        (["add", str(tmp_path / "none.md")], "check its name"),
        (["add", str(notes / "latin.txt")], "is not UTF-8"),
        (["search", " "], "the query is empty"),
        (["list", "--store", str(tmp_path / "file")], "name a folder that is yours"),
    ):
        code, out, err = dsd(capsys, "documents", *line)
        assert (code, out) == (shared.EXIT_BAD_INPUT, "")
        assert err.startswith("dsd: ") and err.count("\n") == 1 and said in err
    code, out, _ = dsd(capsys, "documents", "search", "chair")
    assert code == 0 and "there are no documents" in out


def test_a_relative_data_home_is_ignored_as_the_specification_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_directory() == tmp_path / ".local" / "share" / "dsd_ros"


def test_a_file_that_cannot_be_used_is_named_and_the_rest_is_added(capsys, notes):
    (notes / "latin.txt").write_bytes(b"Gr\xfc\xdfe")
    code, out, _ = dsd(capsys, "documents", "add", str(notes))
    assert code == shared.EXIT_GOAL_MISSED and f"refused   {notes / 'latin.txt'} is not UTF-8" in out
    assert out.endswith("2 chunks in all\n")
    (notes / "lift.txt").unlink()
    code, out, _ = dsd(capsys, "documents", "add", str(notes))  # what has gone from a folder goes from the store
    assert f"removed   {notes / 'lift.txt'}" in out and out.endswith("1 chunks in all\n")
