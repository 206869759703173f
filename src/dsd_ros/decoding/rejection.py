# SPDX-License-Identifier: Apache-2.0
"""The acceptance rule of speculative sampling, for sequences and trees.

q is the draft's distribution, p the target's. A drafted x is accepted with probability min(1, p(x) / q(x)), target
over draft (Leviathan et al. 2023, Chen et al. 2023; DSSD and TSLT print the ratio upside down). The recovered token is
a sample of norm(max(0, p - q)). Trees are verified by TSLT's MCVeri, of which a sequence is the case without branches;
greedy trees and those of shared randomness by following the target's own token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.sampling import sample
from dsd_ros.decoding.settings import SamplingError
from dsd_ros.decoding.tree import ROOT, TokenTree


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q) over p's vocabulary, (V_p,), unnormalised; p where rounding leaves nothing."""
    shared = min(len(p), len(q))
    rest = p.clone()
    rest[:shared] -= q[:shared]
    rest.clamp_(min=0.0)
    # p == q leaves nothing, and then only rounding can have rejected.
    return rest if float(rest.sum()) > 0.0 else p


def probability_of(token: int, row: torch.Tensor) -> float:
    """A token's entry in a distribution (V,); 0 beyond its vocabulary."""
    return float(row[token]) if 0 <= token < len(row) else 0.0


@dataclass(frozen=True)
class TreeVerdict:
    """The nodes of ``path``, from the root's child on, are accepted, and ``next_token`` follows them."""

    path: tuple[int, ...]
    next_token: int
    # The last node's first child is rejected, and the side that holds q goes on from there; next_token is then 0.
    owed: bool = False

    @property
    def last(self) -> int:
        """The path's last node, which names the whole path; ROOT when nothing was accepted."""
        return self.path[-1] if self.path else ROOT


def verify_tree(tree: TokenTree, q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator) -> TreeVerdict:
    """TSLT's MCVeri: accept a path and add one token, so that the result is distributed as p alone.

    q: (len(tree.inner), V_q), the distributions that the children of each inner node were drawn from, independently
    and with replacement. p: (len(tree) + 1, V_p), the target's, before the tree and after each node. The narrower
    vocabulary is padded with zeros. For a tree without branches this is speculative sampling, step by step.
    SamplingError when shapes do not fit or a token has q(x) = 0.
    """
    if len(q) != len(tree.inner) or len(p) != len(tree) + 1:
        raise SamplingError(
            f"a tree of {len(tree)} nodes needs {len(tree.inner)} rows of q and {len(tree) + 1} of "
            f"p, not {len(q)} and {len(p)}"
        )
    first = WalkState(ROOT, tree.children(ROOT), p[0], 1.0)
    return walk(tree, first, q, lambda node: p[node + 1], generator)


class WalkState(NamedTuple):
    """Where a walk stands: at ``node``, its ``children`` yet to be tried, p^(i) as weights / mass."""

    node: int
    children: Sequence[int]
    weights: torch.Tensor
    mass: float


def walk(
    tree: TokenTree,
    here: WalkState,
    q: torch.Tensor,
    p_after: Callable[[int], torch.Tensor],
    generator: np.random.Generator,
) -> TreeVerdict:
    """MCVeri from ``here`` on; the verdict's path begins at the root all the same."""
    q_row = {node: row for row, node in enumerate(tree.inner)}
    node, children, weights, mass = here
    while children:
        q_here = q[q_row[node]]
        for child in children:
            x = tree.tokens[child]
            q_x, p_x = probability_of(x, q_here), probability_of(x, weights)
            if not q_x > 0.0:
                raise SamplingError(f"drafted token {x} has no probability in its own distribution")
            # 1. Accept x^(i) with probability min(1, p^(i)(x) / q(x)), and walk down to it.
            if generator.random() * q_x * mass < p_x:
                node, weights, mass = child, p_after(child), 1.0
                break
            # 2. Else p^(i+1) = norm(max(0, p^(i) - q)) for the next sibling.
            weights = residual(weights / mass, q_here)
            mass = float(weights.sum())
        else:
            # 3. No child accepted: the token of p^(k+1).
            break
        children = tree.children(node)
    # At a leaf: the bonus token.
    return TreeVerdict(tree.path_to(node), sample(weights, generator))


def verify_tree_greedy(tree: TokenTree, argmax: Sequence[int]) -> TreeVerdict:
    """The limit of ``verify_tree`` at temperature 0: go down while a child is the target's argmax.

    argmax: len(tree) + 1 ids, the target's likeliest token before the tree and after each node.
    """
    return follow_tree(tree, lambda node: argmax[node + 1])


def follow_tree(tree: TokenTree, emitted: Callable[[int], int]) -> TreeVerdict:
    """Go down while a child is what the target emits there, as with shared randomness.

    emitted: the target's own token after a node or the root; called along the path alone.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = emitted(node)
        child = next((c for c in tree.children(node) if tree.tokens[c] == token), None)
        if child is None:
            return TreeVerdict(tuple(path), token)
        path.append(child)
        node = child


def check_tree(tree: TokenTree, q: torch.Tensor) -> None:
    """Refuse rows that are no distributions, or that the nodes' tokens cannot come from.

    q: (len(tree.inner), V) from an untrusted peer. SamplingError names the first row at fault.
    """
    if len(q) != len(tree.inner):
        raise SamplingError(f"a tree with {len(tree.inner)} inner nodes needs as many rows of q, not {len(q)}")
    sums = q.double().sum(dim=-1)
    # NaN fails every comparison, so both tests are written to pass only what is right.
    valid = (q >= 0.0).all(dim=-1) & ((sums - 1.0).abs() <= 1e-3)
    for i, (node, row) in enumerate(zip(tree.inner, q, strict=True)):
        if not bool(valid[i]):
            raise SamplingError(
                f"the distribution of drafted token {i} is invalid: its entries must be 0 or more and sum to 1"
            )
        for x in tree.tokens_of(tree.children(node)):
            if not probability_of(x, row) > 0.0:
                raise SamplingError(f"drafted token {x} has no probability in its own distribution")
