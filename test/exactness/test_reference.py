# SPDX-License-Identifier: Apache-2.0
"""Every mode, through the real session, says what its plain algorithm in ``decoding/reference.py`` says.

What draws is given to the reference as it was drawn, so that each token has to agree; and that the reference's own law
is the target's is enumerated in test/decoding/test_reference.py. test_distribution.py counts draws instead.
"""

from __future__ import annotations

import numpy as np
import pytest
from by_reference import coupled_reply, drawn_reply, greedy_reply
from joint import IMAGE
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding import rejection, tree_growth
from dsd_ros.decoding.methods import base, full, split
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.rejection import TreeVerdict, verify_tree
from dsd_ros.decoding.sampling import sample
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel

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
    for name, values in (
        MODES
        | {"expansion": {"mode": "dsd", "shape": "expansion"}, "gamma 7": {"mode": "dsd", "draft_length": 7}}
        | {"guesses": {"mode": "fsd"} | GUESSES, "in flight": {"mode": "fsd", "pipeline_depth": 3}}
    ).items()
}
# What draws, by settings that must draw the same tokens. fsd draws those of the mode without what is drafted ahead.
DRAWN = {
    "full": [{"mode": "dsd"}, {"mode": "fsd"} | GUESSES, {"mode": "fsd", "pipeline_depth": 2}],
    "split": [
        {"mode": "dssd"}, {"mode": "fsd", "proof": "split"} | GUESSES,
        {"mode": "fsd", "proof": "split", "predraft_source": "exits"},
        {"mode": "fsd", "proof": "split", "pipeline_depth": 3},
    ],
    "truncated": [{"mode": "tslt"}, {"mode": "fsd", "proof": "truncated", "pipeline_depth": 3} | GUESSES],
    "full tree": [
        {"mode": "mc-dsd"}, {"mode": "fsd", "shape": "expansion"} | GUESSES,
        {"mode": "fsd", "shape": "expansion", "pipeline_depth": 3},
    ],
    "truncated tree": [{"mode": "mc-tslt"}, {"mode": "fsd", "proof": "truncated", "shape": "expansion"} | GUESSES],
    "split tree": [
        {"mode": "dssd", "shape": "expansion"}, {"mode": "fsd", "proof": "split", "shape": "expansion"} | GUESSES,
    ],
}  # fmt: skip
SAMPLINGS = ({}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.8})
OPTIONS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4, "suppress_tokens": [1], "bad_words_ids": [[2, 3]]}
SHORT = {"draft_length": 3, "top_k_proof": 2, "tree_expansion": "2,2", "temperature": 1.0, "seed": 7, "max_tokens": 48}
LONG = {"max_tokens": 200}


@pytest.fixture(scope="module")
def engine():
    with VerifierEngine(TARGET) as engine:
        yield engine


def replies(channel, count: int = 2, model: TableModel = DRAFT, **values) -> list[list[int]]:
    settings = DecodeSettings(**({"max_tokens": 24, "seed": 3} | values))
    with channel, EdgeSession(channel, model, settings) as session:
        return [session.decode(IMAGE, f"go {n}").tokens for n in range(count)]


def by_reference(count: int = 2, pair=(TARGET, DRAFT), **values) -> list[list[int]]:
    settings = DecodeSettings(**values)
    return [drawn_reply(*pair, IMAGE, f"go {n}", settings, n + 1) for n in range(count)]


def test_greedy_says_what_the_reference_says(engine):
    wanted = [greedy_reply(TARGET, DRAFT, IMAGE, f"go {n}", 24) for n in range(2)]
    for name, values in GREEDY.items():
        assert replies(LocalChannel(engine), **values) == wanted, name
    for gamma in (1, 2, 6, 8):
        assert replies(LocalChannel(engine), mode="dsd", draft_length=gamma) == wanted, gamma
    for longest in (1, 2, 17):
        for mode in ("stream", "ar", "dsd"):
            cut = [reply[:longest] for reply in wanted]
            assert replies(LocalChannel(engine), mode=mode, max_tokens=longest) == cut, (mode, longest)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_coupled_says_what_the_reference_says(engine, sampling):
    settings = DecodeSettings(**{"mode": "coupled", "temperature": 0.9, "max_tokens": 24, "seed": 3} | sampling)
    wanted = [coupled_reply(TARGET, DRAFT, IMAGE, f"go {n}", settings, n + 1) for n in range(2)]
    assert len({tuple(reply) for reply in wanted}) == 2
    for name, values in COUPLED.items():
        assert replies(LocalChannel(engine), **values | sampling) == wanted, name


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", DRAWN)
def test_what_draws_draws_what_the_reference_draws(engine, monkeypatch, name, sampling):
    first, *others = ({**SHORT, **values, **sampling} for values in DRAWN[name])
    if name == "split tree":  # with rounded probabilities: test_distribution.py
        monkeypatch.setattr(split, "rounded_up", lambda q: q.float().clamp(min=split.LEAST_CHANCE))
        monkeypatch.setattr(split, "pack_chances", lambda chances: chances.astype(np.float32).tobytes())
        monkeypatch.setattr(split, "unpack_chances", lambda data, count: np.frombuffer(data, np.float32))
    assert replies(LocalChannel(engine), **first | LONG) == by_reference(**first | LONG)
    found = replies(LocalChannel(engine), **first)
    assert found[0] != found[1]
    for values in others:
        assert replies(LocalChannel(engine), **values) == found, values


