# SPDX-License-Identifier: Apache-2.0
"""Every acceptance formula and bound against acceptance sampled with the product's own rules.

Measurements draw from fixed seeds. Sums of squared deviations are held against chi-squared at one in a million, and
each test shows that a wrong rule, or a bound a little tighter, would have been caught with the same samples.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sequence_rules import verify_draft

from dsd_lab.papers.acceptance import (
    acceptance,
    candidate_acceptance,
    candidate_bounds,
    candidate_targets,
    coupled_acceptance,
    coupled_bound,
    total_acceptance,
    total_variation,
    truncate,
    truncation_bounds,
)
from dsd_lab.papers.proofs import dssd_comm_seconds
from dsd_lab.papers.theory import TheoryError, expected_tokens
from dsd_ros.decoding.rejection import verify_tree
from dsd_ros.decoding.tree import TokenTree

SURE = 1e-6
SAMPLES = 2000


def pairs(count: int, seed: int, vocabulary: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Random p and q, (count, V) each, all tokens possible."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocabulary, 0.7), size=(2, count)) + 1e-3
    return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)


def draws(q: np.ndarray, shape: tuple[int, ...], rng: np.random.Generator) -> list:
    return rng.choice(len(q), size=shape, p=q).tolist()


def measured(p: np.ndarray, q: np.ndarray, seed: int, samples: int = SAMPLES) -> float:
    """How often ``verify_draft`` accepts one token drawn from q."""
    rng = np.random.default_rng(seed)
    rows_p, row_q = torch.tensor(np.stack([p, p])), torch.tensor(q)[None]
    return float(np.mean([verify_draft(x, row_q, rows_p, rng).accepted for x in draws(q, (samples, 1), rng)]))


def chance(found: np.ndarray, expected: np.ndarray, samples: int | np.ndarray) -> float:
    """The chance that rates over so many samples each lie so far from the expected ones, or further."""
    spread = np.sqrt(np.maximum(expected * (1 - expected), 1e-9) / samples)
    return float(stats.chi2.sf((((found - expected) / spread) ** 2).sum(), df=found.size))


def margin(samples: int = SAMPLES) -> float:
    """What the difference of two measured rates can be off by, but for one case in a million."""
    return float(stats.norm.isf(SURE / 2) * np.sqrt(2 * 0.25 / samples))


def test_acceptance_is_one_less_tv():
    p, q = pairs(6, seed=1)
    expected = acceptance(p, q)
    assert expected == pytest.approx(1 - total_variation(p, q))
    found = np.array([measured(*rows, seed=i) for i, rows in enumerate(zip(p, q, strict=True))])
    assert chance(found, expected, SAMPLES) > SURE
    # The ratio upside down, as both papers print it, accepts draft over target.
    inverted = (q * np.minimum(1, q / p)).sum(-1)
    assert chance(found, inverted, SAMPLES) < SURE


def test_tokens_a_round_and_rejected_rounds():
    """Equation 8 of TSLT and the 1 - alpha^gamma of DSSD's equation 9, over rounds of four."""
    (p,), (q,) = pairs(1, seed=9)
    gamma, rng = 4, np.random.default_rng(3)
    rows_p, rows_q = (torch.tensor(np.tile(row, (gamma + 1, 1))) for row in (p, q))
    rounds = np.array([verify_draft(x, rows_q[:gamma], rows_p, rng).accepted for x in draws(q, (SAMPLES, gamma), rng)])
    alpha = float(acceptance(p, q))
    assert 0.3 < alpha < 0.9
    tokens = 1 + rounds.mean()
    spread = rounds.std() / np.sqrt(SAMPLES)
    limit = stats.norm.isf(SURE / 2) * spread
    assert abs(tokens - expected_tokens(alpha=alpha, gamma=gamma)) < limit
    assert abs(tokens - (1 + gamma * alpha)) > limit  # what TSLT's equation 28 counts
    rejected = np.array([(rounds < gamma).mean()])
    theory = np.array([dssd_comm_seconds(alpha=alpha, gamma=gamma, t_v=1.0)])
    assert chance(rejected, theory, SAMPLES) > SURE
    assert chance(rejected, np.array([1 - alpha]), SAMPLES) < SURE


