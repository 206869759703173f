"""Growing trees of drafted tokens level by level, whatever model gives the rows.

A grower says which nodes are to be fed next (``level``), takes what the draft gives behind them
(``take``), and is done when ``complete``. A tree of depth L so costs L passes of the draft model, the
one behind the root among them: what is behind the leaves is never asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.decoding.settings import MAX_NODES, TreeError, expansion_nodes
from dsd_ros.decoding.tree import ROOT, TokenTree

Level = tuple[list[int], list[int]]


@dataclass(frozen=True)
class GrownTree:
    """A tree, and of each node its number among the nodes that were fed, in that order, or -1."""

    tree: TokenTree
    fed: tuple[int, ...]

    def split(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """A path as what the draft's cache holds of it and what it lacks.

        The numbers, among the fed, of the first nodes, and the tokens of those behind them.
        """
        held = 0
        while held < len(path) and self.fed[path[held]] >= 0:
            held += 1
        numbers = [self.fed[node] for node in path[:held]]
        return numbers, list(self.tree.tokens_of(path[held:]))


def draw_children(q: torch.Tensor, count: int, generator: np.random.Generator) -> list[list[int]]:
    """TSLT's MCSample: for each row of q (n, V) ``count`` draws, independent, with replacement.

    Rows need not sum to one; weight 0 is never drawn. SamplingError for rows that are no weights.
    """
    cumulative = q.double().cumsum(dim=-1)
    totals = cumulative[:, -1].tolist()
    if not all(math.isfinite(total) and total > 0.0 for total in totals):
        raise SamplingError("cannot draw from weights that are no probabilities")
    draws = torch.from_numpy(generator.random((len(q), count)) * np.array(totals)[:, None])
    families: list[list[int]] = torch.searchsorted(cumulative, draws.to(q.device), right=True).tolist()
    for row, family in zip(q, families, strict=True):
        if max(family) >= len(row):  # a product was rounded up to the total
            last = int(row.nonzero()[-1])
            family[:] = [min(x, last) for x in family]
    return families


def likeliest_children(scores: torch.Tensor, count: int) -> list[list[int]]:
    """For each row of scores (n, V), not all -inf, the ``count`` highest ids, best first; none of -inf."""
    if count == 1:  # a sequence's, where every microsecond counts
        return [[token] for token in scores.argmax(dim=-1).tolist()]
    best, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
    possible = (~torch.isneginf(best)).sum(dim=-1).tolist()
    return [row[:kept] for row, kept in zip(ids.tolist(), possible, strict=True)]


class Grower(ABC):
    """What growers have in common: nodes so far, and those whose rows are wanted next."""

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
        """Whether no further rows are wanted."""
        return not self._open

    @property
    def level(self) -> Level:
        """The nodes whose rows ``take`` wants next: tokens, and parents by their number among the fed.

        Empty before the first ``take``, which wants the one row behind the root.
        """
        nodes = [node for node in self._open if node != ROOT]
        parents = (self._parents[node] for node in nodes)
        return (
            [self._tokens[node] for node in nodes],
            [self._fed[parent] if parent >= 0 else ROOT for parent in parents],
        )

    @property
    def q(self) -> torch.Tensor | None:
        """One row for each of the tree's inner nodes, (inner, V); None where nothing was drawn."""
        return None

    @abstractmethod
    def take(self, rows: torch.Tensor) -> None:
        """Add what rows (nodes of ``level``, V) give; TreeError for another number of them."""

    @abstractmethod
    def grown(self) -> GrownTree:
        """The tree of what was taken."""

    def _feed(self, rows: torch.Tensor) -> list[int]:
        """Number the nodes that were fed, one for each row; a level deeper now."""
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

    With a generator they are drawn from the rows, which are then the draft's distributions q (MCSample).
    Without one they are the k_l highest of the rows, distinct: logits when greedy, log q + G with
    shared randomness. Nothing is drafted behind a token of ``ends``.
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
        """Add the children that rows (nodes of ``level``, V) give; TreeError for another number."""
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
        """As of ``Grower``."""
        return torch.cat(self._q) if self._q else None

    def grown(self) -> GrownTree:
        """The tree as it now is."""
        return GrownTree(TokenTree(tuple(self._tokens), tuple(self._parents)), tuple(self._fed))


class BudgetTree(Grower):
    """The tree of ``budget`` nodes whose expected number of accepted ones is highest (OPT-Tree).

    After Wang et al. 2024 (arXiv 2406.17276). A node's chance to be accepted is the product of the
    likelihoods along its path, which never grows on the way down: the best nodes of all hang
    together, and one that is not among the best so far has no descendant among them. So each level
    feeds only its nodes that are, and the result is the best tree of at most ``depth`` levels. For
    targets that emit one token whatever was drafted (greedy, shared randomness). Nothing is drafted
    behind a token of ``ends``.
    """

    def __init__(self, budget: int, depth: int, ends: frozenset[int] = frozenset()) -> None:
        if not 0 <= budget <= MAX_NODES or depth < 0:
            raise TreeError(f"a tree of {budget} nodes and {depth} levels is none; use 0 to {MAX_NODES} nodes")
        super().__init__(ends, budget > 0 and depth > 0)
        self._budget, self._levels = budget, depth
        self._chances: list[float] = []

    def take(self, rows: torch.Tensor) -> None:
        """Consider the children of ``level``'s nodes.

        rows: (nodes of level, V), each token's likelihood, 0 to 1, to be what the target emits
        there: the draft's probabilities when greedy, softmax(log q + G) with shared randomness.
        TreeError for another number of rows.
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

    @property
    def expected(self) -> float:
        """How many of the tree's nodes are accepted if the likelihoods are right."""
        return math.fsum(self._chances[node] for node in self._chosen())

    def grown(self) -> GrownTree:
        """The best tree of what was taken."""
        # Candidates lie level by level and by parent, so their order is a tree's.
        chosen = sorted(self._chosen())
        place = {node: index for index, node in enumerate(chosen)} | {ROOT: ROOT}
        tree = TokenTree(
            tuple(self._tokens[node] for node in chosen), tuple(place[self._parents[node]] for node in chosen)
        )
        return GrownTree(tree, tuple(self._fed[node] for node in chosen))

    def _chosen(self) -> list[int]:
        # The sort is stable: among equals an ancestor, which is older, comes first.
        order = sorted(range(len(self._chances)), key=lambda node: -self._chances[node])
        return order[: self._budget]
