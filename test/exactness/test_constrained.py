# SPDX-License-Identifier: Apache-2.0
"""Constrained replies are the constrained target's own, in every mode and over every link, and all of them parse."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from joint import ALPHA, IMAGE, chi_squared, in_halves
from table_model import TableModel
from tiny_models import make_tiny_model
from worded_table import FORM, WordedTable, constrained_alone, law_of_replies

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.constraint import ReplyForm
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.vocabulary import Vocabulary
from dsd_ros.navigation.run.actions import parse_reply, read_grammar
from dsd_ros.paths import models_directory
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

LENGTH = 44  # tokens of one byte each, of which an action takes up to 30
DSD = ReplyForm(**read_grammar("dsd").written, limit=LENGTH)
INSTRUCTIONS = ("find the silver bottle", "go to the red chair", "stop")
NOISE = {"proof": "coupled", "temperature": 0.9}
# Settings that have to give the constrained target's own tokens, greedy or with its noise.
WAYS: list[dict] = [
    *({"mode": mode} for mode in ("ar", "stream", "dsd", "mc-dsd")),
    {"mode": "fsd", "pipeline_depth": 3},
    {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 64},
    {"mode": "fsd", "shape": "budget", "pipeline_depth": 2},
    *(NOISE | {"mode": mode} for mode in ("stream", "coupled")),
    NOISE | {"mode": "fsd", "pipeline_depth": 2},
    NOISE | {"mode": "dsd", "shape": "expansion"},
    {"mode": "stream", "temperature": 1.2, "top_k": 20, "top_p": 0.9},
]


def settings(**values) -> DecodeSettings:
    return DecodeSettings(**({"mode": "dsd", "seed": 7, "max_tokens": LENGTH} | values))


def replies(channel, model, chosen: DecodeSettings, asked, form: ReplyForm | None = DSD, **given) -> list[list[int]]:
    """The tokens of each reply; all of them parse."""
    found = []
    with EdgeSession(channel, model, chosen, LinkSettings(response_timeout_s=10), form=form, **given) as session:
        for image, instruction in asked:
            reply = session.decode(image, instruction)
            assert not reply.worker_error
            if form is DSD:
                parse_reply(reply.text)
            found.append(reply.tokens)
    return found


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """A target of three layers with an exit after each but the last."""
    directory = make_tiny_model(tmp_path_factory.mktemp("held") / "target", seed=5, layers=3)
    model = load_model(ModelSettings(str(directory)))
    model.exits = ExitAdapters.untrained(model)
    return model


@pytest.fixture(scope="module")
def asked(picture):
    return [(picture(seed), INSTRUCTIONS[seed]) for seed in range(2)]


@pytest.fixture(scope="module")
def alone(speaking, asked):
    """alone(settings): what the constrained target says by itself."""

    def tokens(chosen: DecodeSettings) -> list[list[int]]:
        return [constrained_alone(speaking, *one, chosen, DSD, number) for number, one in enumerate(asked, 1)]

    return tokens


@pytest.fixture(scope="module")
def engine(speaking):
    with VerifierEngine(speaking, EngineSettings(exit_share=1.0, max_batch=8)) as engine:
        yield engine


def test_the_target_alone_would_say_something_else(engine, draft, asked, alone):
    free = replies(LocalChannel(engine), draft, settings(mode="ar"), asked, None)
    wanted = alone(settings(mode="ar"))
    assert all(one != other for one, other in zip(free, wanted, strict=True))
    assert len(set(map(tuple, wanted))) == 2


@pytest.mark.parametrize("values", WAYS, ids=str)
def test_every_way_gives_the_constrained_targets_tokens(engine, draft, asked, alone, values):
    chosen = settings(**values)
    assert replies(LocalChannel(engine), draft, chosen, asked) == alone(chosen)


def test_in_one_pass_with_robots_that_are_free(engine, draft, asked, alone):
    ways = [{}, {"mode": "fsd"}, {"mode": "mc-dsd"}, NOISE | {"mode": "coupled"}]
    plans = [(settings(**way), form) for way in ways for form in (DSD, None)]

    def one(plan: tuple[DecodeSettings, ReplyForm | None]) -> list[list[int]]:
        return replies(LocalChannel(engine), draft, plan[0], asked, plan[1])

    wanted = [alone(chosen) if form else one((chosen, form)) for chosen, form in plans]
    with ThreadPoolExecutor(len(plans)) as robots:
        assert list(robots.map(one, plans)) == wanted


def test_translated_drafts(speaking, engine, asked, alone, tmp_path_factory):
    foreign = load_model(ModelSettings(str(make_tiny_model(tmp_path_factory.mktemp("other"), 5, other_tokenizer=True))))
    vocabulary = Vocabulary(speaking.tokenizer.to_str())
    for values in ({"mode": "stream"}, {"mode": "stream", "temperature": 0.9}):
        chosen = settings(**values)
        found = replies(LocalChannel(engine), foreign, chosen, asked, vocabulary=vocabulary)
        assert found == alone(chosen), values


def test_a_draft_that_goes_on_alone_keeps_to_the_form(draft, engine, asked):
    for values in ({}, {"temperature": 0.9}, NOISE):
        with EdgeSession(LocalChannel(engine), draft, settings(**values), form=DSD) as session:
            reply = session.decode_alone(*asked[0])
            parse_reply(reply.text)
            if not values:
                assert reply.tokens == constrained_alone(draft, *asked[0], settings(), DSD)


def test_the_shipped_pair_says_what_it_says_anyway():
    """A model that follows its grammar loses nothing, and the constraint costs no round."""
    target, draft = (load_model(ModelSettings(str(models_directory() / role))) for role in ("target", "draft"))
    asked = [(np.full((112, 168, 3), 90 + seed, np.uint8), "find the silver bottle") for seed in range(3)]
    form = ReplyForm(**read_grammar("dsd").written, limit=96)
    with VerifierEngine(target) as engine:
        free, held = (replies(LocalChannel(engine), draft, settings(max_tokens=96), asked, one) for one in (None, form))
    assert free == held


def test_refusals_name_the_remedy(engine, draft):
    with pytest.raises(
        ValueError, match="a reply of 20 tokens is too short for 'Action: turn right 45 degrees', which takes 31"
    ):
        EdgeSession(LocalChannel(engine), draft, settings(), form=ReplyForm(DSD.marks, DSD.actions, 20))
    session = EdgeSession(LocalChannel(engine), draft, settings(), form=DSD)
    for sent, sentence in (
        ("{}", "form that replies are to have cannot be used"),
        (ReplyForm(DSD.marks, DSD.actions, 20).text, "a reply of 20 tokens is too short"),
    ):
        session._form = SimpleNamespace(text=sent)
        with pytest.raises(VerifierRefused, match=sentence):
            session.open()
    sentence = "cannot constrain the replies of table-1; set constrain to none"
    with VerifierEngine(TableModel(1)) as mute, pytest.raises(VerifierRefused, match=sentence):
        EdgeSession(LocalChannel(mute), None, settings(mode="ar"), form=DSD).open()


SAMPLED = [
    {"mode": "dsd", "draft_length": 3},
    {"mode": "dssd", "draft_length": 3},
    {"mode": "dssd", "shape": "expansion", "tree_expansion": "2,2"},
    {"mode": "mc-tslt", "tree_expansion": "2,2", "top_k_proof": 4},
    {"mode": "fsd", "draft_length": 2, "top_p": 0.9},
]


def p_value_of(values: dict, samples: int) -> float:
    target, draft = WordedTable(2), WordedTable(2, noise=0.7, padding=4)
    chosen = DecodeSettings(seed=7, max_tokens=FORM.limit, **({"temperature": 1.0} | values))
    law = law_of_replies(target, IMAGE, "go", chosen, FORM)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, chosen, form=FORM) as session,
    ):

        def draw(count: int) -> np.ndarray:
            counts = Counter(tuple(session.decode(IMAGE, "go").tokens) for _ in range(count))
            assert set(counts) <= set(law)
            return np.array([counts[reply] for reply in law], float)

        return in_halves(draw, samples, lambda counts: chi_squared(counts, np.array([*law.values()])))


@pytest.mark.parametrize("values", SAMPLED[:2], ids=str)
def test_sampled_replies_have_the_constrained_targets_distribution(values):
    assert p_value_of(values, 500) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("values", SAMPLED, ids=str)
def test_many_sampled_replies_have_the_constrained_targets_distribution(values):
    assert p_value_of(values, 5_000) > ALPHA
