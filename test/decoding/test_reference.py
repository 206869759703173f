# SPDX-License-Identifier: Apache-2.0
"""The reference algorithms have exactly the target's distribution, by enumeration of every draw."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from law import joint_law, law
from scipy import stats

from dsd_lab.dragon.algorithm_1 import IndependentDraws, decide_independently
from dsd_ros.decoding import reference
from dsd_ros.decoding.aggregation import BoundedDistribution, SideDraft
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.reference import (
    aggregate,
    coupled,
    greedy,
    mixture,
    multi_candidate,
    speculative_aggregation,
    speculative_sampling,
    split,
    truncate,
    truncated,
)


def model(seed: int, size: int = 3, zeros: bool = False):
    """The next token depends on how many there are and on the last one."""
    rows = np.random.default_rng(seed).dirichlet(np.ones(size), (8, size + 1))
    if zeros:
        rows[:, :, seed % size] = 0.0
        rows /= rows.sum(axis=-1, keepdims=True)
    return lambda tokens: rows[len(tokens), tokens[-1] if tokens else size]


def alone(p, size: int = 3, length: int = 2) -> np.ndarray:
    """The joint distribution of the target's own first tokens."""
    joint = np.ones((size,) * length)
    for tokens in product(range(size), repeat=length):
        for end in range(length):
            joint[tokens] *= p(list(tokens[:end]))[tokens[end]]
    return joint


def power_of_two(q_x: float) -> float:
    return float(min(1.0, 2.0 ** np.ceil(np.log2(q_x)))) if q_x > 0.0 else 0.0


ROUNDS = {
    "speculative sampling": lambda p, q: lambda c, rng: speculative_sampling(p, q, c, 2, rng),
    "no draft": lambda p, q: lambda c, rng: speculative_sampling(p, q, c, 0, rng),
    "split": lambda p, q: lambda c, rng: split(p, q, c, 2, rng),
    "split, probabilities rounded up": lambda p, q: lambda c, rng: split(p, q, c, 2, rng, power_of_two),
    "truncated to 2": lambda p, q: lambda c, rng: truncated(p, q, c, 2, 2, rng),
    "truncated to 1": lambda p, q: lambda c, rng: truncated(p, q, c, 2, 1, rng),
    "tree 3": lambda p, q: lambda c, rng: multi_candidate(p, q, c, (3,), rng),
    "tree 2,1": lambda p, q: lambda c, rng: multi_candidate(p, q, c, (2, 1), rng),
    "tree 1,2": lambda p, q: lambda c, rng: multi_candidate(p, q, c, (1, 2), rng),
    "truncated tree": lambda p, q: lambda c, rng: multi_candidate(p, lambda t: truncate(q(t), 2), c, (2, 2), rng),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ROUNDS)
def test_the_law_is_the_targets(name, zeros):
    p, q = model(1, zeros=zeros), model(2, zeros=zeros)  # which token never comes is another in each
    assert joint_law(ROUNDS[name](p, q), 3, 2) == pytest.approx(alone(p), abs=1e-12)


def test_aggregation_is_the_mixture_whatever_is_drafted_ahead():
    left, right, eta = model(3, 2), model(4, 2), 0.3
    whole = law(lambda rng: tuple(speculative_aggregation(left, right, eta, [], 2, 2, rng)))
    expected = alone(lambda tokens: mixture(left(tokens), right(tokens), eta), 2)
    for tokens in product(range(2), repeat=2):
        assert whole[tokens] == pytest.approx(expected[tokens], abs=1e-12)


def test_aggregation_accepts_as_often_as_equation_5_says():
    p_l, p_r, eta = model(5)([]), model(6)([]), 0.6
    p, distance = mixture(p_l, p_r, eta), 1.0 - np.minimum(p_l, p_r).sum()

    def drafted(rng):
        x_l, x_r = reference.draw(p_l, rng), reference.draw(p_r, rng)
        return aggregate(p_l, p_r, x_l, x_r, eta, rng)

    found = law(drafted)
    left = sum(chance for result, chance in found.items() if result.left_accepted)
    right = sum(chance for result, chance in found.items() if result.right_accepted)
    assert left == pytest.approx(0.5 * (1 - (1 - eta) * distance) + 0.5 * p_l @ p)
    assert right == pytest.approx(0.5 * (1 - eta * distance) + 0.5 * p_r @ p)


def test_the_products_aggregation_equals_the_reference():
    p_l, p_r, eta = model(5)([]), model(6)([]), 0.6

    def drafted(rng):
        x_l, x_r = reference.draw(p_l, rng), reference.draw(p_r, rng)
        return x_l, x_r, *aggregate(p_l, p_r, x_l, x_r, eta, rng)

    expected = law(drafted)
    counts = dict.fromkeys(expected, 0)
    rng = np.random.default_rng(1)
    for number in range(2500):
        x_l, x_r = reference.draw(p_l, rng), reference.draw(p_r, rng)
        device = SideDraft(x_l, float(np.log(eta)), BoundedDistribution.whole(p_l))
        cloud = SideDraft(x_r, float(np.log(1 - eta)), BoundedDistribution.whole(p_r))
        draws = IndependentDraws(rng.random(), rng.random())
        found = decide_independently(device, cloud, gumbel(7, 1, number, 3), draws)
        counts[(x_l, x_r, *found)] += 1
    chances = np.array(list(expected.values()))
    assert stats.chisquare(list(counts.values()), 2500 * chances / chances.sum()).pvalue > 1e-3


def test_greedy_says_the_targets_likeliest_tokens():
    p = model(1)
    for seed in range(20):
        tokens: list[int] = []
        while len(tokens) < 4:
            tokens += greedy(p, model(seed), tokens, seed % 3)
        for end in range(4):
            assert tokens[end] == np.argmax(p(tokens[:end]))
    assert len(greedy(p, p, [], 3)) == 4


def test_coupled_says_the_targets_own_sample_which_is_distributed_as_the_target():
    p, counts = model(1), np.zeros((3, 3))
    for seed in range(2000):
        rows = np.random.default_rng(seed).gumbel(size=(8, 3))
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += coupled(p, model(2), tokens, 1 + seed % 2, rows.__getitem__)
        assert tokens[:2] == [*coupled(p, p, [], 0, rows.__getitem__), *coupled(p, p, tokens[:1], 0, rows.__getitem__)]
        counts[tuple(tokens[:2])] += 1
    assert stats.chisquare(counts.ravel(), 2000 * alone(p).ravel()).pvalue > 1e-3
    assert len(coupled(p, p, [], 3, rows.__getitem__)) == 4


def test_each_algorithm_fits_a_screen_and_needs_nothing_of_the_project():
    module = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 50, node.name
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.startswith(("dsd_", ".")) for name in names)
