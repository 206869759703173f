# SPDX-License-Identifier: Apache-2.0
"""Mode stream gives the target's own tokens: whatever the models, the sampling, the link, and who else is served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from by_reference import reply_alone
from stepped import Unhurried
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

SAMPLINGS = [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 8}]
WAYS = [
    {"mode": "stream"}, {"mode": "ar"}, {"mode": "coupled"}, {"mode": "fsd", "pipeline_depth": 2},
    {"mode": "dsd", "shape": "budget", "tree_budget": 6},
]  # fmt: skip
ASKED = ((1, "find the silver bottle"), (2, "stop"))


def settings(**values) -> DecodeSettings:
    return DecodeSettings(**{"mode": "stream", "max_tokens": 24} | values)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "text"])
def pair(request, tmp_path_factory, picture):
    """(target, draft, what is asked): the draft agrees often, not always, and its ids are padded otherwise."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "text":
        made = make_tiny_text(folder / "target", 5), make_tiny_text(folder / "draft", 5, noise=0.08)
        asked = [(None, instruction) for _, instruction in ASKED]
    else:
        made = (
            make_tiny_model(folder / "target", 5, family=request.param),
            make_tiny_model(folder / "draft", 5, noise=0.08, vocab_rows=320, family=request.param),
        )
        asked = [(picture(number), instruction) for number, instruction in ASKED]
    return *(load_model(ModelSettings(str(directory))) for directory in made), asked


def replies(channel, draft, chosen: DecodeSettings, asked, **given):
    with channel, EdgeSession(channel, draft, chosen, **given) as session:
        return [session.decode(*one) for one in asked]


def alone(target, chosen: DecodeSettings, asked) -> list[list[int]]:
    ends = target.eos_token_ids
    return [reply_alone(target, *one, chosen, number, ends) for number, one in enumerate(asked, 1)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "truncated"])
def test_the_stream_and_coupled_rounds_say_what_the_target_alone_says(pair, sampling):
    target, draft, asked = pair
    with VerifierEngine(Unhurried(target)) as engine:
        wanted = alone(target, settings(**sampling), asked)
        for way in WAYS:
            found = replies(LocalChannel(engine), draft, settings(**{"proof": "coupled"} | way | sampling), asked)
            assert [reply.tokens for reply in found] == wanted, way
            for reply in found:
                assert reply.verified and reply.finished == (reply.tokens[-1] in target.eos_token_ids)
                assert sum(len(record.gained) for record in reply.records) == len(reply.tokens)
    assert wanted[0] != wanted[1]


@pytest.mark.parametrize("max_batch", [1, 3])
def test_eight_robots_at_once_hear_what_each_would_hear_alone(target, draft, picture, max_batch):
    """Drafting or not, sampled or not, beside robots that decode in rounds."""
    asked = [(picture(number), f"go {number}") for number in range(2)]
    plans = [
        settings(seed=number, temperature=0.3 * (number % 3), mode=("stream", "ar", "stream", "coupled")[number % 4])
        for number in range(8)
    ]
    limits = EngineSettings(max_batch=max_batch)
    with VerifierEngine(Unhurried(target), limits) as engine, ThreadPoolExecutor(8) as robots:
        found = list(robots.map(lambda plan: replies(LocalChannel(engine), draft, plan, asked), plans))
    for plan, said in zip(plans, found, strict=True):
        assert [reply.tokens for reply in said] == alone(target, plan, asked)


def test_drafts_that_come_in_time_are_accepted(target, picture):
    """A draft model that is the target itself: every token that was drafted in time holds."""
    with VerifierEngine(Unhurried(target)) as engine:
        found = replies(LocalChannel(engine), target, settings(max_tokens=60), [(picture(1), "go")] * 3)
    records = [record for reply in found for record in reply.records]
    assert all(record.accepted == record.drafted and not record.rejected for record in records)
    assert sum(record.accepted for record in records) > 0
