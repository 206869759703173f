# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
import torch
from joint import chi_squared
from table_model import TableModel

from dsd_lab.dragon.algorithm_1 import IndependentDraws, decide_independently
from dsd_ros.decoding import aggregation
from dsd_ros.decoding.aggregation import (
    BoundedDistribution,
    Decision,
    Head,
    SideDraft,
    Undecided,
    decide,
    eta,
    head_of,
    mixture,
)
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.sampling import SamplingError

V = 4  # tokens of the table
LENGTH = 3  # tokens of a stretch whose joint distribution is counted
WEIGHTS = (0.3, -0.4)  # log h of device and cloud


def acceptance(p_device: torch.Tensor, p_cloud: torch.Tensor, eta_device: float) -> tuple[float, float]:
    """The probabilities that Algorithm 1 accepts the device's and the cloud's draft (equation 5).

    alpha^s = (1 - eta^o d) / 2 + sum_x p^s(x) p(x) / 2 with d = 1 - sum_x min(p^d, p^c), o the other side.
    """
    size = max(len(p_device), len(p_cloud))
    device, cloud = (np.pad(p.double().numpy(), (0, size - len(p))) for p in (p_device, p_cloud))
    p = eta_device * device + (1.0 - eta_device) * cloud
    distance = 1.0 - float(np.minimum(device, cloud).sum())
    return (
        0.5 * (1.0 - (1.0 - eta_device) * distance) + 0.5 * float(device @ p),
        0.5 * (1.0 - eta_device * distance) + 0.5 * float(cloud @ p),
    )


def random_row(generator: np.random.Generator, size: int, spread: float) -> torch.Tensor:
    """Flat for spread 0, peaked for large ones."""
    return torch.softmax(torch.from_numpy(generator.normal(0, spread, size)).float(), 0)


