"""What everything has that answers questions on the device, by whatever method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from dsd_ros.dragon.documents.retrieval import Retriever
from dsd_ros.dragon.mixture import KeptDocuments
from dsd_ros.dragon.prompts import Asking, DocumentPrompt
from dsd_ros.dragon.settings import AggregationSettings


class Asker(ABC):
    """A model, its documents, and how it is asked about them; a context that closes."""

    def __init__(
        self,
        model: Any,
        retriever: Retriever,
        settings: AggregationSettings | None,
        asking: Asking | None,
        kept: KeptDocuments | None,
    ) -> None:
        self.settings = settings or AggregationSettings()
        self.model = model
        self.retriever = retriever
        self.asking: Asking = asking or DocumentPrompt(model)
        self.kept = kept if kept is not None else KeptDocuments()
        self.replies = 0  # questions so far

    @abstractmethod
    def close(self) -> None:
        """End an answer under way. The channel is the caller's to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
