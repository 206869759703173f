# SPDX-License-Identifier: Apache-2.0
"""A small real corpus for the benches of answers from documents: Python's language reference.

It comes with Python (`pydoc_data.topics`, PSF licence). Passages are dealt out to the two sides in turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dsd_lab.report import BenchError
from dsd_ros.dragon.documents.chunking import chunks, key_of
from dsd_ros.dragon.documents.embedding import Encoder
from dsd_ros.dragon.documents.retrieval import TEMPERATURE, Retrieved

SOURCE = "the language reference of Python as pydoc_data.topics carries it (PSF licence)"
ASKED = (
    "What does the with statement do?",
    "When is the finally clause of a try statement executed?",
    "What does the global statement do?",
    "When are default parameter values of a function evaluated?",
    "How does the for statement iterate over a sequence?",
    "What does the method __enter__ of a context manager do?",
    "What is the difference between a list and a tuple?",
    "What happens when an exception is raised and no handler is found?",
)
# People's prompts are longer than their question.
QUESTIONS = tuple(
    f"{question} Explain it in one or two plain sentences for somebody who is new to Python, "
    "and tell what to look out for."
    for question in ASKED
)
_HELD_OUT = 5  # every so many topics one is for testing
_LEAST_CHARS = 80  # of a passage: headings and the like say nothing


class Corpus(NamedTuple):
    """Passages to be found, and texts that hold none of their paragraphs."""

    passages: list[str]
    held_out: list[str]


def count_tokens(model: Any) -> Callable[[str], int]:
    """A function that counts a text's tokens by the model's tokenizer."""
    return lambda text: len(model.tokenizer.encode(text, add_special_tokens=False).ids)


def read_corpus(count: Callable[[str], int], size: int) -> Corpus:
    """Passages of whole sentences, at most ``size`` tokens by ``count``; every fifth topic is held out. BenchError."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise BenchError("this Python came without pydoc_data.topics; install its documentation") from error
    seen: set[str] = set()
    kept: list[str] = []
    held_out: list[str] = []
    for number, name in enumerate(sorted(topics)):
        fresh = []
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            if len(text) >= _LEAST_CHARS and text not in seen and not text.startswith(("***", "==")):
                seen.add(text)
                fresh.append(text)
        (held_out if number % _HELD_OUT == 0 else kept).append("\n\n".join(fresh))
    passages = [chunk.text for text in kept for chunk in chunks(text, count, size, 0)]
    passages = [text for text in passages if len(text) >= _LEAST_CHARS]
    return Corpus(passages, [" ".join(text.split()) for text in held_out if text])


class Passages:
    """Passages in memory, as a ``dragon.documents.retrieval.Retriever``: cosine over the store's temperature."""

    def __init__(self, encoder: Encoder, texts: Sequence[str]) -> None:
        self._encoder, self._texts = encoder, list(texts)
        self._vectors = np.concatenate([encoder.encode(texts[at : at + 64]) for at in range(0, len(texts), 64)])

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        relevances = self._vectors @ self._encoder.encode([query])[0] / TEMPERATURE
        best = np.argsort(-relevances, kind="stable")[:count]
        return [Retrieved(key_of(self._texts[i]), self._texts[i], float(relevances[i])) for i in best]


def two_sides(encoder: Encoder, passages: Sequence[str]) -> tuple[Passages, Passages]:
    """The passages dealt out in turn: the device's and the cloud's. BenchError for fewer than two."""
    if len(passages) < 2:
        raise BenchError("no passage is that short; allow passages of more tokens")
    return Passages(encoder, passages[0::2]), Passages(encoder, passages[1::2])
