# SPDX-License-Identifier: Apache-2.0
"""A real text model whose forward passes are made once and repeated from then on, each held to a given time.

So a bench of two machines runs on one: two models side by side would wait for each other and not for the link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Tokens
from itertools import takewhile
from typing import Any

import torch

from dsd_lab.bench.pace import Pace, PacedPass
from dsd_lab.dragon.baseline_service import pack_sequence
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Feed, LayerHook, Sequence

_LIVE = 24  # sequences of the real model that are kept to go on from
_LATE = 1.1  # a pass that takes this many times its time counts as late


class Rows:
    """Logits after token ids, each computed once by a model of ``vlm.loading``. For any thread."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.computed = 0
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self._keys: dict[tuple[int, ...], bytes] = {}
        self._live: list[Sequence] = []
        self._lock = threading.Lock()

    def after(self, ids: Tokens[int]) -> torch.Tensor:
        """The logits after these ids, (vocabulary,) float32."""
        key = tuple(ids)
        with self._lock:
            if key not in self._rows:
                self.computed += 1
                self._rows[key] = self._at(key).next_logits().clone()
            return self._rows[key]

    def keys_and_values(self, ids: Tokens[int]) -> bytes:
        """The model's own keys and values of these ids."""
        key = tuple(ids)
        with self._lock:
            if key not in self._keys:
                sequence = self._at(key)
                sequence.next_logits()
                self._keys[key] = pack_sequence(sequence)
            return self._keys[key]

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._keys.clear()
            self._live.clear()

    def _at(self, ids: tuple[int, ...]) -> Sequence:
        """A sequence of these ids, made from the one that shares most with them."""

        def shared(sequence: Sequence) -> int:
            pairs = zip(sequence.tokens, ids, strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        best = max(self._live, key=shared, default=None)
        common = 0 if best is None else shared(best)
        if best is None or not common:
            best = self.model.begin()
        elif 2 * common < len(ids):
            best = best.fork()
        best.rollback(min(common, len(best.tokens)))
        best.append(ids[common:])
        self._live = [*(one for one in self._live if one is not best), best][-_LIVE:]
        return best


class _RecordedCache:
    """Takes the place of a sequence's keys and values."""

    def __init__(self, rows: Rows, ids: list[int]) -> None:
        self.ids = ids
        self._rows = rows

    @property
    def length(self) -> int:
        return len(self.ids)

    @length.setter
    def length(self, value: int) -> None:
        del self.ids[value:]

    def copy(self) -> _RecordedCache:
        return _RecordedCache(self._rows, list(self.ids))

    def to_bytes(self) -> bytes:
        return self._rows.keys_and_values(self.ids)

    def fill(self, tokens: Tokens[int], data: bytes) -> None:
        if len(data) != len(self._rows.keys_and_values(tokens)):
            raise ValueError("these keys and values are of other tokens")
        self.ids = list(tokens)


class RecordedModel:
    """One side's model; no token ends its answers. Without a ``pace`` its passes take no time of their own.

    ``reading_s``: what each token of a pass costs beyond the first of its sequence, as in a prefill.
    """

    def __init__(self, rows: Rows, name: str) -> None:
        model = rows.model
        self.name = name
        self.pace: Pace | None = None
        self.reading_s = 0.0
        self.passes = self.late = 0  # paced ones, and those that took too long
        self.eos_token_ids: frozenset[int] = frozenset()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.num_layers, self.device = model.num_layers, model.device
        self.fingerprint, self.tokenizer_fingerprint = model.fingerprint, model.tokenizer_fingerprint
        self.tokenizer, self.template = model.tokenizer, model.template
        self._rows = rows

    def begin(self) -> Sequence:
        """As ``VisionLanguageModel.begin``."""
        owner: Any = self
        cache: Any = _RecordedCache(self._rows, [])
        return Sequence(owner, cache, 0, 0, torch.empty(0))

    def decode_text(self, tokens: Tokens[int]) -> str:
        return str(self._rows.model.decode_text(tokens))

    def forward_tokens(
        self, tokens: Tokens[int], cache: Any, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """The logits after one sequence's last token alone (``rows`` 1)."""
        if rows != 1:
            raise ValueError("a recorded model has the logits after its last token only")
        return self.forward_batch([Feed(list(tokens), cache, rope_delta)], on_layer)[0]

    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
        """As ``VisionLanguageModel.forward_batch``."""
        clock = self._clock([len(feed.tokens) for feed in feeds])
        caches: list[Any] = [feed.cache for feed in feeds]
        whole = [[*cache.ids, *feed.tokens] for cache, feed in zip(caches, feeds, strict=True)]
        if max(map(len, whole)) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens; ask for a shorter answer")
        logits = [self._rows.after(ids)[None] for ids in whole]
        nothing = torch.empty(0)
        for layer in range(self.num_layers):
            if clock is not None:
                clock.layer_done(layer + 1)
            if on_layer is not None:
                on_layer(layer, nothing)
        if clock is not None:
            self.passes += 1
            self.late += time.monotonic() - clock.began > _LATE * clock.layer_seconds * self.num_layers
        for cache, ids in zip(caches, whole, strict=True):
            cache.ids[:] = ids
        return logits

    def _clock(self, counts: list[int]) -> PacedPass | None:
        if self.pace is None:
            return None
        clock = self.pace.begin(self.num_layers, len(counts))
        reading = self.reading_s * (sum(counts) - len(counts))
        return PacedPass(clock.began, clock.layer_seconds + reading / self.num_layers)
