# SPDX-License-Identifier: Apache-2.0
"""Split verification of trees: the cloud's half, the robot's half, and their joint distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from scipy import stats
from sequence_rules import verify_split

from dsd_ros.decoding.methods import split
from dsd_ros.decoding.methods.split import (
    finish_split_tree,
    remaining_nodes,
    rounded_up,
    split_residual,
    verify_split_tree,
)
from dsd_ros.decoding.rejection import TreeVerdict, residual, verify_tree
from dsd_ros.decoding.sampling import SamplingError, sample
from dsd_ros.decoding.settings import TreeError
from dsd_ros.decoding.tree import ROOT, TokenTree
from dsd_ros.decoding.tree_growth import ExpansionTree, draw_children

#   -1 -> 0 (5), 1 (6), 2 (5);  0 -> 3 (7), 4 (8);  2 -> 5 (9);  4 -> 6 (5)
TREE = TokenTree((5, 6, 5, 7, 8, 9, 5), (-1, -1, -1, 0, 0, 2, 4))
SIZE = 5
ALPHA = 1e-3


def test_what_remains_after_a_rejection():
    assert remaining_nodes(TREE, ROOT) == (1, 2, 5)
    assert remaining_nodes(TREE, 0) == (4, 6)
    assert remaining_nodes(TREE, 2) == remaining_nodes(TREE, 6) == ()
    assert remaining_nodes(TREE.cut(1), ROOT) == (1, 2)


class Scripted:
    """Yields given draws in turn."""

    def __init__(self, *draws: float) -> None:
        self.draws = list(draws)

    def random(self) -> float:
        return self.draws.pop(0)


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


def distributions(seed: int, *shape: int) -> torch.Tensor:
    rows = np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])
    return torch.from_numpy(rows.astype(np.float32))


@given(st.integers(0, 1 << 30), st.integers(1, 5), st.integers(-2, 2))
@profile(max_examples=100)
def test_without_branches_it_is_the_rule_of_sequences(seed, gamma, difference):
    p = distributions(seed, gamma + 1, 6)
    q = distributions(seed + 1, gamma, 6 + difference)
    tokens = [sample(row, np.random.default_rng([seed, i])) for i, row in enumerate(q)]
    r = [float(rounded_up(row)[x]) for row, x in zip(q, tokens, strict=True)]
    one, other = np.random.default_rng(seed), np.random.default_rng(seed)
    tree = TokenTree.chain(tokens)
    verdict = verify_split_tree(tree, r, p, one)
    expected = verify_split(tokens, r, p, other)
    assert (len(verdict.path), verdict.next_token) == (expected.accepted, expected.next_token)
    assert verdict.owed == (expected.target is not None)
    if verdict.owed:
        end = len(verdict.path)
        finished = finish_split_tree(tree, verdict.last, q, p[end : end + 1], one)
        assert finished.path == verdict.path
        assert finished.next_token == sample(split_residual(p[end], q[end]), other)
    assert one.random() == other.random()


# What comes out


def coarse(q: torch.Tensor) -> torch.Tensor:
    """Rounded up to a power of two, so that a wrong residual shows."""
    return torch.where(q > 0.0, torch.exp2(torch.log2(q).ceil()), q).clamp(max=1.0)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft, (1 + SIZE, SIZE) each: before any token and after each; the draft wider."""
    target, draft = (distributions(seed, 1 + SIZE, SIZE) * 0.7 + 0.3 / SIZE for seed in (11, 12))
    return target, torch.cat([draft * 0.95, torch.full((1 + SIZE, 1), 0.05)], dim=1)


def halves(tree: TokenTree, q, p, generator, finish) -> TreeVerdict:
    """The two halves, with what travels between them."""
    r = [0.0] * len(tree)
    for row, node in enumerate(tree.inner):
        for child in tree.children(node):
            r[child] = float(split.rounded_up(q[row])[tree.tokens[child]])
    verdict = verify_split_tree(tree, r, p, generator)
    if not verdict.owed:
        return verdict
    rows = [verdict.last + 1, *(node + 1 for node in remaining_nodes(tree, verdict.last))]
    finished = finish(tree, verdict.last, q, p[rows], generator)
    assert finished.path[: len(verdict.path)] == verdict.path
    return finished


