# SPDX-License-Identifier: Apache-2.0
"""Replies follow the target's generation_config.json as transformers' ``generate`` does, in every mode."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from by_transformers import generated
from restarting_channel import RestartingChannel
from tiny_models import FAMILIES, make_tiny_model
from tiny_text import make_tiny_text

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.constraint import ReplyForm
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.navigation.run.actions import parse_reply, read_grammar
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Outcome

LENGTH = 44
DSD = ReplyForm(**read_grammar("dsd").written, limit=LENGTH)
NOISE = {"proof": "coupled", "temperature": 0.9}
WAYS = [
    *({"mode": mode} for mode in ("ar", "stream", "dsd", "mc-dsd")),
    {"mode": "fsd", "pipeline_depth": 3},
    {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 8},
    {"mode": "fsd", "shape": "budget", "pipeline_depth": 2},
    {"mode": "stream", "temperature": 1.2, "top_k": 20, "top_p": 0.9},
    NOISE | {"mode": "coupled"},
    NOISE | {"mode": "fsd", "pipeline_depth": 2},
]
PATIENT = LinkSettings(response_timeout_s=0.5, attempts=60)
OPTIONS = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 3,
    "min_new_tokens": 12,
    "suppress_tokens": [65, 90],
    "begin_suppress_tokens": [70],
    "bad_words_ids": [[66], [67, 68]],
    "sequence_bias": [[[71], 1.5], [[72, 73], -2.0]],
    "exponential_decay_length_penalty": [20, 1.05],
}
HELD = OPTIONS | {"no_repeat_ngram_size": 0, "suppress_tokens": [1, 2], "bad_words_ids": [[3]]}  # DSD has none of these
ENDS = {"eos_token_id": [258, 256]}


def made(folder, options: dict, **values):
    """A tiny model of these options, with an exit after each layer but the last."""
    directory = make_tiny_model(folder, seed=5, layers=3, **values)
    (directory / "generation_config.json").write_text(json.dumps(ENDS | options))
    model = load_model(ModelSettings(str(directory)))
    model.exits = ExitAdapters.untrained(model)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def target(folder):
    return made(folder / "target", OPTIONS)


@pytest.fixture(scope="module")
def held(folder):
    return made(folder / "held", HELD)


@pytest.fixture(scope="module")
def drafts(folder):
    """Two that often agree: one whose folder has the target's options, and one without."""
    return [made(folder / f"draft{n}", options, noise=0.08, vocab_rows=320) for n, options in enumerate((OPTIONS, {}))]


@pytest.fixture(scope="module")
def engines(target, held):
    every = EngineSettings(exit_share=1.0, max_batch=8)
    with VerifierEngine(target, every) as engine, VerifierEngine(held, every) as other:
        yield {None: engine, DSD: other}


def settings(**values) -> DecodeSettings:
    return DecodeSettings(**({"mode": "dsd", "seed": 7, "max_tokens": LENGTH} | values))


def replies(channel, draft, chosen: DecodeSettings, picture, form=None) -> list[list[int]]:
    with EdgeSession(channel, draft, chosen, PATIENT, form=form) as session:
        return [session.decode(picture(seed), "find it").tokens for seed in range(2)]


def wanted(target, chosen: DecodeSettings, picture, form=None) -> list[list[int]]:
    constraint = target.constrainer.of(form, target.eos_token_ids) if form else None
    return [generated(target, picture(seed), "find it", chosen, seed + 1, constraint) for seed in range(2)]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(name, folder, picture, drafts):
    alone = made(folder / name, {name: OPTIONS[name]})
    chosen = settings(mode="stream")
    with VerifierEngine(alone) as engine:
        assert replies(LocalChannel(engine), drafts[1], chosen, picture) == wanted(alone, chosen, picture)


def test_the_options_make_a_difference(target, folder, picture):
    chosen = settings(mode="ar")
    assert wanted(target, chosen, picture) != wanted(made(folder / "free", {}), chosen, picture)


