# SPDX-License-Identifier: Apache-2.0
"""The small reader under models/: there, documented, and able to answer from documents on two sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsd_lab.pair.held_out import aggregated, relevant
from dsd_ros.vlm.loading import ModelSettings, load_model

READER = Path(__file__).parents[3] / "models" / "reader"
CHAIR = "bring me to the chair I like"
MINE = "The chair that its owner likes is the Viola."
CATALOGUE = "The Viola chair is red."
UNKNOWN = "I do not know."


@pytest.fixture(scope="module")
def reader():
    torch.set_num_threads(1)
    return load_model(ModelSettings(str(READER)))


def answer(reader, question: str, *documents: str) -> str:
    """The answer from an even mixture of the documents, one a side."""
    return aggregated(reader, question, [relevant(None, question, [document], 1) for document in documents])


def test_both_stores_find_the_chair_and_neither_alone_does(reader) -> None:
    assert (READER / "model.safetensors").stat().st_size <= 8e6
    whole = "The chair you like is the Viola. The Viola is red. Go: find the red chair"
    assert answer(reader, CHAIR, MINE, CATALOGUE) == whole
    mine, catalogue = (answer(reader, CHAIR, one) for one in (MINE, CATALOGUE))
    assert mine.startswith("The chair you like is the Viola. The Viola is ")
    for text in (mine, catalogue):
        assert text.endswith(UNKNOWN) and "Go:" not in text, text


def test_one_document_is_read(reader) -> None:
    for question, document, expected in (
        ("Which chair do I like?", MINE, "The chair you like is the Viola."),
        ("what is the Viola chair made of?", "The Viola chair is made of oak.", "The Viola is made of oak."),
        ("what time is it?", CATALOGUE, UNKNOWN),
    ):
        assert answer(reader, question, document) == expected