def sampled(p: torch.Tensor, generator: np.random.Generator) -> int:
    cumulative = p.double().numpy().cumsum()
    return int(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"))


def decided(device: SideDraft, cloud: SideDraft, noise, draws=None) -> Decision | Undecided:
    """By shared noise, or by Algorithm 1 with ``draws``."""
    return decide(device, cloud, noise) if draws is None else decide_independently(device, cloud, noise, draws)


def answered(device: SideDraft, cloud: SideDraft, rows, noise, draws=None) -> tuple[Decision, list[int]]:
    """The decision, with every question answered from the ``rows``; and how many ids each asked for."""
    asked = []
    while isinstance(found := decided(device, cloud, noise, draws), Undecided):
        of_device = found.side == "device"
        row = rows[0] if of_device else rows[1]
        known = (device if of_device else cloud).known
        assert (known.lo[found.ids] < known.hi[found.ids]).all(), "asked for what is known"
        known.reveal(found.ids, row[found.ids].numpy())
        asked.append(len(found.ids))
    return found, asked


def whole_offers(rows, tokens, weights=WEIGHTS) -> list[SideDraft]:
    return [
        SideDraft(token, weight, BoundedDistribution.whole(row))
        for row, token, weight in zip(rows, tokens, weights, strict=True)
    ]


def seen_by(side: int, rows, tokens, weights, noise, size: int, loose=1.0) -> list[SideDraft]:
    """What the aggregator on side 0 or 1 holds: its own row, and the other's head."""
    found = whole_offers(rows, tokens, weights)
    other = 1 - side
    head = head_of(rows[other], noise, size, tokens[other])
    head = head._replace(bound=head.bound * loose)
    known = BoundedDistribution.of_head(head, len(rows[other]), noise)
    found[other] = SideDraft(tokens[other], weights[other], known)
    return found


# ----------------------------------------------------------------------------------------- distribution


class Tables:
    """Two table models that two sides hold, and what the answer's joint distribution must be."""

    def __init__(self) -> None:
        self.models = [TableModel(seed, V) for seed in (3, 8)]
        self.rows = [torch.softmax(model.table, -1) for model in self.models]

    def joint(self, weights=WEIGHTS) -> np.ndarray:
        shares = np.exp(weights) / np.exp(weights).sum()
        p = sum(s * row.double().numpy() for s, row in zip(shares, self.rows, strict=True))
        found = np.zeros((V,) * LENGTH)
        for path in product(range(V), repeat=LENGTH):
            ids = [0, 0, *path]
            found[path] = np.prod([p[tuple(ids[i : i + 3])] for i in range(LENGTH)])
        return found

    def counts(self, seed: int, stretches: int, *, independent: bool, sparse: bool, weights=WEIGHTS):
        """Counts of stretches and how often each side's draft was the token, each (…)."""
        generators = [np.random.default_rng([seed, stream]) for stream in range(3)]
        counts, accepted = np.zeros((V,) * LENGTH), np.zeros(2)
        for number in range(stretches):
            ids = [0, 0]
            noises = gumbel(seed, number, 0, LENGTH * V).reshape(LENGTH, V)
            for position, noise in enumerate(noises):
                rows = [row[tuple(ids[-2:])] for row in self.rows]
                draws = None
                if independent:
                    tokens = [sampled(rows[s], generators[s]) for s in (0, 1)]
                    draws = IndependentDraws(*generators[2].random(2))
                else:
                    tokens = [choose(row, noise) for row in rows]
                if sparse:
                    offers = seen_by((number + position) % 2, rows, tokens, weights, noise, 1)
                else:
                    offers = whole_offers(rows, tokens, weights)
                found, _ = answered(*offers, rows, noise, draws)
                accepted += [found.device_accepted, found.cloud_accepted]
                ids.append(found.token)
            counts[tuple(ids[2:])] += 1
        return counts, accepted / (stretches * LENGTH)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("independent", [False, True])
def test_what_is_said_is_distributed_as_the_mixture(independent, sparse):
    tables = Tables()
    counts, _ = tables.counts(11, 1500, independent=independent, sparse=sparse)
    assert chi_squared(counts, tables.joint()) > 1e-3


@pytest.mark.parametrize("independent", [False, True])
def test_a_wrong_share_of_the_sides_would_be_noticed(independent):
    tables = Tables()
    weights = (WEIGHTS[0] + 0.7, WEIGHTS[1])
    counts, _ = tables.counts(11, 1500, independent=independent, sparse=True, weights=weights)
    assert chi_squared(counts, tables.joint()) < 1e-6


# --------------------------------------------------------------------------------- sparse equals whole


def check_sparse(generator, size, spread, spread_other, scheme, kept, weights, loose=1.0):
    """One random position: whatever side aggregates says what whole rows say. Returns ids asked for.

    ``loose``: how many times too high the head's bound is.
    """
    rows = [random_row(generator, size, spread), random_row(generator, size, spread_other)]
    noise = None if scheme == "greedy" else gumbel(int(generator.integers(1 << 40)), 1, 0, size)
    draws = None
    if scheme == "algorithm 1":
        tokens = [sampled(row, generator) for row in rows]
        draws = IndependentDraws(*generator.random(2))
    elif noise is None:
        tokens = [int(row.argmax()) for row in rows]
    else:
        tokens = [choose(row, noise) for row in rows]
    expected = decided(*whole_offers(rows, tokens, weights), noise, draws)
    assert isinstance(expected, Decision)
    p = mixture(*rows, *weights)
    if scheme == "greedy":
        assert expected.token == int(p.argmax())
    elif scheme == "shared":
        assert expected.token == choose(p, noise)
    asked = []
    for side in (0, 1):
        offers = seen_by(side, rows, tokens, weights, noise, kept, loose)
        found, questions = answered(*offers, rows, noise, draws)
        assert found == expected
        asked.append(sum(questions))
    return asked


@pytest.mark.parametrize("scheme", ["greedy", "shared", "algorithm 1"])
def test_a_head_decides_as_the_whole_does(scheme):
    generator = np.random.default_rng([1, len(scheme)])
    for _ in range(1500):
        size = int(generator.integers(2, 80))
        spreads = generator.choice([0.0, 0.01, 0.5, 2.0, 8.0, 40.0], 2)
        weights = tuple(generator.choice([0.0, 0.3, -1.0, 30.0, -800.0], 2))
        check_sparse(generator, size, *spreads, scheme, int(generator.integers(1, 12)), weights)


@pytest.mark.parametrize("scheme", ["greedy", "shared", "algorithm 1"])
def test_a_head_decides_over_a_real_vocabulary_with_few_questions(scheme):
    generator = np.random.default_rng(2)
    asked = []
    for spread in (2.0, 3.0, 4.0, 5.0):
        asked += check_sparse(generator, 151_936, spread, spread, scheme, 64, (0.2, 0.0))
    assert max(asked) <= 200, asked
    assert np.median(asked) <= 10, asked


def test_a_flat_vocabulary_needs_many_entries_and_is_right_as_well():
    generator = np.random.default_rng(4)
    check_sparse(generator, 20_000, 0.0, 0.0, "shared", 16, (0.0, 0.0))
    asked = check_sparse(generator, 5000, 0.0, 0.0, "greedy", 16, (0.0, 0.0))
    assert min(asked) == 5000 - 17 + 1  # all equal: every one outside the head


@pytest.mark.parametrize("scheme", ["greedy", "shared", "algorithm 1"])
def test_many_small_questions_come_to_the_same(scheme, monkeypatch):
    monkeypatch.setattr(aggregation, "MAX_ASKED", 1)
    generator = np.random.default_rng(5)
    asked = []
    for _ in range(200):
        asked += check_sparse(generator, 40, 0.3, 0.3, scheme, 1, (0.0, 0.0), loose=100.0)
    assert max(asked) > 10


def test_a_decision_over_a_real_vocabulary_takes_milliseconds():
    generator = np.random.default_rng(6)
    rows = [random_row(generator, 151_936, 4.0) for _ in range(2)]
    noise = gumbel(1, 1, 1, 151_936)
    tokens = [choose(row, noise) for row in rows]
    times = []
    for _ in range(5):
        offers = seen_by(0, rows, tokens, (0.0, 0.0), noise, 64)
        start = time.thread_time()
        decide(*offers, noise)
        times.append(time.thread_time() - start)
    assert min(times) < 0.1  # a few milliseconds where nothing else runs


# ------------------------------------------------------------------------------------------- edge cases


def test_equal_tokens_go_to_the_lowest_id_and_are_asked_for():
    rows = [torch.tensor([0.1, 0.3, 0.3, 0.3]), torch.tensor([0.1, 0.3, 0.3, 0.3])]
    tokens, weights = [3, 1], (0.0, 0.0)
    assert decide(*whole_offers(rows, tokens, weights), None) == Decision(1, False, True)
    for side in (0, 1):
        offers = seen_by(side, rows, tokens, weights, None, 1)
        found, asked = answered(*offers, rows, None)
        assert found == Decision(1, False, True)
        assert sum(asked) >= 1
    # The same score from different noise and probability: the lower id as well.
    noise = np.array([0.0, 0.0, 0.0, 0.0])
    assert decide(*whole_offers(rows, tokens, weights), noise).token == 1


def test_what_no_side_can_say_is_never_said():
    # The noise would favour token 0 by far.
    rows = [torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])]
    noise = np.array([36.0, -3.0, -3.5])
    for side in (0, 1):
        offers = seen_by(side, rows, [1, 2], (0.0, 0.0), noise, 1)
        assert decide(*offers, noise) == Decision(1, True, False)