@pytest.mark.parametrize("keep", [{"top_k": 3}, {"top_rho": 0.8}])
def test_truncation_moves_acceptance_by_what_it_drops_at_most(keep):
    """Equations 17 and 20 to 22."""
    p, q = pairs(4, seed=2)
    q_hat, sigma = truncate(q, **keep)
    assert total_variation(q_hat, q) == pytest.approx(sigma)  # 21
    before = np.array([measured(*rows, seed=i) for i, rows in enumerate(zip(p, q, strict=True))])
    after = np.array([measured(*rows, seed=i) for i, rows in enumerate(zip(p, q_hat, strict=True))])
    assert chance(after, acceptance(p, q_hat), SAMPLES) > SURE  # 17
    assert chance(after, acceptance(p, q), SAMPLES) < SURE
    assert np.all(np.abs(after - before) <= sigma + margin())  # 20
    assert abs(after.mean() - before.mean()) <= sigma.mean() + margin(4 * SAMPLES)  # 22
    for beta, beta_hat, dropped in zip(acceptance(p, q), after, sigma, strict=True):
        low, high = truncation_bounds(float(beta), float(dropped))
        assert low - margin() <= beta_hat <= high + margin()


def test_no_tighter_bound_on_truncation_holds():
    """Both ends of equation 20 are reached: by a target on the kept tokens, and by one on the dropped."""
    _, (q,) = pairs(1, seed=4)
    q_hat, sigma = (part[0] for part in truncate(q[None], top_k=2))
    dropped = np.where(q_hat > 0, 0, q) / sigma
    assert sigma > 0.25
    for p, sign in ((q_hat, 1), (dropped, -1)):
        moved = measured(p, q_hat, seed=5) - measured(p, q, seed=6)
        assert sign * moved == pytest.approx(sigma, abs=margin())
        assert abs(moved) > sigma / 2 + margin()


def test_what_is_kept():
    q = np.array([0.1, 0.4, 0.1, 0.3, 0.1])
    for keep, ids in [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [0, 1, 3]),  # of equals the lower id
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_rho": 0.7}, [1, 3]),
        ({"top_rho": 0.71}, [0, 1, 3]),
        ({"top_rho": 0.01}, [1]),
        ({"top_rho": 1.0}, [0, 1, 2, 3, 4]),
    ]:
        q_hat, sigma = truncate(q, **keep)
        assert q_hat.nonzero()[0].tolist() == ids
        assert sigma == pytest.approx(1 - q[ids].sum()) and q_hat.sum() == pytest.approx(1)
        assert q_hat[ids] == pytest.approx(q[ids] / q[ids].sum())


def test_distributions_of_a_model_in_single_precision():
    """Their sums are off by more than the formulas may be."""
    logits = torch.tensor(np.random.default_rng(43).normal(size=(2, 3, 50_000)) * 3)
    p, q = torch.softmax(logits.float(), -1).numpy() * np.float32(1 + 2e-5)
    assert acceptance(p, q) == pytest.approx(1 - total_variation(p, q), abs=1e-12)
    assert candidate_acceptance(p[0], p[0], 2) == pytest.approx([1, 1], abs=1e-12)
    assert coupled_acceptance(p, p) == pytest.approx(1, abs=1e-9)
    q_hat, sigma = truncate(q, top_k=500)
    assert total_variation(q_hat, q) == pytest.approx(sigma, abs=1e-9)


# ------------------------------------------------------------------------------------- several candidates


def tree_rates(
    p: np.ndarray, q: np.ndarray, count: int, seed: int, samples: int = SAMPLES
) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance of each candidate by ``verify_tree`` where those before it fell, and how many got there."""
    rng = np.random.default_rng(seed)
    rows_p, row_q = torch.tensor(np.tile(p, (count + 1, 1))), torch.tensor(q)[None]
    accepted = np.zeros(count)
    for children in draws(q, (samples, count), rng):
        tree = TokenTree(tuple(children), (-1,) * count)
        path = verify_tree(tree, row_q, rows_p, rng).path
        if path:
            accepted[path[0]] += 1
    reached = samples - np.concatenate([[0], np.cumsum(accepted)[:-1]])
    return accepted / reached, reached


def test_acceptance_of_several_candidates():
    """Equations 25, 30 and 39: each candidate's, and all together."""
    p, q = pairs(3, seed=11)
    for number, (p_row, q_row) in enumerate(zip(p, q, strict=True)):
        rates = candidate_acceptance(p_row, q_row, 3)
        found, reached = tree_rates(p_row, q_row, 3, seed=number)
        assert chance(found, rates, reached) > SURE
        # Were the target not replaced by its residual, every candidate would do as well as the first.
        assert chance(found, np.full(3, rates[0]), reached) < SURE
        theta = total_acceptance(rates)
        assert theta == pytest.approx(1 - np.prod(1 - rates)) and theta > rates[0]
        together = np.array([total_acceptance(found)])
        assert chance(together, np.array([theta]), SAMPLES) > SURE
        targets = candidate_targets(p_row, q_row, 3)
        assert targets.shape == (4, 8) and targets.sum(-1) == pytest.approx(1)
        # Accepted or not, what is emitted is distributed as p.
        emitted, none_before = np.zeros(8), 1.0
        for rate, target in zip(rates, targets, strict=False):
            emitted += none_before * np.minimum(q_row, target)
            none_before *= 1 - rate
        assert emitted + none_before * targets[-1] == pytest.approx(p_row)


