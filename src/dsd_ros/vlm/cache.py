# SPDX-License-Identifier: Apache-2.0
"""KV caches: one per sequence, cropped by moving a length; and several as one for a pass over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_FIRST_CAPACITY = 64


class KeyValueCache:
    """Keys and values of all layers, valid up to ``length``, in one tensor (layers, 2, 1, heads, capacity, head size).

    It takes the place of transformers' ``Cache``. A forward pass writes its rows after ``length`` in every layer; the
    caller advances ``length`` once, after the last layer. To crop, set ``length`` back.
    """

    def __init__(self, layers: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self._capacity = 0
        self._data = torch.empty((layers, 2, 1, heads, 0, head_size), dtype=dtype, device=device)
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are reserved."""
        return self._data.nbytes

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions, keeping what is there."""
        if length > self._capacity:
            self._allocate(max(length, 2 * self._capacity, _FIRST_CAPACITY))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, heads, n, head size) after ``length``; return all, (1, heads, length + n, head size), as views."""
        start, end = self.length, self.length + keys.shape[2]
        all_keys, all_values = self._layers[layer_idx]
        all_keys[:, :, start:end] = keys
        all_values[:, :, start:end] = values
        return all_keys[:, :, :end], all_values[:, :, :end]

    @torch.inference_mode()
    def keep(self, start: int, rows: Sequence[int]) -> None:
        """Of the rows from ``start`` on keep only ``rows`` (ascending, from 0), moved together; end there."""
        end = start + len(rows)
        if list(rows) != list(range(len(rows))):
            chosen = torch.tensor(rows, device=self._data.device) + start
            self._data[..., start:end, :] = self._data.index_select(4, chosen)
        self.length = end

    def copy(self) -> KeyValueCache:
        """An independent cache with the same content."""
        twin = object.__new__(KeyValueCache)
        twin.length, twin._data = self.length, self._data
        twin._allocate(max(self.length + _FIRST_CAPACITY // 2, _FIRST_CAPACITY))
        return twin

    def to_bytes(self) -> bytes:
        """The whole content in the cache's own precision, as (layers, 2, heads, length, head size)."""
        held = self._data[..., : self.length, :].contiguous().cpu()
        return held.view(torch.uint8).numpy().tobytes()

    @torch.inference_mode()
    def fill(self, tokens: Sequence[int], data: bytes) -> None:
        """Replace the content by what ``to_bytes`` gave for these tokens; ValueError for another size."""
        count = len(tokens)
        shape = (*self._data.shape[:4], count, self._data.shape[5])
        size = math.prod(shape) * self._data.element_size()
        if len(data) != size:
            raise ValueError(f"keys and values of {count} tokens take {size} bytes in this model, not {len(data)}")
        self.length = 0
        self.reserve(count)
        held = torch.frombuffer(bytearray(data), dtype=self._data.dtype).reshape(shape)
        self._data[..., :count, :] = held.to(self._data.device)
        self.length = count

    def _allocate(self, capacity: int) -> None:
        old = self._data
        new = old.new_empty((*old.shape[:4], capacity, old.shape[5]))
        new[..., : self.length, :] = old[..., : self.length, :]
        self._data, self._capacity = new, capacity
        self._layers = [(layer[0], layer[1]) for layer in new]


class BatchCache:
    """Several sequences' caches in one forward pass over all their new tokens, one sequence after another.

    Takes the place of a ``KeyValueCache``: ``update`` writes each sequence's rows into its own cache, and returns the
    sequences' keys and values as lists, which ``backbones.attend`` understands. ``commit`` makes the rows count.

    counts: the number of tokens each is fed, at least 1.
    """

    def __init__(self, caches: list[KeyValueCache], counts: list[int]) -> None:
        self._caches, self._counts = caches, counts
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(cache.length + count)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Take (1, heads, all new tokens, head size); each sequence's whole (1, heads, length + count, head size)."""
        parts = zip(self._caches, keys.split(self._counts, 2), values.split(self._counts, 2), strict=True)
        held = [cache.update(new_keys, new_values, layer_idx) for cache, new_keys, new_values in parts]
        return [pair[0] for pair in held], [pair[1] for pair in held]

    def commit(self) -> None:
        """Advance each cache over its new rows."""
        for cache, count in zip(self._caches, self._counts, strict=True):
            cache.length += count