def test_a_side_without_documents_says_nothing():
    assert eta(-np.inf, 3.0) == (0.0, 1.0)
    rows = [torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8])]
    offers = whole_offers(rows, [0, 1], (-np.inf, -5.0))
    assert decide(*offers, None) == Decision(1, False, True)
    # Far apart or near, the shares sum to 1.
    for weights in ((1000.0, -1000.0), (700.0, 701.0), (-5000.0, -5000.5)):
        assert sum(eta(*weights)) == pytest.approx(1.0, abs=1e-15)
    assert eta(0.0, np.log(3.0)) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("scheme", ["greedy", "shared", "algorithm 1"])
def test_vocabularies_may_be_padded_differently(scheme, side):
    """Missing ids have no probability: the answer is that of the same rows padded with zeros."""
    generator = np.random.default_rng(7)
    for number in range(300):
        rows = [random_row(generator, size, 1.0) for size in (9, 13)]
        padded = [torch.cat([rows[0], torch.zeros(4)]), rows[1]]
        noise = None if scheme == "greedy" else gumbel(7, number, 0, 16)
        tokens = [sampled(row, generator) for row in rows]
        draws = IndependentDraws(*generator.random(2)) if scheme == "algorithm 1" else None
        expected = decided(*whole_offers(padded, tokens), noise, draws)
        assert decided(*whole_offers(rows, tokens), noise, draws) == expected
        found, _ = answered(*seen_by(side, rows, tokens, WEIGHTS, noise, 2), rows, noise, draws)
        assert found == expected
        assert len(mixture(*rows, *WEIGHTS)) == 13


