# SPDX-License-Identifier: Apache-2.0
"""Truncate, then sample (TSLT): the draft is drawn from a truncated distribution and verified against it.

The truncated distribution q_hat is rounded to the precision it is sent in before anything is drawn from it. Both
sides then have the same bits, and verification against q_hat is as exact as against q.
"""

from __future__ import annotations

import numpy as np
import torch

from dsd_ros.decoding.settings import FLOATS, MAX_KEPT, SamplingError


def truncate(
    q: torch.Tensor, top_k: int, top_rho: float = 0.0, dtype: str = FLOATS[0]
) -> tuple[np.ndarray, np.ndarray]:
    """The ``top_k`` likeliest tokens of q (V,), or the fewest with a mass of ``top_rho`` if that is above 0.

    Returns ids (k,) int64 ascending and weights (k,) of ``dtype`` (one of FLOATS), relative to the likeliest's 1.
    Tokens whose weight rounds to 0 (float16: below 3e-8) are dropped.
    """
    limit = min(MAX_KEPT, len(q)) if top_rho > 0.0 else min(top_k, len(q))
    values, ids = q.detach().cpu().topk(limit)
    weights = values.double().numpy()
    if top_rho > 0.0:
        # Up to and including the token that reaches the mass.
        weights = weights[np.cumsum(weights) - weights < top_rho]
    rounded = (weights / weights[0]).astype(dtype)
    kept = rounded > 0
    chosen = ids.numpy()[: len(rounded)][kept]
    order = np.argsort(chosen)
    return chosen[order], rounded[kept][order]


def restored(ids: np.ndarray, weights: np.ndarray, vocab_size: int) -> torch.Tensor:
    """q_hat (V,) float32 from what ``truncate`` kept, the same bits on both sides of a link.

    Weights are summed in float64, one by one in the order of ids. SamplingError unless each is a positive number.
    """
    # NaN fails every comparison.
    if not (len(weights) and bool((weights > 0).all()) and bool(np.isfinite(weights).all())):
        raise SamplingError("a truncated distribution has a weight that is not a positive number")
    exact = weights.astype(np.float64)
    q = np.zeros(vocab_size, np.float32)
    q[ids] = exact / np.add.accumulate(exact)[-1]
    return torch.from_numpy(q)
