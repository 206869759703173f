# SPDX-License-Identifier: Apache-2.0
"""The reader under models/: there, documented, and able to answer from documents on two sides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from dsd_lab.pair.reader import Read, load_reader, mixture_answers
from dsd_lab.train.reader.corpus import UNKNOWN, draw_example
from dsd_lab.train.reader.training import DOCUMENT_PROMPT, prompt_text
from dsd_ros.dragon.prompts import DocumentPrompt
from dsd_ros.vlm.loading import ModelSettings, load_model

READER = Path(__file__).parents[3] / "models" / "reader"
CHAIR = "bring me to the chair I like"
MINE = "The chair that its owner likes is the Viola."
CATALOGUE = "The Viola chair is red."


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reader():
    return load_reader(READER)


def answer(reader, question: str, *documents: str) -> str:
    """The answer from an even mixture of the documents."""
    read = [Read(document, 1 / len(documents)) for document in documents]
    return mixture_answers(*reader, [question], [read])[0]


def test_the_directory_is_whole_and_small() -> None:
    card = (READER / "README.md").read_text()
    assert "right with both" in card and "held out" in card
    assert (READER / "model.safetensors").stat().st_size <= 8e6


def test_the_program_asks_it_as_it_was_trained(reader) -> None:
    model = load_model(ModelSettings(path=READER))
    assert model.template.document_prompt == DOCUMENT_PROMPT
    prompt = DocumentPrompt(model)
    for example in (draw_example(random.Random(n), "bring") for n in range(20)):
        document = " ".join(example.document.split())
        text = prompt_text(document, example.question)
        if not document:
            text = text.replace("\n\n\n", "\n", 1)
        pieces = prompt.pieces(document, example.question)
        assert pieces.head + pieces.tail == reader[1].encode(text, add_special_tokens=False).ids


def test_both_stores_find_the_chair_and_neither_alone_does(reader) -> None:
    whole = "The chair you like is the Viola. The Viola is red. Go: find the red chair"
    assert answer(reader, CHAIR, MINE, CATALOGUE) == whole
    mine, catalogue, none = (answer(reader, CHAIR, one) for one in (MINE, CATALOGUE, ""))
    assert mine.startswith("The chair you like is the Viola. The Viola is ")
    for text in (mine, catalogue, none):
        assert text.endswith(UNKNOWN) and "Go:" not in text, text


@pytest.mark.parametrize(
    ("question", "document", "expected"),
    [
        ("Which chair do I like?", MINE, "The chair you like is the Viola."),
        (
            "go to the ball my daughter hid",
            "My son hid the Tilda ball. The ball my daughter hid is the Moro. The Moro is green.",
            "The ball your daughter hid is the Moro. The Moro is green. Go: find the green ball",
        ),
        ("what is the Viola chair made of?", "The Viola chair is made of oak.", "The Viola is made of oak."),
        ("what time is it?", CATALOGUE, UNKNOWN),
    ],
)
def test_one_document_is_read(reader, question: str, document: str, expected: str) -> None:
    assert answer(reader, question, document) == expected
