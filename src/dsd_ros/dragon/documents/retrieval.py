# SPDX-License-Identifier: Apache-2.0
"""The interface between a store of documents and those who ask it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TEMPERATURE = 0.05  # of relevances: the embedding model was trained with a softmax over 20 cos


@dataclass(frozen=True)
class Retrieved:
    """A document found; ``key`` identifies its text, and the softmax of ``relevance``, R(d, x), weights documents.

    ``source`` names it to people, without its folder; it may leave its side, as the text never does.
    """

    key: str
    text: str
    relevance: float
    source: str = ""


class Retriever(Protocol):
    """Finds documents, from any thread."""

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        """Up to ``count`` documents, the most relevant first."""


def scale_of(retriever: Retriever) -> str:
    """The name of the scale of a retriever's relevances (``Store.fingerprint``), "" if it has none.

    Relevances of one scale may be compared, whichever store they come from.
    """
    return str(getattr(retriever, "fingerprint", ""))