def test_truncation_of_several_candidates():
    """Equation 35 over many distributions, and the tighter one with factor 1, which cannot be much tighter."""
    rng = np.random.default_rng(19)
    nearest = np.zeros(2)
    for _ in range(1500):
        size, shape = int(rng.integers(2, 10)), 10 ** rng.uniform(-1, 1)
        p, q = rng.dirichlet(np.full(size, shape), size=2)
        q_hat, sigma = truncate(q, top_k=int(rng.integers(1, size + 1)))
        rates = candidate_acceptance(p, q, 3)
        moved = np.abs(candidate_acceptance(p, q_hat, 3) - rates)
        for place, factor in enumerate((2.0, 1.0)):
            bounds = candidate_bounds(rates, float(sigma), factor=factor)
            assert bounds[0] == pytest.approx(sigma)
            assert np.all(moved <= bounds + 1e-9)
            share = moved[1:] / np.maximum(bounds[1:], 1e-9)
            nearest[place] = max(nearest[place], share.max())
    assert nearest[0] < 0.6 and nearest[1] > 0.95


def test_candidate_bounds_by_hand():
    assert candidate_bounds([0.6, 0.2, 0.3], 0.1) == pytest.approx(
        [0.1, 0.1 * (2 / 0.4 + 1), 0.1 * (2 / 0.4 * 2 / 0.8 + 2 / 0.8 + 1)]
    )
    assert candidate_bounds([1.0, 0.5], 0.1).tolist() == [0.1, np.inf]
    assert candidate_bounds([1.0, 0.5], 0.0).tolist() == [0.0, 0.0]
    same = np.array([0.5, 0.5])
    assert candidate_acceptance(same, same, 3).tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------- shared randomness


def test_the_coupling_lies_between_its_bound_and_the_optimum():
    rng = np.random.default_rng(29)
    for size in (2, 5, 300):
        p, q = rng.dirichlet(np.full(size, 0.3), size=(2, 300))
        q[:, 0] = 0  # tokens that one side cannot draw
        q /= q.sum(-1, keepdims=True)
        tv = total_variation(p, q)
        kept = coupled_acceptance(p, q)
        assert np.all(kept <= 1 - tv + 1e-9)
        assert np.all(kept >= (1 - tv) / (1 + tv) - 1e-9)
    # By the formula, term by term.
    (p,), (q,) = pairs(1, seed=31)
    terms = [1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p))]
    assert coupled_acceptance(p, q) == pytest.approx(sum(terms))
    assert coupled_acceptance(p, p) == pytest.approx(1)


def test_what_is_no_distribution_is_refused():
    for call, message in [
        (lambda: acceptance(np.ones(3) / 3, np.ones(2) / 2), "one vocabulary"),
        (lambda: acceptance(np.ones(3), np.ones(3) / 3), "sum to 1"),
        (lambda: total_variation(np.array([1.5, -0.5]), np.ones(2) / 2), "sum to 1"),
        (lambda: truncate(np.ones(2) / 2), "give one of them"),
        (lambda: candidate_targets(np.ones((1, 2)) / 2, np.ones((1, 2)) / 2, 2), "one row"),
        (lambda: total_acceptance([0.5, 1.5]), "candidate 2"),
        (lambda: truncation_bounds(0.5, float("nan")), "sigma"),
        (lambda: coupled_bound(1.5), "share from 0 to 1"),
    ]:
        with pytest.raises(TheoryError, match=message):
            call()
