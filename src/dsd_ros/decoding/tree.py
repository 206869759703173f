"""Trees of drafted tokens: how one is written down, and how the target's verdict walks down it.

The root is the last token in front of the tree and no node of it; -1 stands for it. One pass of the
target with a mask of ancestors gives its distribution in front of the tree and behind every node.
Sampled trees are verified by the rule of "Fast Collaborative Inference via Distributed Speculative
Decoding" (TSLT, MCVeri); greedy ones and those of shared randomness by following the target's token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from dsd_ros.decoding.rejection import check_distributions, probability_of, residual, split_residual
from dsd_ros.decoding.sampling import SamplingError, sample
from dsd_ros.decoding.settings import MAX_NODES, TreeError

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """``tokens`` of the nodes and the index of each one's parent, ``ROOT`` for the root's children.

    Nodes are ordered level by level and by parent: parents never descend, and each comes before its
    children. A cut at a depth is then a prefix. Siblings stand in the order they were drawn and may
    carry the same token. At most ``MAX_NODES``. TreeError for anything else.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise TreeError(f"a tree of {len(self.tokens)} tokens needs as many parents, not {len(self.parents)}")
        if len(self.tokens) > MAX_NODES:
            raise TreeError(f"a tree has at most {MAX_NODES} nodes, not {len(self.tokens)}")
        before = ROOT
        for node, parent in enumerate(self.parents):
            if not before <= parent < node:
                raise TreeError(
                    f"node {node} of a tree names parent {parent}; parents come before their "
                    "children, and nodes in the order of their parents"
                )
            before = parent

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """A sequence, as the tree without branches."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @classmethod
    def from_bytes(cls, tokens: Sequence[int], parents: bytes) -> TokenTree:
        """The tree of tokens and what ``parents_bytes`` gave; no bytes at all mean a sequence."""
        if not parents:
            return cls.chain(tokens)
        return cls(tuple(tokens), tuple(byte - 1 for byte in parents))

    def parents_bytes(self) -> bytes:
        """One byte a node: 0 for the root's children, else the parent's index plus one."""
        return bytes(parent + 1 for parent in self.parents)

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def children(self, node: int) -> list[int]:
        """A node's children, or the root's, in the order they were drawn."""
        return self._children[node + 1]

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children, ascending, the root first: one row of q for each."""
        return tuple(node for node in range(-1, len(self.tokens)) if self._children[node + 1])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root, 1 or more, never descending."""
        return tuple(node_depths(self.parents))

    @property
    def depth(self) -> int:
        """The longest path's nodes; 0 for the empty tree."""
        return self.depths[-1] if self.tokens else 0

    @property
    def branches(self) -> bool:
        """Whether it is more than a sequence: some node, or the root, has two children."""
        return self.depth < len(self.tokens)

    def cut(self, depth: int) -> TokenTree:
        """The nodes at most ``depth`` deep, under the same indices; the first rows of q are its."""
        kept = sum(found <= depth for found in self.depths)
        return TokenTree(self.tokens[:kept], self.parents[:kept])

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to ``node``; none for the root itself."""
        if not ROOT <= node < len(self.tokens):
            raise TreeError(f"a tree of {len(self.tokens)} nodes has no node {node}")
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def tokens_of(self, path: Sequence[int]) -> tuple[int, ...]:
        """The tokens along a path."""
        return tuple(self.tokens[node] for node in path)


def node_depths(parents: Sequence[int]) -> list[int]:
    """Distance from the root, 1 or more, of nodes that come behind their parents."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """(n, n) bool, True where the column's node is the row's or one of its ancestors.

    For any nodes that come behind their parents.
    """
    count = len(parents)
    width = (count + 7) // 8
    # A row as the bits of one integer: it is the parent's row and one bit more.
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
    bits = np.unpackbits(packed.reshape(count, width), axis=1, count=count, bitorder="little")
    return bits.view(np.bool_)


@dataclass(frozen=True)
class TreeVerdict:
    """The nodes of ``path``, from the root's child on, hold, and ``next_token`` follows them."""

    path: tuple[int, ...]
    next_token: int
    # The last node's first child is rejected, and whoever holds q goes on from there; next_token is then 0.
    owed: bool = False

    @property
    def last(self) -> int:
        """The path's last node, which names the whole path; ROOT when nothing was accepted."""
        return self.path[-1] if self.path else ROOT


def verify_tree(tree: TokenTree, q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator) -> TreeVerdict:
    """TSLT's MCVeri: accept a path and add one token, so that the result is distributed as p alone.

    q: (len(tree.inner), V_q), the distributions that the children of each inner node were drawn
    from, independently and with replacement. p: (len(tree) + 1, V_p), the target's, in front of the
    tree and behind each node. The narrower vocabulary is padded with zeros. Of a tree without
    branches this is speculative sampling, step by step. SamplingError when shapes do not fit or a token has q(x) = 0.
    """
    if len(q) != len(tree.inner) or len(p) != len(tree) + 1:
        raise SamplingError(
            f"a tree of {len(tree)} nodes needs {len(tree.inner)} rows of q and {len(tree) + 1} of "
            f"p, not {len(q)} and {len(p)}"
        )
    first = _Here(ROOT, tree.children(ROOT), p[0], 1.0)
    return _walk(tree, first, q, lambda node: p[node + 1], generator)


