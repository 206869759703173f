# SPDX-License-Identifier: Apache-2.0
"""Token trees: encoded, grown, and verified with the target's distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from scipy import stats
from sequence_rules import TREE, Scripted, distributions

from dsd_ros.decoding.rejection import TreeVerdict, check_tree, verify_tree, verify_tree_greedy
from dsd_ros.decoding.sampling import SamplingError, sample
from dsd_ros.decoding.settings import MAX_NODES, TreeError, expansion_nodes, parse_expansion
from dsd_ros.decoding.tree import ROOT, TokenTree, ancestor_mask
from dsd_ros.decoding.tree_growth import BudgetTree, ExpansionTree, draw_children


@st.composite
def token_trees(draw, most: int = MAX_NODES) -> TokenTree:
    count = draw(st.integers(0, most))
    parents: list[int] = []
    for node in range(count):
        parents.append(draw(st.integers(parents[-1] if parents else -1, node - 1)))
    tokens = draw(st.lists(st.integers(0, 152_063), min_size=count, max_size=count))
    return TokenTree(tuple(tokens), tuple(parents))


def test_a_tree_by_hand():
    assert [TREE.children(node) for node in range(-1, 7)] == [
        [0, 1, 2], [3, 4], [], [5], [], [6], [], [],
    ]  # fmt: skip
    assert TREE.inner == (-1, 0, 2, 4)
    assert TREE.depths == (1, 1, 1, 2, 2, 2, 3) and TREE.depth == 3
    assert TREE.path_to(6) == (0, 4, 6) and TREE.path_to(ROOT) == ()
    assert TREE.tokens_of((0, 4, 6)) == (5, 8, 5)
    assert TREE.cut(2) == TokenTree(TREE.tokens[:6], TREE.parents[:6])
    assert TREE.cut(0) == TokenTree((), ()) and TREE.cut(9) == TREE
    assert TREE.parents_bytes() == bytes([0, 0, 0, 1, 1, 3, 5])
    with pytest.raises(TreeError, match="no node 7"):
        TREE.path_to(7)


@given(token_trees())
@profile(max_examples=40)
def test_bytes_and_back(tree):
    parents = tree.parents_bytes()
    assert len(parents) == len(tree)
    assert TokenTree.from_bytes(tree.tokens, parents) == tree
    chain = TokenTree.chain(tree.tokens)
    assert TokenTree.from_bytes(tree.tokens, b"") == chain
    assert TokenTree.from_bytes(tree.tokens, chain.parents_bytes()) == chain
    assert not chain.branches and tree.branches == (tree != chain)
    assert chain.depth == len(tree) and chain.inner == tuple(range(-1, len(tree) - 1))


@given(st.integers(0, 70), st.binary(max_size=70))
@profile(max_examples=100)
def test_any_bytes_are_a_tree_or_refused(count, parents):
    tokens = list(range(count))
    try:
        tree = TokenTree.from_bytes(tokens, parents)
    except TreeError:
        return
    assert tree.parents_bytes() == (parents or TokenTree.chain(tokens).parents_bytes())


@given(token_trees())
@profile(max_examples=40)
def test_mask_paths_and_depths_agree(tree):
    mask = ancestor_mask(tree.parents)
    assert mask.shape == (len(tree), len(tree)) and mask.dtype == np.bool_
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert tuple(np.flatnonzero(mask[node])) == path
        assert tree.depths[node] == len(path)
    for depth in range(tree.depth + 1):
        cut = tree.cut(depth)
        assert cut.depth == depth and cut.inner == tree.inner[: len(cut.inner)]


@pytest.mark.parametrize(
    ("tokens", "parents", "sentence"),
    [
        ((1,), (), "as many parents"),
        ((1,), (0,), "names parent 0"),
        ((1, 2), (-1, 1), "names parent 1"),
        ((1,), (-2,), "names parent -2"),
        ((1, 2, 3), (-1, 0, -1), "in the order of their parents"),
        (range(65), (-1,) * 65, "at most 64 nodes"),
    ],
)
def test_what_is_no_tree_is_refused(tokens, parents, sentence):
    with pytest.raises(TreeError, match=sentence):
        TokenTree(tuple(tokens), parents)


def test_expansions():
    assert parse_expansion("2,2,2") == (2, 2, 2) and parse_expansion(" 4, 1") == (4, 1)
    assert expansion_nodes((2, 2, 2)) == 14 and expansion_nodes(()) == 0
    assert parse_expansion(",".join("1" * 64)) == (1,) * 64
    for text in ("", "2,,2", "2,0", "-1", "two", "2.5", ",".join("1" * 65)):
        with pytest.raises(TreeError, match="level by level, as 2,2,2"):
            parse_expansion(text)
    with pytest.raises(TreeError, match="84 nodes"):
        parse_expansion("4,4,4")


# Growing


def test_growing_by_expansion_asks_level_by_level():
    grower = ExpansionTree((2, 3, 1), generator=np.random.default_rng(1))
    rows = distributions(3, 9, 6)
    assert grower.level == ([], []) and not grower.complete
    grower.take(rows[:1])
    tokens, parents = grower.level
    assert len(tokens) == 2 and parents == [-1, -1]
    with pytest.raises(TreeError, match="2 nodes need as many rows, not 3"):
        grower.take(rows[:3])
    grower.take(rows[1:3])
    assert grower.level[1] == [0, 0, 0, 1, 1, 1]
    grower.take(rows[3:])
    assert grower.complete
    with pytest.raises(TreeError, match="complete"):
        grower.take(rows[:1])
    grown = grower.grown()
    assert grown.tree.parents == (-1, -1, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7)
    assert grown.fed == (0, 1, 2, 3, 4, 5, 6, 7) + (-1,) * 6
    assert torch.equal(grower.q, rows)
    check_tree(grown.tree, grower.q)
    assert grown.split((0, 3, 9)) == ([0, 3], [grown.tree.tokens[9]])
    assert grown.split(()) == ([], [])


def test_nothing_is_drafted_after_an_end():
    grower = ExpansionTree((3, 2), ends=frozenset([4]))
    grower.take(torch.tensor([[0.0, 3.0, -1.0, -5.0, 1.0]]))
    assert grower.level == ([1, 0], [-1, -1])
    grower.take(torch.tensor([[0.0, 3.0, 4.0, -5.0, 1.0], [5.0, 3.0, 4.0, -5.0, 1.0]]))
    grown = grower.grown()
    assert grown.tree == TokenTree((1, 4, 0, 2, 1, 0, 2), (-1, -1, -1, 0, 0, 2, 2))
    assert grown.fed == (0, -1, 1, -1, -1, -1, -1) and grower.q is None
    only = ExpansionTree((1, 1), ends=frozenset([1]))
    only.take(torch.tensor([[0.0, 1.0]]))
    assert only.complete and only.grown().tree == TokenTree((1,), (-1,))


def test_children_are_drawn_with_replacement_and_never_of_weight_zero():
    q = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 0.0, 4.0, 0.0]])
    drawn = np.array(draw_children(q, 4000, np.random.default_rng(0)))
    assert set(drawn[1]) == {2}
    counts = np.bincount(drawn[0], minlength=4)
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], [2000, 1200, 800]).pvalue > 1e-3
    # Independent of one another: pairs as the product says.
    pairs = np.bincount(drawn[0, ::2] * 4 + drawn[0, 1::2], minlength=16)
    expected = 2000 * np.outer(q[0], q[0]).ravel()
    kept = expected > 0
    assert stats.chisquare(pairs[kept], expected[kept] * 2000 / expected.sum()).pvalue > 1e-3
    for bad in ([0.0, 0.0], [float("nan"), 1.0]):
        with pytest.raises(SamplingError):
            draw_children(torch.tensor([bad]), 1, np.random.default_rng(0))


class Highest:
    """Draws that are as high as they can be."""

    def random(self, shape):
        return np.full(shape, np.nextafter(1.0, 0.0))


def test_a_draw_rounded_up_to_the_total_is_still_a_token():
    q = torch.tensor([[0.1] * 7 + [0.0], [0.3] * 8])
    assert draw_children(q, 1, Highest()) == [[6], [7]]


def best_by_brute_force(rows, budget: int, depth: int) -> float:
    """The most expected accepted nodes of any tree of table ``rows`` (V, V): next given last."""
    chances = []
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(rows.shape[1]), repeat=length):
            last, chance = 0, 1.0
            for token in tokens:
                chance, last = chance * float(rows[last, token]), token
            chances.append(chance)
    # The best nodes hang together, so no tree does better, and one does as well.
    return sum(sorted(chances, reverse=True)[:budget])


@pytest.mark.parametrize(("budget", "depth"), [(1, 3), (6, 1), (7, 4), (16, 4), (40, 3)])
def test_a_budget_goes_to_the_best_nodes(budget, depth):
    rows = distributions(budget, 4, 4)
    grower = BudgetTree(budget, depth)
    passes, last, fed = 0, [0], []
    while not grower.complete:
        tokens, parents = grower.level
        assert all(-1 <= parent < len(fed) for parent in parents)
        fed.extend(tokens)
        last = tokens if passes else [0]
        grower.take(rows[last])
        passes += 1
    grown = grower.grown()
    assert passes <= depth and len(grown.tree) <= budget
    for node, number in enumerate(grown.fed):
        assert number < 0 or fed[number] == grown.tree.tokens[node]
    expected = 0.0
    for node in range(len(grown.tree)):
        tokens = (0, *grown.tree.tokens_of(grown.tree.path_to(node)))
        expected += np.prod([float(rows[a, b]) for a, b in itertools.pairwise(tokens)])
        siblings = grown.tree.children(node)
        assert len({grown.tree.tokens[s] for s in siblings}) == len(siblings)
    assert expected == pytest.approx(best_by_brute_force(rows, budget, depth))


# Verdicts


def test_greedy_follows_the_argmax():
    # At the root: 5; after node 0: 8; after node 4: 5; after node 6: 1.
    argmax = [5, 8, 0, 9, 0, 5, 0, 1]
    assert verify_tree_greedy(TREE, argmax) == TreeVerdict((0, 4, 6), 1)
    assert verify_tree_greedy(TREE, argmax).last == 6
    argmax[0] = 3
    assert verify_tree_greedy(TREE, argmax) == TreeVerdict((), 3)
    assert verify_tree_greedy(TREE, argmax).last == ROOT


def test_residuals_by_hand():
    tree = TokenTree((0, 1, 0), (-1, -1, -1))
    q = torch.tensor([[0.5, 0.25, 0.25]])
    p = torch.tensor([[0.25, 0.3, 0.45], [0, 0, 1], [0, 0, 1], [0, 0, 1]])
    # min(1, .25 / .5) = .5
    assert verify_tree(tree, q, p, Scripted(0.499, 0.5)) == TreeVerdict((0,), 2)
    # p2 = (0, .05, .2) / .25 = (0, .2, .8): accept 1 with .2 / .25 = .8
    assert verify_tree(tree, q, p, Scripted(0.501, 0.799, 0.5)) == TreeVerdict((1,), 2)
    # p3 = (0, 0, .55) / .55: the other 0 never, then 2 for certain
    assert verify_tree(tree, q, p, Scripted(0.501, 0.801, 0.0, 0.5)) == TreeVerdict((), 2)


def test_with_duplicates_the_accepted_child_is_walked():
    tree = TokenTree((0, 0, 1, 2), (-1, -1, 0, 1))
    q = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    p = torch.tensor([[1.0, 0, 0], [0, 0, 1.0], [0, 0, 1.0], [1.0, 0, 0], [1.0, 0, 0]])
    # Node 0 is taken, not node 1, though what the target says next follows node 1.
    verdict = verify_tree(tree, q, p, np.random.default_rng(0))
    assert verdict == TreeVerdict((0,), 2)


@given(st.integers(0, 1 << 30), token_trees(most=12), st.integers(-2, 2))
@profile(max_examples=100)
def test_any_tree_yields_a_path_the_target_can_say(seed, shape, difference):
    size = 6
    q = distributions(seed, len(shape.inner), size + difference)
    p = distributions(seed + 1, len(shape) + 1, size)
    p[:, seed % size] = 0.0
    p /= p.sum(-1, keepdim=True)
    generator = np.random.default_rng(seed)
    tokens = [0] * len(shape)
    for row, node in enumerate(shape.inner):
        for child in shape.children(node):
            tokens[child] = sample(q[row], generator)
    tree = TokenTree(tuple(tokens), shape.parents)
    verdict = verify_tree(tree, q, p, generator)
    assert verdict.path == tree.path_to(verdict.last)
    node = ROOT
    for child in verdict.path:
        assert p[node + 1, tree.tokens[child]] > 0
        node = child
    assert p[node + 1, verdict.next_token] > 0


def test_rows_must_fit_the_tree():
    q, p = distributions(0, 4, 10), distributions(1, 8, 10)
    for rows in ((q[:3], p), (q, p[:7])):
        with pytest.raises(SamplingError, match="needs 4 rows of q and 8 of p"):
            verify_tree(TREE, *rows, np.random.default_rng(0))
    impossible = q.clone()
    impossible[3, 5] = 0.0
    impossible[3] /= impossible[3].sum()
    check_tree(TREE, q)
    with pytest.raises(SamplingError, match="token 5 has no probability"):
        check_tree(TREE, impossible)
    with pytest.raises(SamplingError, match="as many rows of q"):
        check_tree(TREE, q[:2])
    with pytest.raises(SamplingError, match="sum to 1"):
        check_tree(TREE, q * 1.5)
