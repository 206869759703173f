# SPDX-License-Identifier: Apache-2.0
"""Replies decoded by token trees, draft and target in one process, are the target's own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from joint import ALPHA, IMAGE, INSTRUCTION, LENGTH, PER_REPLY, p_value
from table_model import TableModel, joint_distribution

from dsd_ros.decoding.coupling import choose, gumbel, scores
from dsd_ros.decoding.rejection import TreeVerdict, check_tree, follow_tree, verify_tree, verify_tree_greedy
from dsd_ros.decoding.sampling import SamplingSettings, transform
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.decoding.tree_growth import BudgetTree, ExpansionTree

Grower = ExpansionTree | BudgetTree


def decode(
    models,
    image,
    length: int,
    grower: Callable[[], Grower],
    rows_of: Callable[[torch.Tensor, int], torch.Tensor],
    judge: Callable[[Grower, TokenTree, torch.Tensor, int], TreeVerdict],
) -> tuple[list[int], float]:
    """``length`` tokens and tau. Both callables are given the reply's length in front of the rows."""
    target, draft = (model.prefill(image, INSTRUCTION) for model in models)
    rounds = 0
    while len(target.tokens) < length:
        said = len(target.tokens)
        growing, depth = grower(), 0
        growing.take(rows_of(draft.next_logits()[None], said))
        while not growing.complete:
            depth += 1
            growing.take(rows_of(draft.grow_tree(*growing.level), said + depth))
        grown = growing.grown()
        # What the target does not have is rejected whatever follows: any token stands in for it.
        known = [token if token < models[0].vocab_size else 0 for token in grown.tree.tokens]
        logits = target.verify_tree(known, grown.tree.parents)
        verdict = judge(growing, grown.tree, logits, said)
        target.keep_path(verdict.path)
        held, missing = grown.split(verdict.path)
        draft.keep_path(held)
        for sequence, rest in ((target, []), (draft, missing)):
            sequence.append([*rest, verdict.next_token])
        assert draft.tokens == target.tokens
        rounds += 1
    return target.tokens[:length], len(target.tokens) / rounds


def alone(model, image, length: int, choose: Callable[[torch.Tensor, int], int]) -> list[int]:
    sequence = model.prefill(image, INSTRUCTION)
    while len(sequence.tokens) < length:
        sequence.append([choose(sequence.next_logits(), len(sequence.tokens))])
    return sequence.tokens


SHAPES = {
    "sequence": lambda: ExpansionTree((1, 1, 1)),
    "<2,2,2>": lambda: ExpansionTree((2, 2, 2)),
    "budget 16": lambda: BudgetTree(16, 6),
}


def test_greedy_replies_are_the_targets(target, draft, picture):
    plain = alone(target, picture(), 60, lambda logits, _: int(logits.argmax()))
    taus = {}
    for name, grower in SHAPES.items():
        tokens, taus[name] = decode(
            (target, draft),
            picture(),
            60,
            grower,
            lambda logits, _: torch.softmax(logits, -1),
            lambda _, tree, logits, __: verify_tree_greedy(tree, logits.argmax(-1).tolist()),
        )
        assert tokens == plain
    assert taus["sequence"] < min(taus["<2,2,2>"], taus["budget 16"])


def test_replies_of_shared_randomness_are_the_targets(target, draft, picture):
    def perturbed(logits, said):
        """log p + G of every row (n, V): what the two sides share is the noise."""
        noise = gumbel(7, 0, said, logits.shape[-1])
        found = [scores(row, noise) for row in torch.softmax(logits, -1)]
        return torch.from_numpy(np.stack(found))

    def judge(_, tree, logits, said):
        p, depths = torch.softmax(logits, -1), (0, *tree.depths)

        def emitted(node):
            return choose(p[node + 1], gumbel(7, 0, said + depths[node + 1], p.shape[-1]))

        return follow_tree(tree, emitted)

    def drawn(logits, said):
        return choose(torch.softmax(logits, -1), gumbel(7, 0, said, len(logits)))

    plain = alone(target, picture(), 60, drawn)
    assert len(set(plain)) > 30  # it is sampled
    for name, grower in SHAPES.items():
        rows = perturbed
        if name == "budget 16":
            rows = lambda logits, said: torch.softmax(perturbed(logits, said), -1)  # noqa: E731
        tokens, _ = decode((target, draft), picture(), 60, grower, rows, judge)
        assert tokens == plain


@pytest.mark.parametrize(
    ("expansion", "sampling"), [((2, 2), SamplingSettings(1.0)), ((3,), SamplingSettings(0.8, top_p=0.8))]
)
def test_three_tokens_are_distributed_as_the_target_says(expansion, sampling):
    size = 5
    models = (
        TableModel(2, size, ends=False, period=LENGTH),
        TableModel(2, size, ends=False, period=LENGTH, noise=0.7, padding=2),
    )
    generator = np.random.default_rng(9)

    def judge(growing, tree, logits, _):
        check_tree(tree, growing.q)
        return verify_tree(tree, growing.q, transform(logits, sampling), generator)

    counts = np.zeros((size,) * LENGTH)
    for _ in range(30):
        tokens, tau = decode(
            models,
            IMAGE,
            LENGTH * PER_REPLY,
            lambda: ExpansionTree(expansion, generator=generator),
            lambda logits, _: transform(logits, sampling),
            judge,
        )
        assert tau > 1.3
        for stretch in np.reshape(tokens, (PER_REPLY, LENGTH)):
            counts[tuple(stretch)] += 1
    expected = joint_distribution(models[0], IMAGE, INSTRUCTION, sampling, LENGTH)
    assert p_value(counts, expected) > ALPHA
