# SPDX-License-Identifier: Apache-2.0
"""Growing token trees level by level, for any draft model.

A grower names the nodes to feed next (``level``), takes the draft's rows after them (``take``), and is done when
``complete``. A tree of depth L costs L passes of the draft model, including the one after the root; rows after the
leaves are never needed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.decoding.settings import MAX_NODES, SamplingError, TreeError, expansion_nodes
from dsd_ros.decoding.tree import ROOT, TokenTree


@dataclass(frozen=True)
class GrownTree:
    """A tree, and for each node its index among the fed nodes, or -1 if it was not fed."""

    tree: TokenTree
    fed: tuple[int, ...]

    def split(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """A path as the part in the draft's cache (indices among the fed nodes) and the rest (its tokens)."""
        held = 0
        while held < len(path) and self.fed[path[held]] >= 0:
            held += 1
        numbers = [self.fed[node] for node in path[:held]]
        return numbers, list(self.tree.tokens_of(path[held:]))


def draw_children(q: torch.Tensor, count: int, generator: np.random.Generator) -> list[list[int]]:
    """TSLT's MCSample: ``count`` independent draws with replacement from each row of q (n, V).

    Rows need not sum to one; an id of weight 0 is never drawn. SamplingError for rows that are not weights.
    """
    cumulative = q.double().cumsum(dim=-1)
    totals = cumulative[:, -1].tolist()
    if not all(math.isfinite(total) and total > 0.0 for total in totals):
        raise SamplingError("cannot draw from weights that are not probabilities")
    draws = torch.from_numpy(generator.random((len(q), count)) * np.array(totals)[:, None])
    families: list[list[int]] = torch.searchsorted(cumulative, draws.to(q.device), right=True).tolist()
    for row, family in zip(q, families, strict=True):
        if max(family) >= len(row):  # a product was rounded up to the total
            last = int(row.nonzero()[-1])
            family[:] = [min(x, last) for x in family]
    return families


def likeliest_children(scores: torch.Tensor, count: int) -> list[list[int]]:
    """The ids of the ``count`` highest scores in each row (n, V), best first, without those of -inf."""
    if count == 1:  # a sequence: every microsecond counts
        return [[token] for token in scores.argmax(dim=-1).tolist()]
    best, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    possible = (~torch.isneginf(best)).sum(dim=-1).tolist()
    return [row[:kept] for row, kept in zip(ids.tolist(), possible, strict=True)]


class Grower(ABC):
    """The nodes so far, and those whose rows are needed next."""

    def __init__(self, ends: frozenset[int], wanted: bool) -> None:
        self._ends = ends
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._fed: list[int] = []
        self._fed_count = 0
        self._depth = 0
        self._open = [ROOT] if wanted else []

    @property
    def complete(self) -> bool:
        """Whether no further rows are needed."""
        return not self._open

    @property
    def level(self) -> tuple[list[int], list[int]]:
        """The nodes whose rows ``take`` needs next: tokens, and parents by index among the fed nodes.

        Empty before the first ``take``, which needs the one row after the root.
        """
        nodes = [node for node in self._open if node != ROOT]
        parents = (self._parents[node] for node in nodes)
        return (
            [self._tokens[node] for node in nodes],
            [self._fed[parent] if parent >= 0 else ROOT for parent in parents],
        )

    @property
    def q(self) -> torch.Tensor | None:
        """One row per inner node of the tree, (inner, V); None if nothing was drawn."""
        return None

    @abstractmethod
    def take(self, rows: torch.Tensor) -> None:
        """Add the children that rows (nodes of ``level``, V) give; TreeError for a wrong number of rows."""

    def grown(self) -> GrownTree:
        """The tree grown so far."""
        return GrownTree(TokenTree(tuple(self._tokens), tuple(self._parents)), tuple(self._fed))

    def _feed(self, rows: torch.Tensor) -> list[int]:
        """Number the fed nodes, one per row, and go down a level."""
        nodes = self._open
        if not nodes:
            raise TreeError("the tree is complete and takes no further rows")
        if len(rows) != len(nodes):
            raise TreeError(f"{len(nodes)} nodes need as many rows, not {len(rows)}")
        for node in nodes:
            if node != ROOT:
                self._fed[node] = self._fed_count
                self._fed_count += 1
        self._depth += 1
        self._open = []
        return nodes

    def _add(self, parent: int, token: int) -> int:
        self._tokens.append(token)
        self._parents.append(parent)
        self._fed.append(-1)
        return len(self._tokens) - 1


