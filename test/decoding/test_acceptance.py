# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from sequence_rules import verify_draft, verify_greedy

from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.decoding.rejection import check_tree, residual
from dsd_ros.decoding.sampling import SamplingError, SamplingSettings, transform
from dsd_ros.decoding.tree import TokenTree


def rows(seed: int, count: int, size: int, zeros: bool = False) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    values = generator.dirichlet(np.ones(size), count)
    if zeros:
        values[:, generator.integers(size)] = 0
        values /= values.sum(-1, keepdims=True)
    return torch.from_numpy(values.astype(np.float32))


class Scripted:
    """Yields given draws in turn."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)


def test_acceptance_threshold_is_target_over_draft():
    q, p = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.4, 0.6], [1.0, 0.0]])
    # min(1, .4 / .8) = .5, then the bonus token
    assert verify_draft([0], q, p, Scripted(0.499, 0.5)) == DraftVerdict(1, 0)
    assert verify_draft([0], q, p, Scripted(0.501, 0.5)) == DraftVerdict(0, 1)
    # p(1) > q(1): always
    assert verify_draft([1], q, p, Scripted(1 - 2**-53, 0.5)) == DraftVerdict(1, 0)


@given(st.integers(0, 1 << 30), st.integers(0, 6), st.integers(-3, 3))
@profile(max_examples=150)
def test_any_draft_yields_a_token_the_target_can_say(seed, gamma, difference):
    size = 6
    p = rows(seed, gamma + 1, size, zeros=True)
    q = rows(seed + 1, gamma, size + difference, zeros=True)
    generator = np.random.default_rng(seed)
    draft = [int(generator.choice(len(row), p=(row / row.sum()).numpy())) for row in q.double()]
    verdict = verify_draft(draft, q.reshape(gamma, size + difference), p, generator)
    assert 0 <= verdict.accepted <= gamma
    assert p[verdict.accepted, verdict.next_token] > 0
    assert all(x < size and p[i, x] > 0 for i, x in enumerate(draft[: verdict.accepted]))


def test_ids_beyond_the_target_are_rejected():
    q = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    for seed in range(20):
        verdict = verify_draft([3], q, p, np.random.default_rng(seed))
        assert verdict.accepted == 0 and verdict.next_token in (0, 1)


def test_equal_distributions_always_accept_and_leave_no_residual():
    p = rows(7, 3, 9)
    for seed in range(50):
        generator = np.random.default_rng(seed)
        draft = [int(generator.choice(9, p=(row / row.sum()).numpy())) for row in p[:2].double()]
        assert verify_draft(draft, p[:2], p, generator).accepted == 2
    assert torch.equal(residual(p[0], p[0]), p[0])


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 1 << 30))
@profile(max_examples=100)
def test_greedy_is_the_limit_of_the_rule(draft, seed):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 1, (len(draft) + 1, 5)))
    p = transform(logits, SamplingSettings())
    q = torch.nn.functional.one_hot(torch.tensor(draft, dtype=torch.long), 5).float()
    generator = np.random.default_rng(seed)
    assert verify_greedy(draft, logits.argmax(-1).tolist()) == verify_draft(
        draft, q.reshape(len(draft), 5), p, generator
    )


@pytest.mark.parametrize(
    "row",
    [
        [0.5, float("nan"), 0.5],
        [-0.1, 0.6, 0.5],
        [0.2, 0.2, 0.2],
        [2.0, 0.0, 0.0],
        [float("inf"), 0.0, 0.0],
        [0.0, 0.5, 0.5],
    ],
)
def test_what_is_no_distribution_is_refused(row):
    with pytest.raises(SamplingError):
        check_tree(TokenTree.chain([0]), torch.tensor([row]))


def test_shapes_must_fit():
    with pytest.raises(SamplingError, match="rows"):
        verify_draft([0, 1], rows(0, 1, 4), rows(1, 3, 4), np.random.default_rng(0))
