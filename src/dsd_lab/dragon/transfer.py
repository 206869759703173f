"""A sequence's keys and values as bytes, for another machine with the very same model."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

from dsd_ros.vlm.sequence import Sequence


def pack_sequence(sequence: Sequence) -> bytes:
    """The keys and values of all tokens that a pass was made for, in the model's precision."""
    return sequence._cache.to_bytes()


def unpack_sequence(model: Any, tokens: Tokens[int], data: bytes) -> Sequence:
    """A sequence of these tokens (of ``begin``) without a forward pass; ValueError for bytes of another size."""
    sequence: Sequence = model.begin()
    sequence._cache.fill(tokens, data)
    sequence.append(tokens)
    return sequence
