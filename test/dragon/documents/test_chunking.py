# SPDX-License-Identifier: Apache-2.0
"""Text files become documents, and documents become chunks of whole sentences."""

from __future__ import annotations

import os
from time import process_time

import pytest
from hypothesis import given, settings, strategies as st

from dsd_ros.dragon.documents.chunking import MAX_BYTES, Document, DocumentError, chunks, files_in, read_document


def words(text: str) -> int:
    return len(text.split())


def texts(text: str, size: int = 12, overlap: int = 4) -> list[str]:
    return [chunk.text for chunk in chunks(text, words, size, overlap)]


def test_chunks_are_whole_sentences_and_overlap():
    said = "On 2026-11-22 at 10:15 I saw the red chair at x 1.2 m, y -0.4 m."
    assert texts(f"{said} Then it rained.", size=16, overlap=0) == [said, "Then it rained."]
    assert texts("#\na", overlap=0) == ["# a"]  # a lone mark makes no heading of the next line
    text = "One two three four. Five six seven. Eight nine ten eleven.\nTwelve thirteen. Fourteen fifteen sixteen."
    assert texts(text) == [
        "One two three four. Five six seven. Eight nine ten eleven.",
        "Eight nine ten eleven. Twelve thirteen. Fourteen fifteen sixteen.",
    ]
    assert texts(text, overlap=0)[1] == "Twelve thirteen. Fourteen fifteen sixteen."


def test_sections_are_kept_apart_and_marks_left_out():
    text = "# Chairs #\n\n- The Viola is red.\n- The Bruno\n  is blue.\n\n## Balls\nThe Moro is green."
    found = [(chunk.heading, chunk.text) for chunk in chunks(text, words)]
    assert found == [("Chairs", "The Viola is red. The Bruno is blue."), ("Balls", "The Moro is green.")]


@settings(max_examples=50)
@given(st.text(alphabet="ab c.\n#-!é ", max_size=300), st.integers(2, 9), st.integers(0, 8))
def test_no_chunk_is_too_long_and_no_word_is_lost(text, size, overlap):
    overlap = min(overlap, size - 1)
    found = list(chunks(text, words, size, overlap))
    assert all(0 < words(chunk.text) <= size for chunk in found)
    said = {word for chunk in found for word in chunk.text.split()}
    said |= {word for chunk in found for word in chunk.heading.split()}
    marks = set("#-")
    left = {word for word in text.split() if set(word) - marks}
    # A heading without a text below it is no chunk; all else is in one.
    headings = {w for line in text.split("\n") if line.startswith("#") for w in line.split()}
    assert left - headings <= said


def test_a_sentence_without_end_is_cut_between_words_and_a_word_without_end_anywhere():
    long = " ".join(f"w{n}" for n in range(50))
    parts = texts(long, size=12, overlap=0)
    assert " ".join(parts) == long and all(words(part) <= 12 for part in parts)
    pieces = [chunk.text for chunk in chunks("x" * 100, len, 16, 0)]
    assert "".join(pieces) == "x" * 100 and max(map(len, pieces)) <= 16


def test_an_overlap_as_long_as_a_chunk_is_refused():
    with pytest.raises(ValueError, match="overlap of 12 tokens needs"):
        list(chunks("A b.", words, 12, 12))


def test_what_is_no_text_is_refused_by_name(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Gr\xfc\xdfe".encode("latin-1"))
    with pytest.raises(DocumentError, match=r"latin.txt is not UTF-8 \(byte 2\); convert it"):
        read_document(latin)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"a\0b")
    with pytest.raises(DocumentError, match="binary.txt holds control characters"):
        read_document(binary)
    with pytest.raises(DocumentError, match="larger than 16 MiB; split it"):
        Document("x", "a" * (MAX_BYTES + 1))
    named = tmp_path / os.fsdecode(b"gr\xfcn.md")
    named.write_text("B.")
    with pytest.raises(DocumentError, match="is not UTF-8; rename the file"):
        read_document(named)


def test_folders_are_searched_and_other_files_refused(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/two.md", "one.txt", "picture.png"):
        (tmp_path / name).write_text("A.")
    found = files_in([tmp_path, tmp_path / "one.txt"])
    assert [path.name for path in found] == ["two.md", "one.txt"]
    (tmp_path / "empty").mkdir()
    for name, said in (("picture.png", "save it as plain text"), ("none.txt", "no file"), ("empty", "holds no")):
        with pytest.raises(DocumentError, match=said):
            files_in([tmp_path / name])


def test_text_between_rules_is_kept_and_only_a_yaml_mapping_is_front_matter(tmp_path):
    path = tmp_path / "notes.md"
    for front in (
        "# Monday\nThe key is under the pot.\n",
        "The key is under the pot.",
        "- the pot\n- the key",
        "a: [b",
    ):
        path.write_text(f"---\n{front}\n---\n# Tuesday\nThe charger is in the kitchen.\n")
        assert front in read_document(path).text
    texts = [chunk.text for chunk in chunks("---\nA pot.\n\n***\nA cup.\n_ _ _\n", len)]
    assert texts == ["A pot. A cup."]
    path.write_bytes(b"\xef\xbb\xbf---\r\nplace: 'hall'\r\ntime: 10:30\r\ntags: [a, b]\r\n---\r\nThe lamp is on.\r\n")
    assert read_document(path) == Document(str(path), "The lamp is on.\n")


def test_no_line_takes_more_than_linear_time():
    n = 200_000
    lines = ["# a" + " " * n + "x", "# " + "# " * n, " " * n + "x", "." + '"' * n, "- " * n, "#" * n]
    fronts = ["---\n" + "a: \n" * n, "---\n" + "\n---x" * n]
    began = process_time()
    for text in (*lines, *fronts):
        assert list(chunks(text, lambda part: 1)) is not None
    assert process_time() - began < 10.0  # cubic time took 13 s for 1500 blanks


def test_a_folder_names_what_it_skips(tmp_path, caplog):
    for name in ("Readme.MD", "LIST.TXT", "view.png"):
        (tmp_path / name).write_text("A.")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "loop.md").symlink_to(tmp_path / "loop.md")
    os.mkfifo(tmp_path / "pipe.md")
    assert [path.name for path in files_in([tmp_path])] == ["LIST.TXT", "Readme.MD"]
    assert f"left out of {tmp_path}: {tmp_path / 'view.png'}" in caplog.text
