# SPDX-License-Identifier: Apache-2.0
"""Tests the joint distribution of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import stats

from dsd_ros.edge.session import EdgeSession

IMAGE = np.full((1, 1, 3), 3, np.uint8)
INSTRUCTION = "go"
LENGTH = 3
PER_REPLY = 100  # independent stretches of LENGTH tokens, which rounds cross anywhere
ALPHA = 1e-3  # of a false alarm, per test
FEW = 4_000  # to notice an error of 5 %
MANY = 27_000  # 2 %
ODD = 0.25  # p-value of the first half of the draws, below which the second half is drawn


def in_halves(draw: Callable[[int], np.ndarray], samples: int, p_of: Callable[[np.ndarray], float]) -> float:
    """The p-value of ``samples`` draws, or of their first half where that looks as it should: mostly.

    An error that ``samples`` show has nearly always made the first half odd, so little of their power is lost.
    """
    counts = draw(samples // 2)
    p = p_of(counts)
    return p if p > ODD else p_of(counts + draw(samples - samples // 2))


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """The smallest of: whole joint distribution, and each position's own; corrected for their number.

    An error spread over hundreds of cells hides in the joint and shows in a marginal.
    """
    views = [tuple(range(LENGTH))] + [(axis,) for axis in range(LENGTH)]
    values = []
    for view in views:
        others = tuple(axis for axis in range(LENGTH) if axis not in view)
        values.append(chi_squared(counts.sum(axis=others), expected.sum(axis=others)))
    return min(1.0, len(values) * min(values))


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    counts, expected = counts.ravel(), expected.ravel() * counts.sum() / expected.sum()
    assert counts[expected == 0].sum() == 0, "a token came that the target never says"
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    # Cells too rare for the test's approximation count as one.
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return float(stats.chisquare(counts[keep], expected[keep]).pvalue)


def count(session: EdgeSession, size: int, samples: int) -> np.ndarray:
    counts = np.zeros((size,) * LENGTH)
    for _ in range(samples // PER_REPLY):
        tokens = session.decode(IMAGE, INSTRUCTION).tokens
        for stretch in np.reshape(tokens, (PER_REPLY, LENGTH)):
            counts[tuple(stretch)] += 1
    return counts
