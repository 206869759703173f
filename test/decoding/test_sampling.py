# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st

from dsd_ros.decoding.sampling import SamplingError, SamplingSettings, generator_for, sample, transform

LOGITS = torch.tensor([2.0, 0.5, -1.0, 2.5, -torch.inf])


def test_greedy_is_a_one_hot_of_the_argmax():
    assert transform(LOGITS, SamplingSettings()).tolist() == [0, 0, 0, 1, 0]


def test_top_p_keeps_the_smallest_sufficient_set():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, kept in ((0.4, 1), (0.6, 2), (0.81, 3), (0.99, 4)):
        cut = transform(p.log(), SamplingSettings(1.0, top_p=top_p))
        assert int((cut > 0).sum()) == kept
        assert torch.allclose(cut[:kept], p[:kept] / p[:kept].sum())


def test_top_p_over_a_large_and_flat_vocabulary():
    p = transform(torch.zeros(5000), SamplingSettings(1.0, top_p=0.5))
    assert int((p > 0).sum()) == pytest.approx(2500, abs=2)


@given(st.integers(0, 1 << 30), st.floats(0, 100), st.integers(0, 40), st.floats(0.01, 1.0))
@profile(max_examples=60)
def test_rows_are_distributions_and_do_not_depend_on_their_batch(seed, temperature, top_k, top_p):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (3, 30)).astype(np.float32))
    chosen = SamplingSettings(temperature, top_k, top_p)
    p = transform(logits, chosen)
    assert torch.allclose(p.sum(-1), torch.ones(3), atol=1e-5) and bool((p >= 0).all())
    for row in range(3):
        assert torch.equal(transform(logits[row], chosen), p[row])


def test_draws_follow_the_weights_and_never_take_a_zero():
    weights = torch.tensor([0.0, 2.0, 0.0, 6.0, 0.0])
    generator = np.random.default_rng(0)
    counts = np.bincount([sample(weights, generator) for _ in range(4000)], minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert counts[3] / 4000 == pytest.approx(0.75, abs=0.03)


class _Extreme:
    """A generator at the ends of its range."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_extreme_draws_stay_within_the_support(draw):
    weights = torch.tensor([0.0, 0.1, 0.7, 0.2, 0.0])
    assert sample(weights, _Extreme(draw)) in (1, 3)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_what_is_no_distribution_is_refused(weights):
    with pytest.raises(SamplingError):
        sample(torch.tensor(weights), np.random.default_rng(0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_broken_logits_are_refused(value, temperature):
    with pytest.raises(SamplingError, match="not finite"):
        transform(torch.full((2, 4), value), SamplingSettings(temperature))


@pytest.mark.parametrize(
    "values", [(-1.0, 0, 1.0), (float("nan"), 0, 1.0), (101.0, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.1)]
)
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(SamplingError, match="use"):
        SamplingSettings(*values)


def test_streams_repeat_and_never_coincide():
    draws = {
        (side, seed, reply, number): generator_for(side, seed, reply, number).random()
        for side in ("draft", "verifier")
        for seed in (0, 1)
        for reply in (0, 1)
        for number in (0, 1)
    }
    assert len(set(draws.values())) == len(draws)
    assert generator_for("draft", 1, 0, 1).random() == draws["draft", 1, 0, 1]
