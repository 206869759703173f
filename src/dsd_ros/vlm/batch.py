"""Several sequences advanced by one forward pass, as FSD's batched pre-drafting wants them.

On an edge device a pass over eight sequences costs hardly more than over one (FSD Table 9).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import torch

from dsd_ros.vlm.errors import SequenceError
from dsd_ros.vlm.sequence import LayerHook, Sequence, TreeFeed


def next_logits_together(sequences: list[Sequence], on_layer: LayerHook | None = None) -> list[torch.Tensor]:
    """Logits (vocabulary,) float32 behind all tokens of each sequence, in the order given.

    Each result equals that sequence's own ``next_logits`` up to rounding, and each sequence can be
    used alone afterwards. Those of one model that need a pass share one, whatever their lengths
    and numbers of pending tokens. A sequence may appear more than once.

    ``on_layer(index, hidden)`` is called after each decoder layer; what it raises ends the pass, and sequences
    are as they were before it. Raises ContextError when one of them is too long for its model. No sequence is
    harmed by that: the others can be advanced without it, and it can be rolled back.
    """
    waiting: dict[int, list[Sequence]] = {}
    seen: set[int] = set()
    for sequence in sequences:
        if id(sequence) not in seen and sequence.known_logits() is None:
            waiting.setdefault(id(sequence.model), []).append(sequence)
        seen.add(id(sequence))
    for group in waiting.values():
        if len(group) > 1:
            _advance(group, on_layer)
    return [sequence.next_logits(on_layer) for sequence in sequences]


def _advance(group: list[Sequence], on_layer: LayerHook | None) -> None:
    """One pass for sequences of one model, each with pending tokens."""
    feeds = [sequence.feed() for sequence in group]
    rows = group[0].model.forward_batch(feeds, on_layer)
    for sequence, row in zip(group, rows, strict=True):
        sequence.note_row(row)


def grow_trees_together(growths: Tokens[tuple[Sequence, Tokens[int], Tokens[int]]]) -> list[torch.Tensor]:
    """``Sequence.grow_tree`` for several sequences, (sequence, tokens, parents) each, in their order.

    Each result equals that sequence's own up to rounding. Those of one model share a pass, whatever
    the numbers of their nodes and of pending tokens. No sequence may appear twice.

    Raises SequenceError, or ContextError when one is too long for its model; no sequence has grown
    then where there is one model.
    """
    if len({id(sequence) for sequence, _, _ in growths}) < len(growths):
        raise SequenceError("a sequence grows one level of its tree in a pass; name each one once")
    results: list[torch.Tensor | None] = [None] * len(growths)
    waiting: dict[int, list[tuple[int, TreeFeed]]] = {}
    for index, (sequence, tokens, parents) in enumerate(growths):
        feed = sequence.tree_feed(tokens, parents)
        if feed is not None:
            waiting.setdefault(id(sequence.model), []).append((index, feed))
    for group in waiting.values():
        model = growths[group[0][0]][0].model
        feeds = [feed for _, feed in group]
        together = model.forward_trees(feeds) if len(feeds) > 1 else [model.forward_tree(feeds[0])]
        for (index, feed), rows in zip(group, together, strict=True):
            results[index] = growths[index][0].note_tree(feed, rows)
    return [
        sequence.grow_tree([], []) if rows is None else rows
        for (sequence, _, _), rows in zip(growths, results, strict=True)
    ]
