# SPDX-License-Identifier: Apache-2.0
"""The joint distribution of sampled tokens is the target's, whatever was drafted.

test_reference.py compares each proof's draws with its plain algorithm's token by token, which is sharper than a count.
Counted here is the one proof that no reference has as it travels; slow tests count more.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from joint import ALPHA, FEW, IMAGE, INSTRUCTION, LENGTH, MANY, PER_REPLY, chi_squared, count, in_halves, p_value
from table_model import TableModel, joint_distribution

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.sampling import SamplingSettings, transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel

TARGET = TableModel(2, ends=False, period=LENGTH)
DRAFT = TableModel(2, ends=False, period=LENGTH, noise=0.7, padding=4)
# Of a split tree the probabilities travel rounded, which the reference has for sequences alone.
SPLIT_TREE = {"mode": "dsd", "shape": "expansion", "tree_expansion": "2,2", "proof": "split"}
EVERY = {
    "ar, top-k": {"mode": "ar", "top_k": 5},
    "full, top-p": {"mode": "dsd", "draft_length": 2, "top_p": 0.8},
    "split": {"mode": "dssd", "draft_length": 4, "temperature": 0.7, "top_k": 5},
    "truncated tree": SPLIT_TREE | {"proof": "truncated", "top_k_proof": 2},
    "split tree": SPLIT_TREE,
}


def counted(samples: int, **values) -> float:
    """The chance of the counts that the target alone would give, if the decode is exact."""
    chosen = DecodeSettings(**{"temperature": 1.0, "seed": 7, "max_tokens": LENGTH * PER_REPLY} | values)
    with (
        VerifierEngine(TARGET) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, DRAFT, chosen) as session,
    ):
        expected = joint_distribution(TARGET, IMAGE, INSTRUCTION, chosen.sampling, LENGTH)
        return in_halves(partial(count, session, 8), samples, lambda counts: p_value(counts, expected))


def test_sampled_tokens_are_the_targets():
    assert counted(FEW, **SPLIT_TREE) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_many_sampled_tokens_are_the_targets(name):
    assert counted(MANY, **EVERY[name]) > ALPHA


@pytest.mark.parametrize(("samples", "error"), [(FEW, 0.05), (MANY, 0.02)])
def test_a_small_error_is_noticed(samples, error):
    """The power of the tests: one token in a single position more likely by so much than it should be."""
    expected = joint_distribution(TARGET, IMAGE, INSTRUCTION, SamplingSettings(1.0), LENGTH)
    wrong = expected.copy()
    second = expected.sum(axis=(0, 2))
    likeliest = second.max()
    wrong *= (1 - likeliest - error) / (1 - likeliest)
    wrong[:, second.argmax(), :] = expected[:, second.argmax(), :] * (1 + error / likeliest)
    wrong /= wrong.sum()
    noticed = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)

        def draw(count: int, rng=rng) -> np.ndarray:
            return rng.multinomial(count, wrong.ravel()).reshape(wrong.shape).astype(float)

        noticed += in_halves(draw, samples, lambda counts: p_value(counts, expected)) < ALPHA
    assert noticed >= 18


def test_same_seed_same_reply_and_another_seed_another():
    replies = []
    with VerifierEngine(TARGET) as engine:
        for seed in (1, 1, 2):
            chosen = DecodeSettings(temperature=1.0, seed=seed, max_tokens=40)
            with LocalChannel(engine) as channel, EdgeSession(channel, DRAFT, chosen) as session:
                replies.append([session.decode(IMAGE, INSTRUCTION).tokens for _ in range(2)])
    assert replies[0] == replies[1] != replies[2]
    assert replies[0][0] != replies[0][1]


def test_a_real_model_sampled(target, draft, picture):
    """The first two tokens of a Qwen2-VL, cut to its three likeliest each: nine cells."""
    chosen = DecodeSettings(mode="dsd", temperature=1.5, top_k=3, draft_length=1, max_tokens=2, seed=11)
    image, cells = picture(9), {}
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
