# SPDX-License-Identifier: Apache-2.0
"""Two tiny sides for tests: handwritten documents, and prompts for a table or a tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsd_ros.decoding.aggregation import mixture
from dsd_ros.dragon.documents.retrieval import Retrieved
from dsd_ros.dragon.mixture import LocalMixture
from dsd_ros.dragon.prompts import Asking, Pieces
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.dragon.state import own_choice


class Shelf:
    """Always the same documents, in their order."""

    def __init__(self, *documents: tuple[str, float]) -> None:
        self.documents = [Retrieved(text, text, relevance, f"{text[:9]}.md") for text, relevance in documents]
        self.asked: list[str] = []

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        self.asked.append(query)
        return self.documents[:count]


class Letters:
    """A table's prompt: two tokens for the document, one for the question."""

    def __init__(self, size: int = 8) -> None:
        self.size = size

    def pieces(self, document: str, question: str) -> Pieces:
        first = sum(map(ord, document)) % (self.size - 1)
        return Pieces([first, len(document) % (self.size - 1)], [len(question) % (self.size - 1)])


def in_one_thread(
    device: tuple[Any, Asking, Shelf],
    cloud: tuple[Any, Asking, Shelf],
    settings: AggregationSettings,
    question: str,
    reply: int = 1,
) -> list[int]:
    """An answer from both mixtures, token by token: what all that travels has to come to."""
    sides: Sequence[LocalMixture] = [
        LocalMixture(model, asking, question, shelf.documents[: settings.documents], settings.temperature)
        for model, asking, shelf in (device, cloud)
    ]  # fmt: skip
    ends = device[0].eos_token_ids | cloud[0].eos_token_ids
    tokens: list[int] = []
    while len(tokens) < settings.max_tokens and not (tokens and tokens[-1] in ends):
        for side in sides:
            side.follow(tokens)
        ours, theirs = (side.next() for side in sides)
        p = mixture(ours.p, theirs.p, ours.log_weight, theirs.log_weight)
        tokens.append(own_choice(settings, reply, p, len(tokens)))
    return tokens
