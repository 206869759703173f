"""What is asked of a store of documents: the most relevant ones for a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Retrieved:
    """A document found.

    key: stands for exactly this text. relevance: R(d, x), on the scale of natural logarithms: the
    weights of documents are the softmax of theirs.
    """

    key: str
    text: str
    relevance: float


class Retriever(Protocol):
    """What finds documents; may be called from any thread."""

    def retrieve(self, query: str, count: int) -> list[Retrieved]:
        """Up to ``count`` documents, the most relevant first."""
        ...


def scale_of(retriever: Retriever) -> str:
    """What a retriever calls the scale of its relevances (``store.Store.fingerprint``); "" where it has no name.

    Relevances of one scale may be compared, whoever found them.
    """
    return str(getattr(retriever, "fingerprint", ""))
