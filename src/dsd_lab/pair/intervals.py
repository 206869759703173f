"""Figures with their 95 % confidence intervals: Wilson's for shares, the bootstrap's for means and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
_RESAMPLES = 2000


def share(values: Sequence[bool]) -> dict[str, Any]:
    """{"value", "low", "high", "of"} of a share (E. B. Wilson, 1927); the value of nothing is None."""
    hits, of = sum(map(bool, values)), len(values)
    if of == 0:
        return {"value": None, "low": 0.0, "high": 1.0, "of": 0}
    low, high = binomtest(hits, of).proportion_ci(CONFIDENCE, method="wilson")
    return {"value": hits / of, "low": float(low), "high": float(high), "of": of}


def ratio(tops: Sequence[float], bottoms: Sequence[float] | None = None) -> dict[str, Any]:
    """The same of a mean, or of sum(tops) / sum(bottoms): 2000 seeded resamples of the pairs (B. Efron, 1979)."""
    if len(tops) == 0:
        return {"value": None, "low": None, "high": None, "of": 0}
    above = np.asarray(tops, dtype=np.float64)
    below = np.ones(len(above)) if bottoms is None else np.asarray(bottoms, dtype=np.float64)
    rng = np.random.default_rng([0, 80])
    rows = (rng.integers(len(above), size=len(above)) for _ in range(_RESAMPLES))
    found = [above[some].sum() / max(below[some].sum(), 1e-12) for some in rows]
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    value = above.sum() / max(below.sum(), 1e-12)
    return {"value": float(value), "low": float(low), "high": float(high), "of": len(tops)}
