# SPDX-License-Identifier: Apache-2.0
"""The joint distribution of sampled tokens is the target's, whatever was drafted."""

from __future__ import annotations

import numpy as np
import pytest
from joint import ALPHA, FEW, IMAGE, INSTRUCTION, LENGTH, MANY, PER_REPLY, SAMPLES, chi_squared, count, p_value
from table_model import TableModel, joint_distribution

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding import tree_growth
from dsd_ros.decoding.methods import DraftVerdict, full
from dsd_ros.decoding.rejection import TreeVerdict, residual
from dsd_ros.decoding.sampling import SamplingSettings, sample
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel


def settings(mode: str = "dsd", gamma: int = 2, **sampling: float) -> DecodeSettings:
    values = {"temperature": 1.0} | sampling
    length = LENGTH * PER_REPLY
    return DecodeSettings(mode=mode, draft_length=gamma, max_tokens=length, seed=7, **values)


def models(noise: float = 0.7) -> tuple[TableModel, TableModel]:
    """A target of 8 tokens, and a draft of it with another padding."""
    return (TableModel(2, ends=False, period=LENGTH), TableModel(2, ends=False, period=LENGTH, noise=noise, padding=4))


def in_process(chosen: DecodeSettings, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    target, draft = models()
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen) as session,
    ):
        counts = count(session, 8, samples)
    return counts, joint_distribution(target, IMAGE, INSTRUCTION, chosen.sampling, LENGTH)


EVERY = {
    "gamma2": settings(gamma=2),
    "cool": settings(gamma=4, temperature=0.7),
    "top-k": settings(gamma=3, temperature=1.3, top_k=5),
    "top-p": settings(gamma=2, top_p=0.8),
    "ar": settings("ar"),
}


@pytest.mark.parametrize("name", ["cool", "top-k", "top-p"])  # the others: test_reference.py
def test_sampled_tokens_are_the_targets(name):
    assert p_value(*in_process(EVERY[name], FEW)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_many_sampled_tokens_are_the_targets(name):
    assert p_value(*in_process(EVERY[name], MANY)) > ALPHA


def _inverted(draft_tokens, q, p, generator):
    for i, x in enumerate(draft_tokens):
        if generator.random() * float(p[i][x]) < float(q[i][x]):  # min(1, q/p)
            continue
        return DraftVerdict(i, sample(residual(p[i], q[i]), generator))
    return DraftVerdict(len(draft_tokens), sample(p[-1], generator))


def _resampled_from_p(draft_tokens, q, p, generator):
    for i, x in enumerate(draft_tokens):
        if generator.random() * float(q[i][x]) < float(p[i][x]):
            continue
        return DraftVerdict(i, sample(p[i], generator))  # instead of norm(max(0, p - q))
    return DraftVerdict(len(draft_tokens), sample(p[-1], generator))


@pytest.mark.parametrize("rule", [_inverted, _resampled_from_p])
def test_a_wrong_rule_is_noticed(monkeypatch, rule):
    def of_trees(tree, q, p, generator):
        found = rule(tree.tokens, q, p, generator)
        return TreeVerdict(tree.path_to(found.accepted - 1), found.next_token)

    monkeypatch.setattr(full, "verify_tree", of_trees)
    assert p_value(*in_process(settings(gamma=2), 4_000)) < ALPHA


def test_drafting_with_top_k_against_the_whole_softmax_is_noticed(monkeypatch):
    """The draft is cut to its top 3 and claims its whole softmax: not lossless."""

    def cut(q, count, generator):
        kept = q[0].topk(3)
        return [[int(kept.indices[sample(kept.values, generator)])]]

    monkeypatch.setattr(tree_growth, "draw_children", cut)
    assert p_value(*in_process(settings(gamma=2), 4_000)) < ALPHA


@pytest.mark.parametrize(("samples", "error"), [(FEW, 0.05), (SAMPLES, 0.03), (MANY, 0.02)])
def test_a_small_error_is_noticed(samples, error):
    """The power of the tests: one token in a single position more likely by so much than it should be."""
    target, _ = models()
    expected = joint_distribution(target, IMAGE, INSTRUCTION, SamplingSettings(1.0), LENGTH)
    wrong = expected.copy()
    second = expected.sum(axis=(0, 2))
    likeliest = second.max()
    wrong *= (1 - likeliest - error) / (1 - likeliest)
    wrong[:, second.argmax(), :] = expected[:, second.argmax(), :] * (1 + error / likeliest)
    wrong /= wrong.sum()
    noticed = 0
    for seed in range(20):
        drawn = np.random.default_rng(seed).multinomial(samples, wrong.ravel())
        noticed += p_value(drawn.reshape(wrong.shape).astype(float), expected) < ALPHA
    assert noticed >= 18


def test_same_seed_same_reply_and_another_seed_another():
    target, draft = models()
    replies = []
    with VerifierEngine(target) as engine:
        for seed in (1, 1, 2):
            chosen = DecodeSettings(temperature=1.0, seed=seed, max_tokens=40)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, chosen) as session:
                replies.append([session.decode(IMAGE, INSTRUCTION).tokens for _ in range(2)])
    assert replies[0] == replies[1] != replies[2]
    assert replies[0][0] != replies[0][1]


@pytest.mark.parametrize("mode", ["ar", "dsd"])
def test_a_real_model_sampled(target, draft, picture, mode):
    """The first two tokens of a Qwen2-VL, cut to its three likeliest each: nine cells."""
    chosen = DecodeSettings(mode=mode, temperature=1.5, top_k=3, draft_length=1, max_tokens=2, seed=11)
    image, cells = picture(9), {}
    from dsd_ros.decoding.sampling import transform

    sequence = target.prefill(image, INSTRUCTION)
    first = transform(sequence.next_logits(), chosen.sampling)
    for one in first.nonzero().ravel().tolist():
        behind = target.prefill(image, INSTRUCTION)
        behind.append([one])
        second = transform(behind.next_logits(), chosen.sampling)
        for other in second.nonzero().ravel().tolist():
            cells[one, other] = float(first[one] * second[other])
    counts = dict.fromkeys(cells, 0)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen) as session,
    ):
        for _ in range(400):
            counts[tuple(session.decode(image, INSTRUCTION).tokens)] += 1
    assert chi_squared(np.array(list(counts.values())), np.array(list(cells.values()))) > ALPHA
