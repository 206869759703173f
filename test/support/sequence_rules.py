# SPDX-License-Identifier: Apache-2.0
"""The product's rules for trees, asked about sequences; and what the tests of both share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.decoding.rejection import follow_tree, verify_tree
from dsd_ros.decoding.tree import TokenTree

#   -1 -> 0 (5), 1 (6), 2 (5);  0 -> 3 (7), 4 (8);  2 -> 5 (9);  4 -> 6 (5)
TREE = TokenTree((5, 6, 5, 7, 8, 9, 5), (-1, -1, -1, 0, 0, 2, 4))


class Scripted:
    """Yields given draws in turn, as a generator does."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)


def distributions(seed: int, *shape: int) -> torch.Tensor:
    """Rows of float32 that sum to one."""
    rows = np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])
    return torch.from_numpy(rows.astype(np.float32))


def verify_draft(
    draft_tokens: Sequence[int], q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator | Scripted
) -> DraftVerdict:
    """Speculative sampling: q (gamma, V), which each token was drawn from; p (gamma + 1, V)."""
    found = verify_tree(TokenTree.chain(draft_tokens), q, p, generator)
    return DraftVerdict(found.last + 1, found.next_token)


def verify_coupled(draft_tokens: Sequence[int], p: torch.Tensor, noise: Callable[[int], np.ndarray]) -> DraftVerdict:
    """Shared randomness: p (gamma + 1, V), and noise(i), row i of it."""
    found = follow_tree(TokenTree.chain(draft_tokens), lambda node: choose(p[node + 1], noise(node + 1)))
    return DraftVerdict(found.last + 1, found.next_token)