@pytest.mark.parametrize("form", [None, DSD], ids=["free", "constrained"])
@pytest.mark.parametrize("values", WAYS, ids=str)
def test_every_mode_gives_what_generate_gives(engines, drafts, picture, values, form):
    chosen, channel = settings(**values), LocalChannel(engines[form])
    expected = wanted(engines[form].model, chosen, picture, form)
    for draft in drafts:
        assert replies(channel, draft, chosen, picture, form) == expected


def test_in_one_pass_with_other_robots(engines, held, drafts, picture):
    ways = [{"mode": "stream"}, {"mode": "fsd"}, {"mode": "mc-dsd"}, NOISE | {"mode": "coupled"}]
    plans = [(settings(**way), form) for way in ways for form in (DSD, None)]

    def one(plan):
        return replies(LocalChannel(engines[DSD]), drafts[0], plan[0], picture, plan[1])

    expected = [wanted(held, chosen, picture, form) for chosen, form in plans]
    with ThreadPoolExecutor(len(plans)) as robots:
        assert list(robots.map(one, plans)) == expected


def test_what_the_options_bar_cannot_end_a_constrained_reply(folder, drafts, picture):
    """Where grammar and options leave no token, the grammar alone decides."""
    unable = made(folder / "unable", {"no_repeat_ngram_size": 1})
    for model in (drafts[0], unable):
        with (
            VerifierEngine(unable) as engine,
            EdgeSession(LocalChannel(engine), model, settings(), form=DSD) as session,
        ):
            parse_reply(session.decode(picture(0), "find it").text)
            parse_reply(session.decode_alone(picture(0), "find it").text)


def test_an_exit_says_nothing_that_the_final_layer_may_not_say(folder, drafts, picture):
    model, said = made(folder / "upper", {"suppress_tokens": [*range(128)]}), []

    class Hearing(LocalChannel):
        def receive(self, timeout: float):
            said.append(super().receive(timeout))
            return said[-1]

    with VerifierEngine(model, EngineSettings(exit_share=1.0)) as engine:
        for _ in range(20):  # how many early outcomes are sent depends on the machine's load
            replies(Hearing(engine), drafts[1], settings(mode="fsd"), picture)
            early = [outcome.next_token for outcome in said if isinstance(outcome, Outcome) and not outcome.is_final]
            if len(early) > 20:
                break
    assert len(early) > 20 and min(early) >= 128


@pytest.mark.parametrize("mode", ["stream", "fsd"])
def test_after_cuts_and_restarts(mode, target, drafts, picture):
    events = iter(["", "", "", "", "", "cut", "", "", "", "restart", "", "", "", "restart and cut"] * 3)
    channel = RestartingChannel(target, lambda *_: next(events, ""))
    with channel:
        assert replies(channel, drafts[0], settings(mode=mode), picture) == wanted(target, settings(), picture)
    assert channel.restarts > 1


def test_a_draft_that_goes_on_alone_follows_its_own(engines, drafts, picture):
    with EdgeSession(LocalChannel(engines[None]), drafts[0], settings()) as session:
        reply = session.decode_alone(picture(0), "find it")
    assert reply.tokens == wanted(drafts[0], settings(), picture)[0]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen2_vl"])
def test_other_families(family, folder, drafts, picture):
    model = made(folder / family, OPTIONS, family=family)
    with VerifierEngine(model) as engine:
        chosen = settings(mode="stream")
        assert replies(LocalChannel(engine), drafts[1], chosen, picture) == wanted(model, chosen, picture)


@pytest.mark.parametrize("mode", ["stream", "mc-dsd"])
def test_text_models(mode, folder):
    """Such as Qwen2.5 Instruct."""
    directory = make_tiny_text(folder / f"text-{mode}", 5, kind="qwen2")
    (directory / "generation_config.json").write_text(json.dumps(ENDS | OPTIONS))
    draft = make_tiny_text(folder / f"draft-{mode}", 5, kind="qwen2", noise=0.1)
    model, draft = (load_model(ModelSettings(str(path))) for path in (directory, draft))
    with VerifierEngine(model) as engine, EdgeSession(LocalChannel(engine), draft, settings(mode=mode)) as session:
        assert session.decode(None, "find it").tokens == generated(model, None, "find it", settings())
