# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from sequence_rules import Scripted, distributions, verify_draft

from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.decoding.rejection import check_tree, residual
from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.decoding.tree import TokenTree


def test_acceptance_threshold_is_target_over_draft():
    q, p = torch.tensor([[0.8, 0.2]]), torch.tensor([[0.4, 0.6], [1.0, 0.0]])
    # min(1, .4 / .8) = .5, then the bonus token
    assert verify_draft([0], q, p, Scripted(0.499, 0.5)) == DraftVerdict(1, 0)
    assert verify_draft([0], q, p, Scripted(0.501, 0.5)) == DraftVerdict(0, 1)
    # p(1) > q(1): always
    assert verify_draft([1], q, p, Scripted(1 - 2**-53, 0.5)) == DraftVerdict(1, 0)


def test_equal_distributions_always_accept_and_leave_no_residual():
    p = distributions(7, 3, 9)
    for seed in range(50):
        generator = np.random.default_rng(seed)
        draft = [int(generator.choice(9, p=(row / row.sum()).numpy())) for row in p[:2].double()]
        assert verify_draft(draft, p[:2], p, generator).accepted == 2
    assert torch.equal(residual(p[0], p[0]), p[0])


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
        verify_draft([0, 1], distributions(0, 1, 4), distributions(1, 3, 4), np.random.default_rng(0))
