"""Two tiny sides for tests: documents by hand, and how a table or a tiny model is asked about one."""

from __future__ import annotations

from dsd_ros.rag.prompts import Pieces
from dsd_ros.rag.retrieval import Retrieved


class Shelf:
    """Always the same documents, in their order."""

    def __init__(self, *documents: tuple[str, float]) -> None:
        self.documents = [Retrieved(text, text, relevance) for text, relevance in documents]
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
