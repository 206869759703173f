# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats
from sequence_rules import verify_coupled

from dsd_ros.decoding.coupling import _log, choose, gumbel, scores
from dsd_ros.decoding.sampling import SamplingError

PINNED = [-0.8578190314152311, -0.8033765354069, -0.8909815325855415]
DIGEST = "0d4e4dd2c99e778e"


def test_the_noise_is_the_same_on_every_machine():
    assert gumbel(0, 1, 0, 3).tolist() == PINNED
    everything = b"".join(
        gumbel(seed, reply, position, 1000).astype("<f8").tobytes()
        for seed, reply, position in ((0, 0, 0), ((1 << 63) - 1, 1 << 31, 4095), (7, 2, 3))
    )
    assert hashlib.sha256(everything).hexdigest()[:16] == DIGEST


def test_the_noise_of_an_id_does_not_depend_on_the_vocabulary():
    assert (gumbel(3, 1, 5, 152_064)[:512] == gumbel(3, 1, 5, 512)).all()


def test_the_noise_is_gumbels_and_independent():
    noise = np.concatenate([gumbel(seed, 1, 9, 100_000) for seed in range(5)])
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-4
    # Neighbours in seed, reply, position and id tell nothing of each other.
    rows = np.stack(
        [gumbel(a, b, c, 20_000) for a, b, c in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))]
        + [np.roll(gumbel(1, 1, 1, 20_000), 1)]
    )
    between = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(between).max() < 4 / np.sqrt(20_000)


def test_the_logarithm_is_right_to_the_last_bits():
    generator = np.random.default_rng(0)
    values = np.concatenate(
        [generator.random(20_000), 1 - np.exp2(-generator.uniform(1, 53, 2000)), [2.0**-53, 36.7, 1e-300]]
    )
    assert _log(values) == pytest.approx(np.log(values), rel=6e-16, abs=0)


def test_the_choice_is_a_sample_and_ties_go_to_the_lowest_id():
    p = torch.tensor([0.5, 0.0, 0.2, 0.3])
    counts = np.bincount([choose(p, gumbel(5, 1, i, 4)) for i in range(6000)], minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], 6000 * np.array([0.5, 0.2, 0.3])).pvalue > 1e-3
    assert choose(torch.ones(4) / 4, np.zeros(4)) == 0
    assert scores(p, np.zeros(4))[1] == -np.inf
    for broken in (torch.zeros(3), torch.full((3,), torch.nan)):
        with pytest.raises(SamplingError, match="not probabilities"):
            choose(broken, np.zeros(3))


def test_two_models_mostly_draw_the_same():
    """P(equal) is at least (1 - TV) / (1 + TV), and at most 1 - TV."""
    generator = np.random.default_rng(1)
    for noise in (0.2, 0.6):
        logits = generator.normal(0, 1.2, 12)
        p = torch.softmax(torch.from_numpy(logits), -1)
        q = torch.softmax(torch.from_numpy(logits + noise * generator.normal(0, 1, 12)), -1)
        apart = float((p - q).abs().sum()) / 2
        rows = [gumbel(2, 1, i, 12) for i in range(4000)]
        same = np.mean([choose(p, row) == choose(q, row) for row in rows])
        slack = 4 * np.sqrt(0.25 / len(rows))
        assert (1 - apart) / (1 + apart) - slack < same < 1 - apart + slack


def test_whatever_is_drafted_the_targets_own_sample_comes_out():
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), -1)
    noise = [gumbel(1, 1, i, 6) for i in range(4)]
    own = [choose(p[i], noise[i]) for i in range(4)]
    for wrong in range(4):
        drafted = [(x + 1) % 6 if i == wrong else x for i, x in enumerate(own[:3])]
        verdict = verify_coupled(drafted, p, noise.__getitem__)
        assert (verdict.accepted, verdict.next_token) == (wrong, own[wrong])
