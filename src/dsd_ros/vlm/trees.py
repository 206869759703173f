"""Where the nodes of a token tree stand in a forward pass, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.decoding.tree import ancestor_mask, node_depths


@dataclass(frozen=True)
class HangingTree:
    """Nodes whose keys and values are a sequence's last rows, behind all of its tokens.

    ``rows``: the logits (vocabulary,) in front of the tree, and then those behind each node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    rows: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class TreeLayout:
    """A pass over ``text`` tokens and new nodes, n in all, behind ``past`` tokens and held nodes.

    mask: (n, past + held + n) bool, True where a row attends. positions: (n,) int64, counted from the
    start of the sequence; siblings share theirs. end: behind the last position of text and the whole tree.
    """

    mask: np.ndarray
    positions: np.ndarray
    end: int

    @classmethod
    def of(cls, parents: Sequence[int], held: int, past: int, text: int) -> TreeLayout:
        """Of ``parents``, each before its own, the first ``held`` are in the cache already.

        There they come behind everything else, so with held nodes there is no text to feed.
        """
        nodes = len(parents)
        first = past + text  # the tree's first column
        mask = np.zeros((text + nodes - held, first + nodes), np.bool_)
        mask[:text, :first] = np.tri(text, first, past, dtype=np.bool_)
        mask[text:, :first] = True
        mask[text:, first:] = ancestor_mask(parents)[held:]
        depths = node_depths(parents)
        positions = np.empty(len(mask), np.int64)
        positions[:text] = np.arange(past, first)
        positions[text:] = np.array(depths[held:], np.int64) + (first - 1)
        return cls(mask, positions, first + max(depths, default=0))
