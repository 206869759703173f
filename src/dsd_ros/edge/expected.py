"""What a tree of drafted tokens may be expected to gain, by its nodes and levels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def accepted_by_tree(ranks: Sequence[float] | np.ndarray, nodes: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Expected accepted tokens of the best tree of n nodes and at most l levels, and how many it has of these.

    Both (levels, nodes), at [l - 1, n - 1].

    As in "Sequoia" (arXiv 2402.12374), acceptance is of ranks, alike and independent wherever a token stands.
    ranks: the chance that the target's token is the draft's likeliest, second, and so on; at most 1
    together. A node is accepted with the product of its and its ancestors' chances,
    which never grows on the way down, so that the n best nodes of all are a tree, and the best one.
    """
    chances = np.sort(np.asarray(ranks, dtype=np.float64))[::-1]
    gains, depths = np.empty((levels, nodes)), np.empty((levels, nodes), dtype=np.int64)
    deepest = np.cumprod(np.full(levels, chances[0]))  # the best node of each level
    best = np.zeros(0)  # of all levels so far, descending
    level = np.ones(1)
    for depth in range(levels):
        # One of the best nodes has no more than `nodes` at its level in front of it.
        level = np.sort(np.outer(level, chances), axis=None)[::-1][:nodes]
        best = np.sort(np.concatenate((best, level)))[::-1][:nodes]
        missing = (0, nodes - len(best))
        gains[depth] = np.cumsum(np.pad(best, missing))
        least = np.pad(best, missing, mode="edge")
        depths[depth] = (deepest[: depth + 1, None] >= least).sum(axis=0)
    return gains, depths