class _Here(NamedTuple):
    """Where a walk stands: at ``node``, its ``children`` yet to be tried, p^(i) as weights / mass."""

    node: int
    children: Sequence[int]
    weights: torch.Tensor
    mass: float


def _walk(
    tree: TokenTree,
    here: _Here,
    q: torch.Tensor,
    p_behind: Callable[[int], torch.Tensor],
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
                node, weights, mass = child, p_behind(child), 1.0
                break
            # 2. Else p^(i+1) = norm(max(0, p^(i) - q)) for the next sibling.
            weights = residual(weights / mass, q_here)
            mass = float(weights.sum())
        else:
            # 3. No child accepted: the token of p^(k+1).
            break
        children = tree.children(node)
    # Without further children, behind a leaf: the bonus token.
    return TreeVerdict(tree.path_to(node), sample(weights, generator))


def remaining_nodes(tree: TokenTree, node: int) -> tuple[int, ...]:
    """What is left of a tree where ``node``'s first child is rejected: its other children's subtrees.

    In the order of the nodes, so that of a tree cut at a depth they are the first ones.
    """
    inside = set(tree.children(node)[1:])
    for candidate in range(node + 1, len(tree)):
        if tree.parents[candidate] in inside:
            inside.add(candidate)
    return tuple(sorted(inside))


def verify_split_tree(
    tree: TokenTree, r: Sequence[float], p: torch.Tensor, generator: np.random.Generator
) -> TreeVerdict:
    """The cloud's half of split verification of a tree: first children alone, as it does not know q.

    r: of each node's token its q(x) or a little more (``acceptance.rounded_up``); p: (len(tree) + 1, V)
    as of ``verify_tree``. A verdict that is ``owed`` says where the first child is rejected: whoever
    holds q goes on with ``finish_split_tree``. Of a tree without branches this is DSSD.
    SamplingError for r that are no probabilities.
    """
    if len(r) != len(tree) or not all(0.0 < r_x <= 1.0 for r_x in r):
        raise SamplingError(f"{len(tree)} nodes need as many probabilities above 0 and up to 1")
    if len(p) != len(tree) + 1:
        raise SamplingError(f"a tree of {len(tree)} nodes needs {len(tree) + 1} rows of p, not {len(p)}")
    node = ROOT
    while children := tree.children(node):
        child = children[0]
        if generator.random() * r[child] >= probability_of(tree.tokens[child], p[node + 1]):
            return TreeVerdict(tree.path_to(node), 0, owed=True)
        node = child
    return TreeVerdict(tree.path_to(node), sample(p[node + 1], generator))


def finish_split_tree(
    tree: TokenTree, node: int, q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator
) -> TreeVerdict:
    """The robot's half: go on where the cloud rejected the first child of ``node``.

    Both halves together leave tokens that are distributed as the target's alone. q: as of
    ``verify_tree``. p: (1 + len(remaining_nodes(tree, node)), V), the target's behind ``node`` and
    behind those; fewer rows where the cloud has cut the tree at a depth for want of room. The verdict's
    path begins at the root. SamplingError when shapes do not fit, TreeError for a node without children.
    """
    if not tree.children(node):
        raise TreeError(f"node {node} of a tree of {len(tree)} has no child to be rejected")
    behind = remaining_nodes(tree, node)
    if len(q) == len(tree.inner) and 1 < len(p) <= len(behind):
        tree = tree.cut(tree.depths[behind[len(p) - 2]])
        q, behind = q[: len(tree.inner)], remaining_nodes(tree, node)
    if len(q) != len(tree.inner) or len(p) != len(behind) + 1:
        raise SamplingError(
            f"what is left of the tree behind node {node} needs {len(tree.inner)} rows of q and "
            f"{len(behind) + 1} of p, not {len(q)} and {len(p)}"
        )
    p_row = {left: row for row, left in enumerate(behind, 1)}
    weights = split_residual(p[0], q[tree.inner.index(node)])
    here = _Here(node, tree.children(node)[1:], weights, float(weights.sum()))
    return _walk(tree, here, q, lambda left: p[p_row[left]], generator)


def verify_tree_greedy(tree: TokenTree, argmax: Sequence[int]) -> TreeVerdict:
    """The limit of ``verify_tree`` at temperature 0: go down while a child is the target's argmax.

    argmax: len(tree) + 1 ids, the target's likeliest token in front of the tree and behind each node.
    """
    return follow_tree(tree, lambda node: argmax[node + 1])


def follow_tree(tree: TokenTree, emitted: Callable[[int], int]) -> TreeVerdict:
    """Go down while a child is what the target emits there, as with shared randomness.

    emitted: the target's own token behind a node, or behind the root; asked along the path alone.
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

    q: (len(tree.inner), V) from an untrusted peer. SamplingError names the first node at fault.
    """
    if len(q) != len(tree.inner):
        raise SamplingError(f"a tree with {len(tree.inner)} inner nodes needs as many rows of q, not {len(q)}")
    families = [tree.tokens_of(tree.children(node)) for node in tree.inner]
    check_distributions([family[0] for family in families], q)
    for row, family in zip(q, families, strict=True):
        for x in family[1:]:
            if not probability_of(x, row) > 0.0:
                raise SamplingError(f"drafted token {x} has no probability in its own distribution")
