"""How near draft and target are over replies' tokens, and what truncation leaves of it, for `dsd-lab bench wire`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsd_lab.papers.acceptance import acceptance, coupled_acceptance

_CURVE_POINTS = 24


class Distances:
    """Means over positions: acceptance by the two distributions, and the mass that K tokens hold.

    ``kept``: values of K wanted besides those of a curve over the whole vocabulary. ``children``: how many candidates
    the nodes of trees have.
    """

    def __init__(self, vocabulary: int, kept: Sequence[int], children: Sequence[int] = ()) -> None:
        grid = {round(k) for k in np.geomspace(1, vocabulary, _CURVE_POINTS)}
        self.kept = sorted(grid | set(kept))
        self.tokens = 0
        self._children = sorted({1, *children})
        self._coupled = self._optimal = self._target_kept = 0.0
        self._mass = dict.fromkeys((*self.kept, vocabulary), 0.0)
        self._accepted = dict.fromkeys([(k, n) for k in self._mass for n in self._children], 0.0)
        self._vocabulary = vocabulary

    def add(self, p: np.ndarray, q: np.ndarray) -> None:
        """Add the distributions (n, V) of target and draft after the same tokens."""
        self.tokens += len(p)
        self._optimal += float(acceptance(p, q).sum())
        self._coupled += float(coupled_acceptance(p, q).sum())
        self._target_kept += float((p > 0).sum())
        # By q, the likeliest first and among equals the lower id, the order in which ``acceptance.truncate`` keeps.
        order = np.argsort(-q, axis=-1, kind="stable")
        p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
        masses = np.cumsum(q, -1)
        for k in self._mass:
            mass = masses[:, min(k, q.shape[-1]) - 1]
            self._mass[k] += float((mass / masses[:, -1]).sum())
            totals = _total_acceptance(p[:, :k], q[:, :k] / mass[:, None], max(self._children))
            for n in self._children:
                self._accepted[k, n] += float(totals[n - 1].sum())

    @property
    def optimal(self) -> float:
        """1 - TV: the most that any proof of one candidate can have."""
        return self._optimal / self.tokens

    @property
    def coupled(self) -> float:
        """The part of it that shared randomness keeps, exactly."""
        return self._coupled / self.tokens

    def expected(self, proof: str, k: int, children: int = 1) -> float | None:
        """Acceptance of a position, or of a tree's level of ``children`` candidates, by the two distributions.

        Of one candidate 1 - TV, of q_hat if truncated, exact for coupled; of several TSLT's theta (equation 39). None
        for several candidates of shared randomness, which are no independent draws.
        """
        if proof == "coupled":
            return self.coupled if children == 1 else None
        k = k if proof == "truncated" else self._vocabulary
        return self._accepted[k, children] / self.tokens

    def mass(self, k: int) -> float:
        """The share of q that its k likeliest tokens hold."""
        return self._mass[k] / self.tokens

    @property
    def target_kept(self) -> int:
        """How many ids p has on average."""
        return max(1, round(self._target_kept / self.tokens))


def _total_acceptance(p: np.ndarray, q: np.ndarray, count: int) -> list[np.ndarray]:
    """theta of 1 to ``count`` candidates, (n,) each: TSLT equations 25, 29 and 39 where q (n, K) has all its mass.

    p needs no more columns than q: where q is 0 a residual is never compared with it.
    """
    found, left, total = [], np.ones(len(p)), np.zeros(len(p))
    for _ in range(count):
        beta = np.minimum(p, q).sum(-1)
        total = total + left * beta
        left = left * (1.0 - beta)
        found.append(np.minimum(total, 1.0))
        p = np.maximum(p - q, 0.0) / np.maximum(1.0 - beta, 1e-12)[:, None]
    return found