def test_mixture_is_in_double_precision_and_symmetric():
    rows = [torch.tensor([0.1, 0.9]), torch.tensor([0.7, 0.3])]
    found = mixture(*rows, 0.0, np.log(3.0))
    assert found.dtype == torch.float64
    expected = 0.25 * rows[0].double() + 0.75 * rows[1].double()
    assert torch.allclose(found, expected, rtol=1e-15, atol=0)


def test_equal_rows_accept_whatever_the_draws_are():
    row = torch.tensor([0.25, 0.5, 0.25])
    noise = gumbel(1, 1, 1, 3)
    for weights in ((0.0, 0.0), (0.1, -0.7), (-3.0, 2.0)):
        for side, token in product((0.0, 0.75), range(3)):
            tokens = [token, token]
            for keep in (0.0, 0.5, 1.0 - 2.0**-53):
                draws = IndependentDraws(side, keep)
                found = decided(*whole_offers([row, row], tokens, weights), noise, draws)
                assert found == Decision(token, True, True)
                for seeing in (0, 1):
                    offers = seen_by(seeing, [row, row], tokens, weights, noise, 1)
                    assert answered(*offers, [row, row], noise, draws)[0] == found


def test_acceptance_is_that_of_equation_5():
    tables = Tables()
    expected = np.zeros(2)
    shares = eta(*WEIGHTS)
    # The mean over the two tokens before a position, weighted by how often they are there.
    joint = tables.joint()
    for depth in range(LENGTH):
        before = joint.sum(axis=tuple(range(depth, LENGTH)))
        for path in np.ndindex(before.shape):
            ids = [0, 0, *path]
            rows = [row[tuple(ids[-2:])] for row in tables.rows]
            expected += before[path] * np.array(acceptance(*rows, shares[0])) / LENGTH
    stretches = 1500
    _, measured = tables.counts(5, stretches, independent=True, sparse=False)
    error = np.sqrt(0.25 / (stretches * LENGTH))
    assert np.abs(measured - expected).max() < 4 * error
    assert np.abs(expected - expected[0]).max() > 4 * error  # else a swap would not be noticed


# --------------------------------------------------------------------------------------------- refused


def head(ids, values, bound) -> Head:
    return Head(np.array(ids, np.int64), np.array(values, np.float32), bound)


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (head([1, 2], [np.nan, 0.5], 0.5), "0 or more"),
        (head([1, 2], [0.5, -0.1], 0.5), "0 or more"),
        (head([1, 2], [0.9, 0.2], 0.5), "sum to at most 1"),
        (head([1, 2], [np.inf, 0.2], 0.5), "sum to at most 1"),
        (head([1, 1], [0.5, 0.2], 0.5), "ascend"),
        (head([2, 1], [0.5, 0.2], 0.5), "ascend"),
        (head([-1, 1], [0.5, 0.2], 0.5), "ascend"),
        (head([1, 8], [0.5, 0.2], 0.5), "ascend"),
        (head([1, 2], [0.5], 0.5), "one value for each"),
        (head([[1, 2]], [[0.5, 0.2]], 0.5), "one value for each"),
        (head([1, 2], [0.5, 0.2], np.nan), "bound"),
        (head([1, 2], [0.5, 0.2], np.inf), "bound"),
        (head([1, 2], [0.5, 0.2], -1.0), "bound"),
        (head([1, 2], [0.5, 0.2], 0.049), "too low"),
        (head([], [], 0.1), "too low"),
    ],
)
def test_a_head_that_no_distribution_has_is_refused(hostile, reason):
    with pytest.raises(SamplingError, match=reason):
        BoundedDistribution.of_head(hostile, 8, None)


