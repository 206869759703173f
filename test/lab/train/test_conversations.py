# SPDX-License-Identifier: Apache-2.0
"""Reading conversations: both shapes of turns, images in their places, bad records named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsd_lab.train.exits.conversations import ConversationError, read_conversations


def write(path: Path, *records: object) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": name, "value": value} for name, value in pairs]


@pytest.fixture
def picture(tmp_path: Path) -> str:
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((60, 80, 3), np.uint8)).save(tmp_path / "images" / "a.png")
    return "images/a.png"


def test_llava_and_openai_shapes_read_alike(tmp_path: Path, picture: str) -> None:
    question, answer = "How far is the chair?", "About 1.2 meters."
    path = write(
        tmp_path / "data.jsonl",
        {"image": picture, "conversations": said(("human", f"<image>\n{question}"), ("gpt", answer))},
        "",
        {
            "images": [picture],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "index": 0, "text": None},
                        {"type": "text", "text": question, "index": None},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ],
        },
    )
    one, two = read_conversations(path)
    assert one.turns == two.turns
    assert one.turns[0].parts == (None, question)
    assert one.images == two.images == (tmp_path / picture,)
    assert one.where == "line 1" and two.where == "line 3"
    assert one.turns[0].as_message() == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": question}],
    }
    assert one.turns[1].as_message() == {"role": "assistant", "content": answer}


def test_an_unmarked_image_follows_the_first_question(tmp_path: Path, picture: str) -> None:
    record = {"images": picture, "conversations": said(("user", "What is it?"), ("gpt", "A chair."))}
    (found,) = read_conversations(write(tmp_path / "data.jsonl", record))
    assert found.turns[0].parts == ("What is it?", None)


def test_sharegpt_reads_several_rounds_and_drops_a_reply_without_question(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = said(("gpt", "... and so on"), ("human", "Hi"), ("gpt", "Hello"), ("human", "?"))
    path.write_text(json.dumps([{"id": "x", "conversations": [*turns, *said(("gpt", "!"))]}]))
    (found,) = read_conversations(path, images=False)
    assert [turn.role for turn in found.turns] == ["user", "assistant"] * 2
    assert found.where == "record 1"


BAD = {
    "not JSON": '{"conversations": [',
    "not a JSON object": [1, 2],
    "no list": {"text": "hello"},
    "no reply": {"conversations": said(("human", "Hi"))},
    "neither user": {"conversations": said(("human", "Hi"), ("narrator", "He said nothing"))},
    "follows one of user": {"conversations": said(("human", "Hi"), ("human", "Hi"), ("gpt", "Yes"))},
    "is empty": {"conversations": said(("human", "Hi"), ("gpt", "  "))},
    "not text": {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "x"}]},
    "does not exist": {"image": "no.png", "conversations": said(("human", "Hi"), ("gpt", "Yes"))},
    "marks 1 images": {"conversations": said(("human", "<image> Hi"), ("gpt", "Yes"))},
    "shows an image": {"conversations": said(("human", "Hi"), ("gpt", "<image>"))},
    "not named by its path": {"image": 7, "conversations": said(("human", "Hi"), ("gpt", "Yes"))},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_record_is_skipped_and_named_by_its_line(tmp_path: Path, reason: str) -> None:
    good = {"conversations": said(("human", "Hi"), ("gpt", "Hello"))}
    warnings: list[str] = []
    path = write(tmp_path / "data.jsonl", good, BAD[reason], good)
    found = read_conversations(path, warn=warnings.append)
    assert [c.where for c in found] == ["line 1", "line 3"]
    (warning,) = warnings
    assert "data.jsonl, line 2 is skipped" in warning and reason in warning


def test_many_bad_records_are_counted(tmp_path: Path) -> None:
    good = {"conversations": said(("human", "Hi"), ("gpt", "Hello"))}
    warnings: list[str] = []
    found = read_conversations(write(tmp_path / "data.jsonl", good, *["{"] * 9), warn=warnings.append)
    assert len(found) == 1 and len(warnings) == 6 and "9 records were skipped" in warnings[-1]


def test_a_text_model_skips_what_shows_images(tmp_path: Path, picture: str) -> None:
    record = {"image": picture, "conversations": said(("human", "Hi"), ("gpt", "Yes"))}
    with pytest.raises(ConversationError, match="no usable conversation"):
        read_conversations(write(tmp_path / "d.jsonl", record), images=False, warn=lambda _: None)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversationError, match="cannot be read"):
        read_conversations(tmp_path / "none.jsonl")
    (tmp_path / "a.json").write_text('{"conversations": []}')
    with pytest.raises(ConversationError, match="JSON list"):
        read_conversations(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}\n{}")
    with pytest.raises(ConversationError, match="name it .jsonl"):
        read_conversations(tmp_path / "b.json")
    (tmp_path / "c.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConversationError, match="cannot be read"):
        read_conversations(tmp_path / "c.jsonl")
