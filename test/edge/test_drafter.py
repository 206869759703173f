# SPDX-License-Identifier: Apache-2.0
"""Drafts of every shape, and the drafts that can follow each of their outcomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings as profile, strategies as st
from table_model import TableModel

from dsd_ros.decoding.methods import truncated
from dsd_ros.decoding.modes import Proof, Shape
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.draft_model import Drafting, ModelDraft, advance

MODEL = TableModel(1, 12, ends=False, noise=0.5)  # never says token 11, which ends replies
IMAGE = np.full((2, 2, 3), 1, np.uint8)
SHAPES = {
    "sequence": {"shape": "sequence"},
    "expansion": {"shape": "expansion", "tree_expansion": "3,2,1"},
    "budget": {"shape": "budget", "tree_budget": 14},
}
CASES = [
    (shape, proof, temperature)
    for shape in SHAPES
    for proof, temperature in (
        (Proof.FULL, 0.0), (Proof.COUPLED, 1.0), (Proof.FULL, 1.0), (Proof.TRUNCATED, 1.0)
    )
    if not (shape == "budget" and temperature and proof is not Proof.COUPLED)
]  # fmt: skip
every_case = pytest.mark.parametrize(("shape", "proof", "temperature"), CASES)


def drafting(shape, proof=Proof.FULL, temperature=0.0, ends=(11,), **values) -> Drafting:
    common = {"draft_length": 4, "max_tokens": 60, "temperature": temperature, "seed": 3, "top_k_proof": 5}
    chosen = DecodeSettings(**({"mode": "dsd"} | common | {"proof": proof.value} | SHAPES[shape] | values))
    return Drafting(chosen, frozenset(ends), 2)


def first(chosen: Drafting, model=MODEL) -> ModelDraft:
    of = ModelDraft(chosen, 1, [], model.prefill(IMAGE, "go"))
    of.finish()
    return of


def draft_behind(chosen: Drafting, tokens: list[int], number: int, model=MODEL) -> ModelDraft:
    """The same of a sequence that has been through nothing else."""
    sequence = model.prefill(IMAGE, "go")
    sequence.append(tokens)
    draft = ModelDraft(chosen, number, tokens, sequence)
    draft.finish()
    return draft


@every_case
def test_after_every_outcome_the_draft_depends_on_its_tokens_alone(shape, proof, temperature):
    chosen = drafting(shape, proof, temperature)
    of = first(chosen)
    tree = of.tree
    assert len(tree) == {"sequence": 4, "expansion": 15, "budget": 14}[shape]
    for accepted in range(len(tree) + 1):
        gained = list(of.tokens_of(accepted, 7))
        wanted = draft_behind(chosen, gained, 2)
        # Forks that alternate with a worker's look past the same draft leave it unchanged.
        looking = of.look_past(of.open_leaves)
        draft = of.next_draft(accepted, 7, fork=True)
        while not draft.complete:
            logits, *_ = advance([draft.step()])
            draft.take(logits)
        advance([looking])
        assert draft.tree == wanted.tree
        assert len(draft.q) == len(wanted.q) and draft.sequence.tokens[: len(gained)] == gained
        for one, other in zip(draft.q, wanted.q, strict=True):
            assert torch.equal(one, other)
        assert len(draft.kept) == (len(draft.q) if proof is Proof.TRUNCATED else 0)
    following = of.next_draft(accepted, 7, fork=False)
    assert following.prefix == gained and following.number == 2
    following.finish()
    assert following.tree == wanted.tree


@every_case
def test_rows_follow_their_nodes(shape, proof, temperature):
    chosen = drafting(shape, proof, temperature)
    of = first(chosen)
    tree, draft = of.tree, of
    leaves = [leaf for leaf in of.open_leaves if leaf not in draft.leaf_rows]
    behind = dict(draft.leaf_rows)
    if leaves:
        (logits,) = advance([draft.look_past(leaves)])
        rows, _ = chosen.method.draw_from(logits, [tree.depths[leaf] for leaf in leaves], of.context)
        behind |= zip(leaves, rows, strict=True)
    behind |= zip(tree.inner, draft.rows, strict=True)
    assert sorted(behind) == list(range(-1, len(tree)))
    for node, row in behind.items():
        alone = MODEL.prefill(IMAGE, "go")
        path = tree.tokens_of(tree.path_to(node))
        alone.append(path)
        wanted = chosen.method.draw_from(alone.next_logits()[None], [len(path)], of.context)[0][0]
        assert torch.allclose(row.float(), wanted.float())


@given(st.integers(0, 2), st.integers(2, 9), st.integers(0, 14), st.sampled_from(list(SHAPES)))
@profile(max_examples=60)
def test_no_draft_passes_the_longest_reply_or_its_end(end, longest, accepted, shape):
    tokens = first(drafting(shape, max_tokens=longest)).tree.tokens
    ends = frozenset({tokens[end % len(tokens)]})
    chosen = drafting(shape, max_tokens=longest, ends=ends)
    of = first(chosen)
    tree = of.tree
    assert tree.depth == min(chosen.settings.depth, longest - 1) or ends.intersection(tree.tokens)
    for node in tree.inner[1:]:
        assert tree.tokens[node] not in ends
    for leaf in of.open_leaves:
        assert of.can_follow(leaf + 1, 10) or 10 in ends
    accepted = min(accepted, len(tree))
    if of.can_follow(accepted, 10):
        gained = of.tokens_of(accepted, 10)
        draft = of.next_draft(accepted, 10, fork=True)
        draft.finish()
        assert not ends.intersection(gained) and len(draft.tree) > 0
        assert len(gained) + draft.tree.depth + 1 <= longest


@pytest.mark.parametrize("shape", ["sequence", "budget"])
def test_a_full_context_ends_the_draft_and_no_more(shape):
    short = TableModel(1, 12, ends=False, noise=0.5, max_length=3)  # of which the prompt takes two
    chosen = drafting(shape)
    of = first(chosen, short)
    assert not of.able and of.complete and not of.open_leaves
    # The rows after the second level would need a pass that is too long.
    assert of.tree.depth == 2
    reference = first(chosen)
    if shape != "budget":
        assert of.tree == reference.tree.cut(2)
    following = of.next_draft(2, 7, fork=False)
    assert following.complete and not following.tree.tokens
    of = first(drafting("expansion"))
    assert not of.can_follow(1, 12) and not of.next_draft(1, 12, fork=False).able  # a token that it lacks


def test_the_settings_of_a_decode_shape_its_drafts():
    chosen = DecodeSettings(mode="mc-tslt", temperature=1.0, tree_expansion="3,1", seed=4)
    found = Drafting(chosen, frozenset({2}), 5)
    assert (found.depth, found.shape, found.draws) == (2, Shape.EXPANSION, True)
    assert found.method is truncated
    context = found.context(1, 0)
    assert (context.top_k, context.seed, context.reply) == (32, 4, 5)
    found = Drafting(DecodeSettings(mode="dsd", shape="budget", tree_budget=9, draft_length=5), frozenset(), 1)
    assert (found.depth, found.shape, found.draws) == (5, Shape.BUDGET, False)