class ExpansionTree(Grower):
    """A tree by expansion <k_1..k_L>: every node of level l - 1 gets k_l children.

    With a generator they are drawn from the rows, the draft's distributions q (MCSample). Without one they are the
    k_l highest of each row, all distinct: of logits when greedy, of log q + G with shared randomness. Nothing is
    drafted after a token of ``ends``.
    """

    def __init__(
        self, expansion: Sequence[int], ends: frozenset[int] = frozenset(), generator: np.random.Generator | None = None
    ) -> None:
        if min(expansion, default=1) < 1 or expansion_nodes(expansion) > MAX_NODES:
            raise TreeError(f"expansion {tuple(expansion)} makes no tree of at most {MAX_NODES} nodes")
        super().__init__(ends, bool(expansion))
        self._expansion = tuple(expansion)
        self._generator = generator
        self._q: list[torch.Tensor] = []

    def take(self, rows: torch.Tensor) -> None:
        nodes = self._feed(rows)
        count = self._expansion[self._depth - 1]
        if self._generator is None:
            families = likeliest_children(rows, count)
        else:
            families = draw_children(rows, count, self._generator)
            self._q.append(rows)
        added = [self._add(node, token) for node, family in zip(nodes, families, strict=True) for token in family]
        if self._depth < len(self._expansion):
            self._open = [node for node in added if self._tokens[node] not in self._ends]

    @property
    def q(self) -> torch.Tensor | None:
        return torch.cat(self._q) if self._q else None


class BudgetTree(Grower):
    """The tree of ``budget`` nodes with the highest expected number of accepted nodes (OPT-Tree).

    Source: Wang et al. 2024 (arXiv 2406.17276). A node's chance of acceptance is the product of the likelihoods
    along its path, which never grows on the way down. So the best nodes form a tree, and a node that is not among
    the best so far has no descendant among them: each level feeds only nodes that are, and the result is the best
    tree of at most ``depth`` levels. For targets whose token does not depend on the draft (greedy, shared
    randomness). Nothing is drafted after a token of ``ends``.
    """

    def __init__(self, budget: int, depth: int, ends: frozenset[int] = frozenset()) -> None:
        if not 0 <= budget <= MAX_NODES or depth < 0:
            raise TreeError(f"a tree cannot have {budget} nodes and {depth} levels; use 0 to {MAX_NODES} nodes")
        super().__init__(ends, budget > 0 and depth > 0)
        self._budget, self._levels = budget, depth
        self._chances: list[float] = []

    def take(self, rows: torch.Tensor) -> None:
        """rows: each token's likelihood, 0 to 1, of being what the target emits there.

        The draft's probabilities when greedy, softmax(log q + G) with shared randomness.
        """
        first = len(self._tokens)
        nodes = self._feed(rows)
        best, ids = rows.topk(min(self._budget, rows.shape[-1]), dim=-1)
        for node, chances, family in zip(nodes, best.tolist(), ids.tolist(), strict=True):
            above = 1.0 if node == ROOT else self._chances[node]
            for chance, token in zip(chances, family, strict=True):
                if chance > 0.0:
                    self._add(node, token)
                    self._chances.append(above * min(chance, 1.0))
        if self._depth < self._levels:
            self._open = [
                node for node in sorted(self._chosen()) if node >= first and self._tokens[node] not in self._ends
            ]

    def grown(self) -> GrownTree:
        # Candidates are ordered level by level and by parent, as a tree's nodes are.
        chosen = sorted(self._chosen())
        place = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
        tree = TokenTree(
            tuple(self._tokens[node] for node in chosen), tuple(place[self._parents[node]] for node in chosen)
        )
        return GrownTree(tree, tuple(self._fed[node] for node in chosen))

    def _chosen(self) -> list[int]:
        # The sort is stable: of two equals an ancestor, being older, comes first.
        order = sorted(range(len(self._chances)), key=lambda node: -self._chances[node])
        return order[: self._budget]