def count(samples: int, finish=finish_split_tree) -> np.ndarray:
    """(SIZE, SIZE) counts of the first two tokens, from rounds with a tree <3,2> each.

    Where a round accepts nothing, the second token is the target's own after the first.
    """
    target, draft = tables()
    generator = np.random.default_rng(5)
    firsts = draw_children(draft[:1].expand(samples, -1), 3, generator)
    behind = draft[1:][[min(token, SIZE - 1) for family in firsts for token in family]]
    seconds = iter(draw_children(behind, 2, generator))
    spare = target.double().cumsum(dim=1).numpy()
    counts = np.zeros((SIZE, SIZE))
    for family in firsts:
        tokens = (*family, *next(seconds), *next(seconds), *next(seconds))
        tree = TokenTree(tokens, (-1, -1, -1, 0, 0, 1, 1, 2, 2))
        rows = [0, *(min(token, SIZE - 1) + 1 for token in tokens)]
        verdict = halves(tree, draft[rows[:4]], target[rows], generator, finish)
        out = [*tree.tokens_of(verdict.path), verdict.next_token]
        if len(out) == 1:
            draw = generator.random() * spare[out[0] + 1, -1]
            out.append(int(spare[out[0] + 1].searchsorted(draw, side="right")))
        counts[out[0], out[1]] += 1
    return counts


def p_value(counts: np.ndarray) -> float:
    """The smaller of the joint distribution's and the first token's own, corrected for their number."""
    target = tables()[0].double().numpy()
    joint = target[0][:, None] * target[1:]
    values = []
    for axes in ((), (1,)):
        expected = joint.sum(axis=axes).ravel() / joint.sum() * counts.sum()
        values.append(stats.chisquare(counts.sum(axis=axes).ravel(), expected).pvalue)
    return min(1.0, 2 * min(values))


def test_both_halves_leave_what_the_target_says():
    assert p_value(count(3_000)) > ALPHA


def test_both_halves_leave_what_the_target_says_however_coarse_the_rounding(monkeypatch):
    monkeypatch.setattr(split, "rounded_up", coarse)
    assert p_value(count(6_000)) > ALPHA


def plain_residual(tree, node, q, p, generator) -> TreeVerdict:
    """What is left as if the cloud had accepted with the chances before they were rounded."""
    left = residual(p[0], q[tree.inner.index(node)])
    return goes_on(tree, node, q, p, generator, left / left.sum())


def uncorrected(tree, node, q, p, generator) -> TreeVerdict:
    """The other children are tried as if there had been no rejection."""
    return goes_on(tree, node, q, p, generator, p[0])


def correct(tree, node, q, p, generator) -> TreeVerdict:
    left = split_residual(p[0], q[tree.inner.index(node)])
    return goes_on(tree, node, q, p, generator, left / left.sum())


def goes_on(tree, node, q, p, generator, left) -> TreeVerdict:
    """The robot's half by ``verify_tree``, over a tree of what is left alone."""
    kept = remaining_nodes(tree, node)
    place = {old: new for new, old in enumerate(kept)} | {node: ROOT}
    smaller = TokenTree(tuple(tree.tokens[old] for old in kept), tuple(place[tree.parents[old]] for old in kept))
    back = {ROOT: node} | dict(enumerate(kept))
    rows = [tree.inner.index(back[inner]) for inner in smaller.inner]
    verdict = verify_tree(smaller, q[rows], torch.stack([left, *p[1:]]), generator)
    path = (*tree.path_to(node), *(kept[new] for new in verdict.path))
    return TreeVerdict(path, verdict.next_token)


@pytest.mark.parametrize("wrong", [plain_residual, uncorrected])
def test_wrong_rules_are_seen(monkeypatch, wrong):
    monkeypatch.setattr(split, "rounded_up", coarse)
    assert p_value(count(2_000, wrong)) < 1e-6


def test_the_written_out_rule_is_the_same():
    """What the wrong rules differ from in one place each."""
    target, draft = tables()
    for seed in range(200):
        grower = ExpansionTree((3, 2), generator=np.random.default_rng(seed))
        grower.take(draft[:1])
        grower.take(draft[[min(token, SIZE - 1) + 1 for token in grower.level[0]]])
        tree = grower.grown().tree
        rows = [min(tree.tokens[node], SIZE - 1) + 1 for node in remaining_nodes(tree, ROOT)]
        arguments = tree, ROOT, grower.q, target[[0, *rows]]
        assert correct(*arguments, np.random.default_rng(seed)) == finish_split_tree(
            *arguments, np.random.default_rng(seed)
        )
