# SPDX-License-Identifier: Apache-2.0
"""Split verification of trees, by hand: the cloud's half and the robot's. Their joint law: test/exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sequence_rules import TREE, Scripted

from dsd_ros.decoding.methods.split import finish_split_tree, remaining_nodes, verify_split_tree
from dsd_ros.decoding.rejection import TreeVerdict
from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.decoding.settings import TreeError
from dsd_ros.decoding.tree import ROOT, TokenTree


def test_what_remains_after_a_rejection():
    assert remaining_nodes(TREE, ROOT) == (1, 2, 5)
    assert remaining_nodes(TREE, 0) == (4, 6)
    assert remaining_nodes(TREE, 2) == remaining_nodes(TREE, 6) == ()
    assert remaining_nodes(TREE.cut(1), ROOT) == (1, 2)


def one_hot(*tokens: int) -> torch.Tensor:
    return torch.eye(10)[list(tokens)]


def test_the_clouds_half_by_hand():
    r = [0.5] * 7
    p = one_hot(0, 0, 0, 0, 3, 0, 0, 0)
    p[0, 5], p[1, 7] = 0.25, 0.4
    # .25 / .5 = .5 for node 0, .4 / .5 = .8 for node 3; the other children are not looked at.
    assert verify_split_tree(TREE, r, p, Scripted(0.5)) == TreeVerdict((), 0, owed=True)
    assert verify_split_tree(TREE, r, p, Scripted(0.49, 0.81)) == TreeVerdict((0,), 0, owed=True)
    assert verify_split_tree(TREE, r, p, Scripted(0.49, 0.79, 0.5)) == TreeVerdict((0, 3), 3)


def test_the_robots_half_by_hand():
    tree = TokenTree((0, 1, 2, 0), (-1, -1, 1, 1))
    q = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.0, 0.5]])
    # At the root, and after nodes 1, 2, 3.
    p = torch.tensor([[0.25, 0.3, 0.45], [0.5, 0.25, 0.25], [0, 1.0, 0], [0, 0, 1.0]])
    # p - min(p, q) = (0, .05, .2) / .25: accept 1 with .2 / .25 = .8, then 2 with .25 / .5.
    assert finish_split_tree(tree, ROOT, q, p, Scripted(0.79, 0.49, 0.5)) == TreeVerdict((1, 2), 1)
    # (.5, .25, .25) - (.5, 0, .5) below: only 1 is left, so the sibling never holds.
    rejected = finish_split_tree(tree, ROOT, q, p, Scripted(0.79, 0.51, 0.0, 0.5))
    assert rejected == TreeVerdict((1,), 1)
    # (0, .2, .8) - q: only 2 is left.
    assert finish_split_tree(tree, ROOT, q, p, Scripted(0.81, 0.1)) == TreeVerdict((), 2)
    # A cloud without room for the second level says nothing about it: node 1 is a leaf.
    assert finish_split_tree(tree, ROOT, q, p[:2], Scripted(0.79, 0.1)) == TreeVerdict((1,), 0)


def test_rows_that_do_not_fit_are_refused():
    q, p = torch.full((4, 10), 0.1), torch.full((8, 10), 0.1)
    generator = np.random.default_rng(0)
    for rows, q_rows in ((p[:0], q), (p[:1], q), (p[:2], q), (p[:5], q), (p[:4], q[:3])):
        with pytest.raises(SamplingError, match="rows of q and"):
            finish_split_tree(TREE, ROOT, q_rows, rows, generator)
    with pytest.raises(TreeError, match="no child"):
        finish_split_tree(TREE, 3, q, p[:1], generator)
    with pytest.raises(TreeError, match="no node 7"):
        TREE.path_to(7)
    for r in ([0.5] * 6, [0.5] * 8, [0.0] * 7, [1.1] * 7, [float("nan")] * 7):
        with pytest.raises(SamplingError, match="7 nodes need as many probabilities"):
            verify_split_tree(TREE, r, p, generator)
    with pytest.raises(SamplingError, match="8 rows of p, not 7"):
        verify_split_tree(TREE, [0.5] * 7, p[:7], generator)
