# SPDX-License-Identifier: Apache-2.0
"""The acceptance of coupling, by formula and bound, against decoding's shared noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sequence_rules import verify_coupled

from dsd_lab.papers.acceptance import coupled_acceptance, coupled_bound, total_variation
from dsd_ros.decoding.coupling import choose, gumbel

SURE = 1e-6
SAMPLES = 2000


def chance(found: np.ndarray, expected: np.ndarray) -> float:
    """The chance that rates over so many samples each lie so far from the expected ones, or further."""
    spread = np.sqrt(expected * (1 - expected) / SAMPLES)
    return float(stats.chi2.sf((((found - expected) / spread) ** 2).sum(), df=found.size))


def coupled(p: np.ndarray, q: np.ndarray, reply: int) -> float:
    """How often ``verify_coupled`` accepts the token that the draft chose with the same noise."""
    rows_p, row_q = torch.tensor(np.stack([p, p])), torch.tensor(q)
    accepted = 0
    for position in range(SAMPLES):
        drafted = choose(row_q, gumbel(7, reply, position, len(q)))
        verdict = verify_coupled([drafted], rows_p, lambda i, at=position: gumbel(7, reply, at + i, len(p)))
        accepted += verdict.accepted
    return accepted / SAMPLES


def test_acceptance_of_the_coupling():
    p, q = np.random.default_rng(23).dirichlet(np.full(8, 0.7), size=(2, 3))
    expected = coupled_acceptance(p, q)
    found = np.array([coupled(*rows, reply=i) for i, rows in enumerate(zip(p, q, strict=True))])
    assert chance(found, expected) > SURE
    # It is neither the optimum nor as bad as its bound.
    tv = total_variation(p, q)
    bound = np.array([coupled_bound(float(distance)) for distance in tv])
    assert chance(found, 1 - tv) < SURE and chance(found, bound) < SURE
    assert np.all(found > bound - 0.05) and np.all(found < 1 - tv + 0.05)


def test_the_couplings_bound_is_reached():
    """Uniform on sets of one size: acceptance is what they share of what they cover."""
    p, q = np.array([4, 4, 4, 4, 0, 0]) / 16, np.array([0, 0, 4, 4, 4, 4]) / 16
    assert coupled_bound(float(total_variation(p, q))) == pytest.approx(1 / 3)
    assert coupled_acceptance(p, q) == pytest.approx(1 / 3)
    assert chance(np.array([coupled(p, q, reply=9)]), np.array([1 / 3])) > SURE
