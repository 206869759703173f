"""A real text model whose forward passes are made once and repeated from then on, each held to a given time.

Two models on one machine would wait for each other and not for the link. Here what a pass gives is the model's
own, and only when it is there is held: so a bench of two machines runs on one that has other work as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Tokens
from typing import Any

import torch

from dsd_lab.bench.pace import Pace, PacedPass
from dsd_lab.dragon.baseline_service import pack_sequence
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Feed, LayerHook, Sequence

_LIVE = 24  # sequences of the real model that are gone on with
_TWINS_BELOW = 2.0  # logits, with a standard deviation of 1
_LATE = 1.1  # of its time, from which on a pass counts as late


class Rows:
    """Logits behind token ids, each computed once by a model of ``vlm.loading``. For any thread."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.computed = 0
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self._keys: dict[tuple[int, ...], bytes] = {}
        self._live: list[Sequence] = []
        self._lock = threading.Lock()

    def behind(self, ids: Tokens[int]) -> torch.Tensor:
        """(vocabulary,) float32."""
        key = tuple(ids)
        with self._lock:
            if key not in self._rows:
                self.computed += 1
                self._rows[key] = self._at(key).next_logits().clone()
            return self._rows[key]

    def keys_and_values(self, ids: Tokens[int]) -> bytes:
        """The model's own, of these tokens."""
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
        """The sequence that shares most with ``ids``, standing behind them."""
        best, shared = None, 0
        for sequence in self._live:
            same = _common(sequence.tokens, ids)
            if same > shared:
                best, shared = sequence, same
        if best is None or 2 * shared < len(ids):
            best = self.model.begin() if best is None else best.fork()
            self._live.append(best)
            del self._live[:-_LIVE]
        best.rollback(min(shared, len(best.tokens)))
        best.append(ids[shared:])
        self._live.remove(best)
        self._live.append(best)
        return best


def _common(one: Tokens[int], other: Tokens[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class _Tokens:
    """Stands where a model keeps keys and values."""

    def __init__(self, rows: Rows, ids: list[int]) -> None:
        self.ids = ids
        self._rows = rows

    @property
    def length(self) -> int:
        return len(self.ids)

    @length.setter
    def length(self, value: int) -> None:
        del self.ids[value:]

    def copy(self) -> _Tokens:
        return _Tokens(self._rows, list(self.ids))

    def to_bytes(self) -> bytes:
        return self._rows.keys_and_values(self.ids)

    def fill(self, tokens: Tokens[int], data: bytes) -> None:
        if len(data) != len(self._rows.keys_and_values(tokens)):
            raise ValueError("these keys and values are of other tokens")
        self.ids = list(tokens)


class RecordedModel:
    """One side's model, for ``rag``. ``pace``: of its passes; without one they take no time of their own.

    ``reading_s``: what each token costs that a pass is fed beyond the first of a sequence, as in a prefill, which
    computes where decoding waits for memory. No token ends its answers, so that all are of one length.
    """

    def __init__(self, rows: Rows, name: str, vocab_size: int = 0) -> None:
        """``vocab_size``: more than the model has (0: its own); each id beyond is a lesser twin of one that it has."""
        model = rows.model
        self.name = name
        self.pace: Pace | None = None
        self.reading_s = 0.0
        self.passes = 0
        self.late = 0  # passes that took longer than they were to
        self.eos_token_ids: frozenset[int] = frozenset()
        self.vocab_size, self.max_length = vocab_size or model.vocab_size, model.max_length
        self.num_layers, self.device = model.num_layers, model.device
        self.fingerprint, self.tokenizer_fingerprint = (model.fingerprint, model.tokenizer_fingerprint)
        self.tokenizer, self.template = model.tokenizer, model.template
        self._rows = rows
        self._twins = torch.arange(self.vocab_size) % model.vocab_size
        generator = torch.Generator().manual_seed(self.vocab_size)
        self._less = torch.randn(self.vocab_size, generator=generator) - _TWINS_BELOW
        self._less[: model.vocab_size] = 0.0

    def begin(self) -> Sequence:
        """As of ``VisionLanguageModel.begin``."""
        cache: Any = _Tokens(self._rows, [])
        owner: Any = self
        return Sequence(owner, cache, 0, 0, torch.empty(0))

    def decode_text(self, tokens: Tokens[int]) -> str:
        return str(self._rows.model.decode_text(self._twins[list(tokens)].tolist()))

    def forward_tokens(
        self, tokens: Tokens[int], cache: Any, rope_delta: int, rows: int, on_layer: LayerHook | None = None
    ) -> torch.Tensor:
        """One sequence, and the logits behind its last token alone (``rows`` 1)."""
        if rows != 1:
            raise ValueError("a recorded model tells what stands behind its last token only")
        return self.forward_batch([Feed(list(tokens), cache, rope_delta)], on_layer)

    def forward_batch(self, feeds: list[Feed], on_layer: LayerHook | None = None) -> torch.Tensor:
        """As of ``VisionLanguageModel.forward_batch``."""
        clock = self._clock([len(feed.tokens) for feed in feeds])
        whole = [[*_ids(feed.cache), *feed.tokens] for feed in feeds]
        if max(map(len, whole)) > self.max_length:
            raise ContextError(f"{self.name} holds {self.max_length} tokens; ask for a shorter answer")
        logits = torch.stack([self._behind(ids) for ids in whole])
        nothing = torch.empty(0)
        for layer in range(self.num_layers):
            if clock is not None:
                clock.layer_done(layer + 1)
            if on_layer is not None:
                on_layer(layer, nothing)
        if clock is not None:
            self._note(clock)
        for feed, ids in zip(feeds, whole, strict=True):
            _ids(feed.cache)[:] = ids
        return logits

    def _behind(self, ids: list[int]) -> torch.Tensor:
        if self.vocab_size == self._rows.model.vocab_size:
            return self._rows.behind(ids)
        return self._rows.behind(self._twins[ids].tolist())[self._twins] + self._less

    def _clock(self, counts: list[int]) -> PacedPass | None:
        if self.pace is None:
            return None
        clock = self.pace.begin(self.num_layers, len(counts))
        reading = self.reading_s * (sum(counts) - len(counts))
        return PacedPass(clock.began, clock.layer_seconds + reading / self.num_layers)

    def _note(self, clock: PacedPass) -> None:
        self.passes += 1
        due = clock.layer_seconds * self.num_layers
        self.late += time.monotonic() - clock.began > _LATE * due


def _ids(cache: Any) -> list[int]:
    ids: list[int] = cache.ids
    return ids
