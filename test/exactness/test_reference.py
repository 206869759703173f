# SPDX-License-Identifier: Apache-2.0
"""Every mode, through the real session, equals the reference: by tokens, or by distribution when it samples."""

from __future__ import annotations

import numpy as np
import pytest
from by_reference import coupled_reply, greedy_reply, model_of
from joint import ALPHA, FEW, IMAGE, INSTRUCTION, LENGTH, PER_REPLY, count, p_value
from law import joint_law
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.reference import multi_candidate, speculative_sampling, split, truncate, truncated
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

TARGET, DRAFT = TableModel(4, ends=False), TableModel(4, ends=False, noise=0.6, padding=3)
PROOFS = ("full", "split", "truncated", "coupled")
SHAPES = ("sequence", "expansion", "budget")
GUESSES = {"predraft_source": "guesses", "predraft_workers": 2}

MODES = {name: {"mode": name} for name in PRESETS}
AXES = {f"{proof} {shape}": {"mode": "dsd", "proof": proof, "shape": shape} for proof in PROOFS for shape in SHAPES}
AHEAD = {f"fsd {proof}": {"mode": "fsd", "proof": proof} | GUESSES for proof in PROOFS}
GREEDY = MODES | AXES | AHEAD
COUPLED = {
    name: values | {"proof": "coupled", "temperature": 0.9}
    for name, values in (MODES | {"expansion": {"mode": "dsd", "shape": "expansion"}}).items()
}
# What draws, by settings that must draw the same tokens. fsd draws those of the mode without what is drafted ahead.
SAMPLED = {
    "ar": [{"mode": "ar"}],
    "full": [{"mode": "dsd"}, {"mode": "fsd"} | GUESSES, {"mode": "fsd", "pipeline_depth": 2}],
    "split": [
        {"mode": "dssd"}, {"mode": "fsd", "proof": "split"} | GUESSES,
        {"mode": "fsd", "proof": "split", "predraft_source": "exits"},
        {"mode": "fsd", "proof": "split", "pipeline_depth": 3},
    ],
    "truncated": [{"mode": "tslt"}, {"mode": "fsd", "proof": "truncated", "pipeline_depth": 3} | GUESSES],
    "full tree": [{"mode": "mc-dsd"}, {"mode": "fsd", "shape": "expansion"} | GUESSES],
    "split tree": [{"mode": "dssd", "shape": "expansion"}],
    "truncated tree": [{"mode": "mc-tslt"}],
}  # fmt: skip
SHORT = {"draft_length": 2, "top_k_proof": 2, "tree_expansion": "2,2", "temperature": 1.0, "seed": 7}


@pytest.fixture(params=["in process", "websocket"])
def connect(request, serving):
    """connect(): a channel to a verifier of TARGET."""
    if request.param == "websocket":
        with serving("table:4:0") as url:
            yield lambda: WebsocketChannel(url)
        return
    with VerifierEngine(TARGET) as engine:
        yield lambda: LocalChannel(engine)


def replies(connect, count: int = 2, **values) -> list[list[int]]:
    settings = DecodeSettings(**({"max_tokens": 24, "seed": 3} | values))
    with connect() as channel, EdgeSession(channel, DRAFT, settings) as session:
        return [session.decode(IMAGE, f"go {n}").tokens for n in range(count)]


def test_greedy_says_what_the_reference_says(connect):
    wanted = [greedy_reply(TARGET, DRAFT, IMAGE, f"go {n}", 24) for n in range(2)]
    for name, values in GREEDY.items():
        assert replies(connect, **values) == wanted, name


def test_coupled_says_what_the_reference_says(connect):
    settings = DecodeSettings(mode="coupled", temperature=0.9, max_tokens=24, seed=3)
    wanted = [coupled_reply(TARGET, DRAFT, IMAGE, f"go {n}", settings, n + 1) for n in range(2)]
    assert len({tuple(reply) for reply in wanted}) == 2
    for name, values in COUPLED.items():
        assert replies(connect, **values) == wanted, name


def test_what_draws_draws_the_same_over_every_channel(connect):
    with VerifierEngine(TARGET) as engine:
        for name, group in SAMPLED.items():
            wanted = replies(lambda: LocalChannel(engine), **SHORT | group[0])
            for values in group:
                assert replies(connect, **SHORT | values) == wanted, (name, values)


ROUNDS = {
    "ar": lambda p, q: lambda c, rng: speculative_sampling(p, q, c, 0, rng),
    "full": lambda p, q: lambda c, rng: speculative_sampling(p, q, c, 2, rng),
    "split": lambda p, q: lambda c, rng: split(p, q, c, 2, rng),
    "truncated": lambda p, q: lambda c, rng: truncated(p, q, c, 2, 2, rng),
    "full tree": lambda p, q: lambda c, rng: multi_candidate(p, q, c, (2, 2), rng),
    "split tree": lambda p, q: lambda c, rng: multi_candidate(p, q, c, (2, 2), rng),
    "truncated tree": lambda p, q: lambda c, rng: multi_candidate(p, lambda t: truncate(q(t), 2), c, (2, 2), rng),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_what_draws_is_distributed_as_the_reference(name):
    """Three tokens out of four, in independent stretches (see ``joint``)."""
    target, draft = (TableModel(2, 4, ends=False, period=LENGTH, noise=noise) for noise in (0.0, 0.7))
    settings = DecodeSettings(max_tokens=LENGTH * PER_REPLY, **SHORT | SAMPLED[name][0])
    p, q = (model_of(model, IMAGE, INSTRUCTION, settings.sampling) for model in (target, draft))
    expected = joint_law(ROUNDS[name](p, q), 4, LENGTH)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, settings) as session,
    ):
        counts = count(session, 4, FEW)
    assert p_value(counts, expected) > ALPHA
    # The reference's law is the target's own.
    alone = np.ones_like(expected)
    for tokens in np.ndindex(alone.shape):
        for end in range(LENGTH):
            alone[tokens] *= p(list(tokens[:end]))[tokens[end]]
    assert expected == pytest.approx(alone, abs=1e-9)
