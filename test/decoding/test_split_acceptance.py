# SPDX-License-Identifier: Apache-2.0
"""Split verification with rounded-up probabilities is exact; the plain residual would not be."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dsd_ros.decoding.methods import DraftVerdict, Result, RoundContext, split
from dsd_ros.decoding.methods.split import LEAST_CHANCE, rounded_up, split_residual
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import TokenTree


def test_a_forecast_of_the_recovered_token_mostly_comes_true():
    """The cloud lacks q, the robot has it, and both draw with the noise of the position."""
    sampling, tree, held = SamplingSettings(temperature=1.0), TokenTree.chain([3, 5]), 0
    rng = np.random.default_rng(4)
    for seed in range(300):
        logits = rng.normal(size=(2, 40)) * 2
        q, p = (torch.softmax(torch.tensor(x, dtype=torch.float32), 0) for x in (logits[0], logits.mean(0)))
        context = RoundContext(sampling, seed, 1, 2, 7)
        verdict = DraftVerdict(1, 0, p[None])
        said = split.forecast(verdict, tree, context)
        assert said.accepted == 1 and said.target is None and said.next_token != 5
        draft = SimpleNamespace(tree=tree, q=[q, q], context=context)
        result = split.finish(draft, Result(1, 0, split.pack_target(p[None], False), 40))
        assert result.recovered == (result.next_token,)
        held += result.next_token == said.next_token
    assert held > 150
    known = DraftVerdict(2, 9)
    assert split.forecast(known, tree, context) is known


def test_the_recovered_token_is_drawn_from_the_residual(monkeypatch):
    """From that of the rounded chances, which coarse ones tell from max(0, p - q)."""
    monkeypatch.setattr(split, "rounded_up", coarse)
    sampling, tree, size = SamplingSettings(temperature=1.0), TokenTree.chain([3, 5]), 6
    p, q = torch.tensor([0.3, 0.15, 0.25, 0.1, 0.1, 0.1]), torch.tensor([0.05, 0.3, 0.05, 0.05, 0.05, 0.5])
    counts = torch.zeros(size)
    for seed in range(1500):
        context = RoundContext(sampling, seed, 1, 2, 7)
        draft = SimpleNamespace(tree=tree, q=[q, q], context=context)
        result = split.finish(draft, Result(1, 0, split.pack_target(p[None], False), size))
        assert result.accepted == 1 and result.recovered == (result.next_token,)
        counts[result.next_token] += 1
    wanted = torch.tensor([0.25, 0.06, 0.2, 0.05, 0.05, 0.0])  # p - q min(1, p / r)
    assert (counts / counts.sum()).tolist() == pytest.approx((wanted / wanted.sum()).tolist(), abs=0.03)


def row(seed: int, size: int) -> torch.Tensor:
    values = np.random.default_rng(seed).dirichlet(np.full(size, 0.5))
    return torch.from_numpy(values.astype(np.float32))


def coarse(q: torch.Tensor) -> torch.Tensor:
    """Up to the next power of two: as exact, and what it takes to see a wrong residual in few samples."""
    return torch.exp2(torch.ceil(torch.log2(q.float().clamp(min=LEAST_CHANCE)))).clamp(max=1.0)


@given(st.floats(0, 1, width=32))
def test_a_chance_is_rounded_to_the_next_of_those_that_travel(value):
    q = torch.tensor([value], dtype=torch.float32)
    r = rounded_up(q)
    bits = int(r.view(torch.int32))
    assert bits & 0xFFFF == 0 and LEAST_CHANCE <= float(r) <= 1 and float(r) >= float(q)
    below = torch.tensor([bits - 0x10000], dtype=torch.int32).view(torch.float32)
    assert float(q) <= LEAST_CHANCE or float(below) < float(q)
    assert rounded_up(r).tolist() == r.tolist()


@given(st.integers(0, 1 << 30), st.integers(2, 9), st.integers(-3, 3), st.booleans())
def test_what_is_emitted_is_the_target(seed, size, difference, rough):
    p, q = row(seed, size), row(seed + 1, max(2, size + difference))
    with pytest.MonkeyPatch.context() as patch:
        if rough:
            patch.setattr(split, "rounded_up", coarse)
        before = p.clone(), q.clone()
        rest = split_residual(p, q).double().numpy()
        assert torch.equal(p, before[0]) and torch.equal(q, before[1])
        r = split.rounded_up(q).double().numpy()
    emitted = np.zeros(size)
    for x, q_x in enumerate(q.double().tolist()):
        if x < size and q_x > 0:
            emitted[x] += q_x * min(1, float(p[x]) / r[x])
    rejected = float(q.double().sum()) - emitted.sum()
    emitted += rejected * rest / rest.sum()
    assert emitted == pytest.approx(p.double().numpy(), abs=1e-6)


def test_the_target_is_drawn_from_where_nothing_is_left():
    p = torch.tensor([0.5, 0.5])
    assert split_residual(p, p).tolist() == [0.5, 0.5]
