"""Intervals that figures stand in with 95 % confidence: Wilson's for shares, the bootstrap's for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 2000


def wilson(hits: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The score interval of a share (E. B. Wilson, 1927); (0, 1) of nothing."""
    if of == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, spread = hits / of, z * z / of
    middle = share + spread / 2
    reach = z * math.sqrt(share * (1 - share) / of + spread / of / 4)
    # Rounding must not shut a share of 0 or 1 out.
    low, high = (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)
    return (0.0 if hits == 0 else low), (1.0 if hits == of else high)


def bootstrap(
    tops: Sequence[float], bottoms: Sequence[float] | None = None, seed: int = 0, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The percentile interval of a mean, or of sum(tops) / sum(bottoms) over pairs, seeded.

    After B. Efron, 1979: as many pairs are drawn with replacement, 2000 times. (nan, nan) of nothing.
    """
    if len(tops) == 0:
        return math.nan, math.nan
    above = np.asarray(tops, dtype=np.float64)
    below = np.ones(len(above)) if bottoms is None else np.asarray(bottoms, dtype=np.float64)
    rng = np.random.default_rng([seed, 80])
    ratios = []
    for _ in range(_RESAMPLES):
        rows = rng.integers(len(above), size=len(above))
        ratios.append(above[rows].sum() / max(below[rows].sum(), 1e-12))
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def share(values: Sequence[bool]) -> dict[str, Any]:
    """{"value", "low", "high", "of"} of a share; the value is None of nothing."""
    hits, of = sum(map(bool, values)), len(values)
    low, high = wilson(hits, of)
    return {"value": hits / of if of else None, "low": low, "high": high, "of": of}


def ratio(tops: Sequence[float], bottoms: Sequence[float] | None = None) -> dict[str, Any]:
    """The same of a mean, or of a ratio of sums; None in place of figures of nothing."""
    if len(tops) == 0:
        return {"value": None, "low": None, "high": None, "of": 0}
    low, high = bootstrap(tops, bottoms)
    value = sum(tops) / (len(tops) if bottoms is None else max(sum(bottoms), 1e-12))
    return {"value": float(value), "low": low, "high": high, "of": len(tops)}
