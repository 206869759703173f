"""A verifier that answers questions as well: what it takes to give one documents and a text model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsd_ros.dragon.documents.places import measured_in, open_documents
from dsd_ros.dragon.documents.store import Store
from dsd_ros.dragon.measuring import delay_of
from dsd_ros.dragon.profiler import DecodeDelay
from dsd_ros.dragon.server import AggregationService, ServiceSettings, WithDocuments
from dsd_ros.dragon.settings import AggregationSettings
from dsd_ros.vlm.loading import ModelSettings, load_model


class _WithStore(WithDocuments):
    """Closes the store as well."""

    def __init__(self, engine: Any, service: AggregationService, store: Store) -> None:
        super().__init__(engine, service)
        self._store = store

    def held_sessions(self) -> tuple[int, int]:
        """Of the engine: sessions whose robot's link is up, and whose is down."""
        held: tuple[int, int] = self.engine.held_sessions()
        return held

    def queue(self) -> tuple[int, int]:
        """Of the engine: turns that wait, and the bytes they hold."""
        waiting: tuple[int, int] = self.engine.queue()
        return waiting

    def close(self, timeout: float = 1.0) -> bool:
        done = super().close(timeout)
        self._store.close()
        return done


@dataclass
class Documents:
    """Text model, its pace and a store, loaded; ``serve`` puts them behind any number of engines, one after another."""

    model: Any
    folder: Path
    delay: DecodeDelay | None = None

    @classmethod
    def load(cls, folder: Path, settings: ModelSettings) -> Documents:
        """ModelError, DocumentError, StoreError or EmbeddingError for what cannot be used."""
        open_documents(folder).close()  # what is wrong with them is said now
        model = load_model(settings)
        return cls(model, folder, delay_of(model, AggregationSettings().documents, measured_in(folder)))

    def serve(self, make_engine: Callable[[], Any], settings: ServiceSettings) -> WithDocuments:
        """Both behind one object, which owns the store and the engine that is made."""
        store = open_documents(self.folder)
        try:
            service = AggregationService(self.model, store, settings, relevance=store.relevance, delay=self.delay)
        except BaseException:
            store.close()
            raise
        try:
            return _WithStore(make_engine(), service, store)
        except BaseException:
            service.close()
            store.close()
            raise