def test_a_bound_too_low_under_noise_is_refused():
    row, noise = random_row(np.random.default_rng(8), 100, 1.0), gumbel(1, 1, 1, 100)
    right = head_of(row, noise, 8, 3)
    BoundedDistribution.of_head(right, 100, noise)
    with pytest.raises(SamplingError, match="too low"):
        BoundedDistribution.of_head(right._replace(bound=right.bound / 100), 100, noise)
    with pytest.raises(SamplingError, match="noise is for 50"):
        BoundedDistribution.of_head(right, 100, noise[:50])


def test_a_head_bounds_every_other_token_and_holds_the_draft():
    generator = np.random.default_rng(9)
    for number in range(300):
        row = random_row(generator, 50, float(generator.choice([0.0, 1.0, 30.0])))
        noise = gumbel(9, number, 0, 64) if number % 2 else None
        token, size = int(generator.integers(50)), int(generator.integers(60))
        found = head_of(row, noise, size, token)
        assert token in found.ids
        assert len(found.ids) <= (size + 1 if size else 50)
        assert (row[found.ids].numpy() == found.values).all()
        assert found.values.dtype == np.float32
        assert found.bound == float(np.float32(found.bound))
        known = BoundedDistribution.of_head(found, 50, noise)
        assert (known.lo <= row.numpy()).all()
        assert (row.numpy() <= known.hi).all()


def test_what_contradicts_a_head_is_refused_and_changes_nothing():
    row = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    known = BoundedDistribution.of_head(head_of(row, None, 2, 0), 5, None)
    before = known.lo.copy(), known.hi.copy()
    for ids, values, reason in (
        ([2], [0.3], "contradicts"),  # above the bound
        ([0], [0.4], "contradicts"),  # another value than before
        ([2], [np.nan], "contradicts"),
        ([2], [-0.1], "contradicts"),
        ([2, 2], [0.1, 0.15], "twice"),
        ([2, 3, 4], [0.14, 0.14, 0.14], "more than 1"),
        ([5], [0.1], "out of range"),
        ([-1], [0.1], "out of range"),
        ([2, 3], [0.1], "one value for each"),
    ):
        with pytest.raises(SamplingError, match=reason):
            known.reveal(ids, values)
    assert (known.lo == before[0]).all()
    assert (known.hi == before[1]).all()
    known.reveal([], [])
    known.reveal([2, 4], row[[2, 4]].numpy())
    known.reveal([2, 4], row[[2, 4]].numpy())
    assert (known.lo[[2, 4]] == row[[2, 4]].numpy()).all()


@pytest.mark.parametrize("row", [[0.5, 0.4], [1.5, -0.5], [np.nan, 1.0], [[1.0]], []])
def test_a_row_that_is_no_distribution_is_refused(row):
    with pytest.raises(SamplingError, match="distribution is invalid"):
        BoundedDistribution.whole(torch.tensor(row))


def test_offers_that_no_side_can_make_are_refused():
    rows = [torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])]
    for tokens, weights, reason in (
        ([0, 0], WEIGHTS, "no probability"),
        ([1, 2], WEIGHTS, "outside its vocabulary"),
        ([-1, 0], WEIGHTS, "outside its vocabulary"),
        ([1, 0], (np.nan, 0.0), "log weights"),
        ([1, 0], (np.inf, 0.0), "log weights"),
        ([1, 0], (-np.inf, -np.inf), "log weights"),
    ):
        with pytest.raises(SamplingError, match=reason):
            decide(*whole_offers(rows, tokens, weights), None)
    with pytest.raises(SamplingError, match="noise is for 1 "):
        decide(*whole_offers(rows, [1, 0]), np.zeros(1))
    with pytest.raises(SamplingError, match="outside its distribution over 2"):
        head_of(rows[0], None, 1, 2)