def test_options_of_generation_config_count_in_every_mode():
    target = TableModel(4, ends=False, options=OPTIONS)
    draft = TableModel(4, ends=False, noise=0.6, padding=3, options=OPTIONS)
    with VerifierEngine(target) as engine:

        def found(**values):
            return replies(LocalChannel(engine), model=draft, **values)

        wanted = [greedy_reply(target, draft, IMAGE, f"go {n}", 24) for n in range(2)]
        assert wanted != [greedy_reply(TARGET, DRAFT, IMAGE, f"go {n}", 24) for n in range(2)]
        for name, values in GREEDY.items():
            assert found(**values) == wanted, name
        settings = DecodeSettings(mode="coupled", temperature=0.9, max_tokens=24, seed=3)
        wanted = [coupled_reply(target, draft, IMAGE, f"go {n}", settings, n + 1) for n in range(2)]
        for name, values in COUPLED.items():
            assert found(**values) == wanted, name
        for name in ("full", "split", "truncated", "full tree", "truncated tree"):
            first, *others = (SHORT | values for values in DRAWN[name])
            wanted = by_reference(pair=(target, draft), **first)
            for values in (first, *others):
                assert found(**values) == wanted, values


# ---------------------------------------------------------------------------- wrong rules


def _inverted(tree, q, p, generator):
    for i, x in enumerate(tree.tokens):
        if generator.random() * float(p[i][x]) >= float(q[i][x]):  # min(1, q/p)
            return TreeVerdict(tree.path_to(i - 1), sample((p[i] - q[i][: len(p[i])]).clamp(min=0), generator))
    return TreeVerdict(tree.path_to(len(tree) - 1), sample(p[-1], generator))


def _inverted_split(tree, chances, p, generator):
    for i, (x, q_x) in enumerate(zip(tree.tokens, chances, strict=True)):
        if generator.random() * float(p[i][x]) >= q_x:
            return TreeVerdict(tree.path_to(i - 1), 0, owed=True)
    return TreeVerdict(tree.path_to(len(tree) - 1), sample(p[-1], generator))


def _cut(q, count, generator):
    """The draft is cut to its top 3 and claims its whole softmax."""
    kept = q[0].topk(3)
    return [[int(kept.indices[sample(kept.values, generator)])]]


def _uniform(q, count, generator):
    """The draft comes from another distribution than the truncated one that travels."""
    return [[sample((q[0] > 0).float(), generator)]]


WRONG = {  # (what is replaced, by what, for which proof)
    "the ratio is inverted": (full, "verify_tree", _inverted, "full"),
    "the ratio of split is inverted": (split, "verify_split_tree", _inverted_split, "split"),
    "accepted 5 % too often": (full, "verify_tree", lambda tree, q, *rest: verify_tree(tree, 0.95 * q, *rest), "full"),
    "the draft is not taken from p": (rejection, "residual", lambda p, q: p, "full"),
    "the draft is not taken from p of split": (split, "split_residual", lambda p, q: p, "split"),
    "cut after it was claimed": (tree_growth, "draw_children", _cut, "full"),
    "not drawn from what is kept": (tree_growth, "draw_children", _uniform, "truncated"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(engine, monkeypatch, name):
    place, function, wrong, proof = WRONG[name]
    values = SHORT | DRAWN[proof][0] | LONG
    wanted = by_reference(**values)
    monkeypatch.setattr(place, function, wrong)
    assert replies(LocalChannel(engine), **values) != wanted


def test_noise_of_another_distribution_is_noticed(engine, monkeypatch):
    values = SHORT | {"mode": "coupled"}
    wanted = [coupled_reply(TARGET, DRAFT, IMAGE, f"go {n}", DecodeSettings(**values), n + 1) for n in range(2)]
    monkeypatch.setattr(base, "gumbel", lambda seed, *at: np.random.default_rng([seed, *at[:2]]).random(at[2]))
    assert replies(LocalChannel(engine), **values) != wanted
