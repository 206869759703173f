"""Several sequences advanced by one forward pass, as FSD's batched pre-drafting wants them.

On an edge device a pass over eight sequences costs hardly more than over one (FSD Table 9).
"""

from __future__ import annotations

import torch

from dsd_ros.vlm.sequence import Sequence


def next_logits_together(sequences: list[Sequence]) -> list[torch.Tensor]:
    """Logits (vocabulary,) float32 behind all tokens of each sequence, in the order given.

    Each result equals that sequence's own ``next_logits`` up to rounding, and each sequence can be
    used alone afterwards. Those of one model that need a pass share one, whatever their lengths
    and numbers of pending tokens. A sequence may appear more than once.

    Raises ContextError when one of them is too long for its model. No sequence is harmed by that:
    the others can be advanced without it, and it can be rolled back.
    """
    waiting: dict[int, list[Sequence]] = {}
    seen: set[int] = set()
    for sequence in sequences:
        if id(sequence) not in seen and sequence.known_logits() is None:
            waiting.setdefault(id(sequence.model), []).append(sequence)
        seen.add(id(sequence))
    for group in waiting.values():
        if len(group) > 1:
            _advance(group)
    return [sequence.next_logits() for sequence in sequences]


def _advance(group: list[Sequence]) -> None:
    """One pass for sequences of one model, each with pending tokens."""
    feeds = [sequence.feed() for sequence in group]
    for sequence, row in zip(group, group[0].model.forward_batch(feeds), strict=True):
        sequence.note_row(row)
