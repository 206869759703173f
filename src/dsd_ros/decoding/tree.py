# SPDX-License-Identifier: Apache-2.0
"""Trees of drafted tokens and how one is written down.

The root, written -1, is the last token before the tree and not one of its nodes. One pass of the target with a mask of
ancestors gives its distribution at the root and at every node. ``rejection`` says how a verdict walks down a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dsd_ros.decoding.settings import MAX_NODES, TreeError

ROOT = -1


@dataclass(frozen=True)
class TokenTree:
    """``tokens`` of the nodes and the index of each one's parent, ``ROOT`` for the root's children.

    Nodes are ordered level by level and by parent: parents never descend, and each comes before its children, so a
    cut at a depth is a prefix. Siblings stand in the order they were drawn and may carry the same token. At most
    ``MAX_NODES``. TreeError for anything else.
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
        """The nodes at most ``depth`` deep, with the same indices; its rows of q are the first ones."""
        if self.depth <= depth:
            return self
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
    """Distance from the root, 1 or more, of nodes that come after their parents."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


def ancestor_mask(parents: Sequence[int]) -> np.ndarray:
    """(n, n) bool, True where the column's node is the row's or one of its ancestors; parents come first."""
    count = len(parents)
    width = (count + 7) // 8
    # A row as the bits of one integer: it is the parent's row and one bit more.
    rows: list[int] = []
    for node, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
    bits = np.unpackbits(packed.reshape(count, width), axis=1, count=count, bitorder="little")
    return bits.view(np.bool_)
