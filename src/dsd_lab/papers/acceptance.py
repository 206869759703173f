# SPDX-License-Identifier: Apache-2.0
"""How often a drafted token is accepted, from the two distributions, and the bounds the papers give for it.

q is the draft's distribution, p the target's, float64 (..., V). Sources: TSLT (equations by number; notes say where a
print is wrong), and Daliri et al. 2024 (arXiv 2408.07978) for the Gumbel coupling. TheoryError for no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsd_lab.papers.theory import TheoryError, check_shares


def _distributions(*arrays: np.ndarray) -> list[np.ndarray]:
    given = [np.asarray(array, np.float64) for array in arrays]
    for array in given:
        if array.ndim == 0 or array.shape != given[0].shape:
            shapes = ", ".join(str(other.shape) for other in given)
            raise TheoryError(f"distributions of shapes {shapes}; give all over one vocabulary")
        # NaN fails both comparisons.
        if not (np.all(array >= 0) and np.all(np.abs(array.sum(-1) - 1) <= 1e-4)):
            raise TheoryError("a distribution must have entries of 0 or more that sum to 1")
    # A softmax in single precision over a large vocabulary sums to 1 only so far.
    return [array / array.sum(-1, keepdims=True) for array in given]


# ------------------------------------------------------------------------------------------- one candidate


def total_variation(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """TV(q, p) = 1/2 sum |q - p|, shape (...,): equation 16."""
    p, q = _distributions(p, q)
    return np.asarray(0.5 * np.abs(p - q).sum(-1))


def acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """beta = sum min(q, p) = 1 - TV(q, p), shape (...,): equations 6 and 15; the most of any lossless rule."""
    p, q = _distributions(p, q)
    return np.asarray(np.minimum(p, q).sum(-1))


def truncate(q: np.ndarray, *, top_k: int = 0, top_rho: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """q_hat (..., V), renormalised over what is kept, and sigma (...,), the mass dropped: equations 12 to 14.

    Kept are the ``top_k`` likeliest tokens, or the fewest likeliest that hold ``top_rho``; among equals the lower ids.
    (Equation 12 prints its two cases the wrong way round; 14 stops one token short of its own text.)
    """
    (q,) = _distributions(q)
    if (top_k > 0) == (top_rho > 0) or top_k < 0 or not 0 <= top_rho <= 1:
        raise TheoryError(f"top_k is {top_k} and top_rho {top_rho}; give one of them, a count or a share up to 1")
    order = np.argsort(-q, axis=-1, kind="stable")
    ordered = np.take_along_axis(q, order, -1)
    if top_k:
        kept = np.broadcast_to(np.arange(q.shape[-1]) < top_k, q.shape)
    else:
        # Rounding must not add a token to a nucleus that holds top_rho already.
        kept = np.cumsum(ordered, -1) - ordered < top_rho - 1e-12
    sigma = np.where(kept, 0.0, ordered).sum(-1)
    q_hat = np.zeros_like(q)
    np.put_along_axis(q_hat, order, np.where(kept, ordered, 0.0), -1)
    return q_hat / q_hat.sum(-1, keepdims=True), sigma


def truncation_bounds(beta: float, sigma: float) -> tuple[float, float]:
    """Least and most acceptance once a mass sigma is dropped, |beta_hat - beta| <= sigma: equations 20 and 22."""
    check_shares(beta=beta, sigma=sigma)
    return max(0.0, beta - sigma), min(1.0, beta + sigma)


# ------------------------------------------------------------------------------------- several candidates


def candidate_targets(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """p^(1) = p to p^(count + 1), (count + 1, V): p^(i+1) = norm(max(0, p^(i) - q)), equation 25."""
    p, q = _distributions(p, q)
    if p.ndim != 1 or count < 1:
        raise TheoryError(f"p of shape {p.shape}, {count} candidates; give one row and at least 1")
    targets = [p]
    for _ in range(count):
        rest = np.maximum(0.0, targets[-1] - q)
        left = rest.sum()
        targets.append(rest / left if left > 0 else targets[-1])
    return np.stack(targets)


def candidate_acceptance(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """beta^(j) = sum min(q, p^(j)) of candidate j where all before it were rejected, (count,): equations 29 to 31."""
    targets = candidate_targets(p, q, count)[:-1]
    return np.asarray(np.minimum(targets, _distributions(q)[0]).sum(-1))


def total_acceptance(rates: Sequence[float] | np.ndarray) -> float:
    """theta = beta^(1) + sum_i beta^(i) prod_(j<i) (1 - beta^(j)): equation 39; of expected rates equation 40."""
    theta, none_before = 0.0, 1.0
    for number, rate in enumerate(rates, 1):
        check_shares(**{f"the acceptance of candidate {number}": float(rate)})
        theta += float(rate) * none_before
        none_before *= 1 - float(rate)
    return theta


def candidate_bounds(rates: Sequence[float] | np.ndarray, sigma: float, *, factor: float = 2.0) -> np.ndarray:
    """The most by which dropping a mass sigma can move each beta^(j) in ``rates``, (count,): equation 35 (and 36).

    [sum_(k<j) prod_(s=k+1..j) (factor / Z^(s)) + 1] sigma with Z^(s) = TV(p^(s-1), q) = 1 - beta^(s-1). The paper
    proves factor 2; 1 holds as well (docs/theory.md). (Equations 34 and 56 print the index of Z one off.)
    """
    check_shares(sigma=sigma)
    bounds, distance = [], 0.0
    for number, rate in enumerate(rates, 1):
        check_shares(**{f"the acceptance of candidate {number}": float(rate)})
        bounds.append(distance + sigma)
        moved, z = factor * (distance + sigma), 1 - float(rate)
        distance = moved / z if z > 0 else (np.inf if moved else 0.0)
    return np.array(bounds)


# ------------------------------------------------------------------------------ two sides' mixtures (DRAGON)


def side_acceptance(own: np.ndarray, other: np.ndarray, eta_other: float, gamma_own: float = 0.5) -> np.ndarray:
    """How often a side's draft is accepted, (...,): DRAGON's equation 5.

    own, other: both sides' p; eta_other: the other side's share of the mixture; gamma_own: how often the own side's
    speculative sample is taken for the token, 1/2 in Algorithm 1.
    """
    own, other = _distributions(own, other)
    check_shares(eta_other=eta_other, gamma_own=gamma_own)
    apart = 1 - np.minimum(own, other).sum(-1)
    mixed = (1 - eta_other) * own + eta_other * other
    kept, met = 1 - eta_other * apart, (own * mixed).sum(-1)
    return np.asarray(gamma_own * kept + (1 - gamma_own) * met)


# ----------------------------------------------------------------------------------- shared randomness


def coupled_acceptance(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """P[argmax(log p + G) = argmax(log q + G)] for one Gumbel noise G on both sides, exactly, (...,).

    Token x wins on both sides with probability 1 / sum_y max(p(y)/p(x), q(y)/q(x)): exp(-G) are exponential variables
    E, and x must have E(x) <= E(y) min(p(x)/p(y), q(x)/q(y)) for every y.
    """
    p, q = _distributions(p, q)
    # In order of p / q, the maximum is q(y)/q(x) for the y before x and p(y)/p(x) from x on.
    order = np.argsort(np.arctan2(p, q), axis=-1, kind="stable")
    p, q = np.take_along_axis(p, order, -1), np.take_along_axis(q, order, -1)
    p_from = np.flip(np.cumsum(np.flip(p, -1), -1), -1)
    q_before = np.cumsum(q, -1) - q
    both = p * q
    total = p_from * q + q_before * p
    return np.asarray(np.divide(both, total, out=np.zeros_like(both), where=both > 0).sum(-1))


def coupled_bound(tv: float) -> float:
    """The least acceptance under the Gumbel coupling, (1 - TV) / (1 + TV): convex, so a mean TV bounds the mean."""
    check_shares(TV=tv)
    return (1 - tv) / (1 + tv)
