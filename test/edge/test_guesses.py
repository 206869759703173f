# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from sequence_rules import verify_draft

from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.rejection import verify_tree
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample, transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.edge.draft_model import Drafting
from dsd_ros.edge.outcome_predictor import Guesser, Trust

V = 9
chain = TokenTree.chain


def logits(seed: int, rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (rows, V)).astype(np.float32))


def test_sampled_probabilities_predict_which_tokens_are_accepted():
    """A target near its draft: tokens with a high draw against them are the ones that fall."""
    sampling = SamplingSettings(1.0)
    guesser = Guesser(sampling, 3)
    held, fell = [], []
    for number in range(1, 300):
        rows = logits(number, 2)
        q = transform(rows, sampling)
        p = transform(rows + 0.7 * logits(number + 5000, 2) / 2, sampling)
        token = sample(q[0], generator_for("draft", 3, 1, number))
        verdict = verify_draft([token], q[:1], p, generator_for("verifier", 3, 1, number))
        chances = guesser.chances(1, number, chain([token]), [q[0]])
        (held if verdict.accepted else fell).append(chances[0])
        guesser.learn(chain([token]), chances, verdict.accepted)
    assert np.mean(held) > np.mean(fell) + 0.08


@pytest.mark.parametrize("held", [True, False])
def test_trust_follows_what_comes_true(held):
    trust = Trust()
    assert trust.corrected(0.3) == pytest.approx(0.3)
    for _ in range(200):
        trust.learn(trust.corrected(0.99 if not held else 0.2), held)
    assert (trust.corrected(0.5) > 0.9) if held else (trust.corrected(0.99) < 0.7)
    assert 0 < trust.corrected(0.0) < trust.corrected(0.5) < trust.corrected(1.0) < 1


def test_coupled_guesses_begin_with_what_the_noise_gives_the_draft():
    sampling = SamplingSettings(temperature=1.0)
    chosen = DecodeSettings(proof="coupled", temperature=1.0, seed=11, draft_length=3, max_tokens=50)
    drafting = Drafting(chosen, frozenset(), 2)
    guesser = Guesser(sampling, 11, coupled=True)
    for seed in range(20):
        context = drafting.context(1, 5)
        rows = list(drafting.method.draw_from(logits(seed, 4), range(5, 9), context)[0])
        noise = [gumbel(11, 2, 5 + i, V) for i in range(4)]
        q = torch.softmax(logits(seed, 4), -1)
        tokens = [int(row.argmax()) for row in rows[:-1]]
        assert tokens == [choose(q[i], noise[i]) for i in range(3)]
        chances = guesser.chances(2, 1, chain(tokens), rows[:-1])
        assert all(0 < chance < 1 for chance in chances)
        first = guesser.acceptances(2, 1, chain(tokens), {2: rows[-1]}, chances, 5)[0]
        assert (first.accepted, first.next_token) == (3, choose(q[3], noise[3]))
        # Where the draft does not hold, its runner-up is the likeliest.
        for guess in guesser.rejections(chain(tokens), rows[:-1], chances, 1):
            assert guess.next_token == int(rows[guess.accepted].topk(2).indices[1])


TREE = TokenTree((3, 5, 1, 2, 6, 4), (-1, -1, 0, 0, 1, 3))  # of depth 3, with leaves 2, 4 and 5


@given(st.integers(0, 999))
@profile(max_examples=20)
def test_guesses_of_a_tree_are_all_that_may_follow_and_rank_by_the_paths_probabilities(seed):
    guesser = Guesser(SamplingSettings(), 0)
    rows = dict(zip(range(-1, 6), logits(seed, 7), strict=True))
    q = {node: torch.softmax(row, -1).double().tolist() for node, row in rows.items()}
    inner = [rows[node] for node in TREE.inner]
    chances = guesser.chances(1, 1, TREE, inner)
    leaves = {leaf: rows[leaf] for leaf in (2, 4, 5)}
    found = guesser.rejections(TREE, inner, chances, 1000)
    found += guesser.acceptances(1, 1, TREE, leaves, chances, 1000)
    wanted = {}
    for node in range(-1, 6):
        path = TREE.path_to(node)
        before = math.prod(q[TREE.parents[x]][TREE.tokens[x]] for x in path)
        for token in range(V):
            if token not in TREE.tokens_of(TREE.children(node)):
                wanted[node + 1, token] = before * q[node][token]
    assert sum(wanted.values()) == pytest.approx(1.0, abs=1e-5)
    scores = {(guess.accepted, guess.next_token): guess.score for guess in found}
    assert scores == pytest.approx(wanted, abs=1e-5)


def test_a_trees_drafts_are_learned_from_along_its_path():
    inner = list(logits(4, len(TREE.inner)))
    for node, row in zip(TREE.inner, inner, strict=True):
        row[TREE.tokens[TREE.children(node)[0]]] = row.max() + 1
    for accepted, better in ((0, False), (3, True)):
        guesser = Guesser(SamplingSettings(), 0)
        first = guesser.chances(1, 1, TREE, inner)
        for _ in range(50):
            guesser.learn(TREE, guesser.chances(1, 1, TREE, inner), accepted)
        later = guesser.chances(1, 1, TREE, inner)
        for node, (before, after) in enumerate(zip(first, later, strict=True)):
            assert (after > before) == (better if node in (0, 2, 4, 5) else not better)


def test_the_outcome_of_a_sampled_tree_by_a_target_like_the_draft_is_foreseen():
    sampling = SamplingSettings(1.0)
    guesser = Guesser(sampling, 7)
    for number in range(1, 40):
        rows = dict(zip(range(-1, 6), logits(number, 7), strict=True))
        p = transform(torch.stack(list(rows.values())), sampling)
        q = p[[node + 1 for node in TREE.inner]]
        verdict = verify_tree(TREE, q, p, generator_for("verifier", 7, 2, number))
        assert verdict.path == (0, 2)  # p = q accepts the first child, whatever is drawn
        chances = guesser.chances(2, number, TREE, list(q))
        leaves = {leaf: p[leaf + 1] for leaf in (2, 4, 5)}
        guessed = guesser.acceptances(2, number, TREE, leaves, chances, 50)
        best = next(guess for guess in guessed if guess.accepted == 3)
        assert best.next_token == verdict.next_token
        guesser.learn(TREE, chances, verdict.last + 1)
    assert chances[0] > 0.9
