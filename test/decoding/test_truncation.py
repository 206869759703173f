# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st

from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.decoding.truncation import restored, truncate


def distribution(seed: int, size: int) -> torch.Tensor:
    logits = np.random.default_rng(seed).normal(0, 3, size)
    return torch.softmax(torch.from_numpy(logits), -1).float()


@given(st.integers(0, 1 << 20), st.integers(1, 60), st.integers(1, 80))
@profile(max_examples=100)
def test_the_likeliest_tokens_are_kept_in_proportion(seed, size, k):
    q = distribution(seed, size)
    ids, weights = truncate(q, k)
    best = set(q.topk(min(k, size)).indices.tolist())
    assert set(ids.tolist()) <= best and len(ids) >= 1 and (np.diff(ids) > 0).all()
    # What is left out beyond the rule is next to nothing.
    assert sum(float(q[i]) for i in best - set(ids.tolist())) < 1e-5
    cut = restored(ids, weights, size)
    assert cut.dtype == torch.float32 and float(cut.double().sum()) == pytest.approx(1, abs=1e-6)
    wanted = q[ids] / q[ids].sum()
    assert cut[ids].numpy() == pytest.approx(wanted.numpy(), rel=2e-3, abs=1e-6)
    assert int((cut > 0).sum()) == len(ids)


@pytest.mark.parametrize("rho", [0.01, 0.5, 0.9, 1.0])
def test_a_nucleus_is_the_fewest_of_that_mass(rho):
    q = distribution(3, 50)
    ids, _ = truncate(q, 1, rho)
    ordered = q.double().sort(descending=True).values
    fewest = int((ordered.cumsum(0) < rho - 1e-9).sum()) + 1
    assert abs(len(ids) - min(fewest, 50)) <= (rho == 1.0) * 10
    assert rho == 1.0 or float(q[ids].sum()) >= rho > float(ordered[: len(ids) - 1].sum())


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, np.nan], [np.inf, 1.0], [-1.0, 1.0]])
def test_weights_that_are_none_are_refused(weights):
    values = np.array(weights, np.float16)
    with pytest.raises(SamplingError, match="truncated"):
        restored(np.arange(len(values)), values, 5)


def test_weights_of_single_precision_are_summed_one_by_one_in_the_order_of_ids():
    q = distribution(5, 1000)
    ids, weights = truncate(q, 300, dtype="float32")
    assert weights.dtype == np.float32 and len(ids) == 300
    total = 0.0
    for weight in weights.tolist():
        total += weight
    wanted = (weights.astype(np.float64) / total).astype(np.float32)
    assert restored(ids, weights, 1000)[ids].tolist() == wanted.tolist()
    # What rounding to float16 cuts off is kept.
    halved, rough = truncate(q, 300)
    kept = q[ids] / q[ids].double().sum()
    near = (restored(ids, weights, 1000)[ids] - kept).abs().max()
    assert near < (restored(halved, rough, 1000)[ids] - kept).abs().max() / 100
