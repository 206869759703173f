# SPDX-License-Identifier: Apache-2.0
"""A websocket to a verifier in another process changes no token: the stream, and rounds of each kind of message."""

from __future__ import annotations

import pytest
from joint import INSTRUCTION
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

WAYS = (
    {"mode": "ar"},
    {"mode": "stream"},
    {"mode": "stream", "temperature": 0.8},
    {"mode": "dsd"},
    {"mode": "dsd", "temperature": 0.8, "top_k": 40},  # distributions go up
    {"mode": "dssd", "temperature": 0.8, "top_k": 40},  # and down
    {"mode": "mc-tslt", "temperature": 0.8, "top_float_proof": "float32"},
    {"mode": "fsd", "pipeline_depth": 2},  # early outcomes, and rounds that are sent ahead
)


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory):
    """A target of three layers with an exit beside it after each but the last."""
    directory = make_tiny_model(tmp_path_factory.mktemp("transports") / "target", seed=5, layers=3)
    model = load_model(ModelSettings(str(directory)))
    ExitAdapters.untrained(model).save(directory, model.fingerprint)
    return directory


@pytest.mark.parametrize("pictures", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_every_message_through_a_websocket_to_another_process(target_directory, draft, picture, serving, pictures):
    def replies(channel, values):
        chosen = DecodeSettings(**{"seed": 7, "max_tokens": 16} | values)
        with channel, EdgeSession(channel, draft, chosen) as session:
            return [session.decode(picture(n), INSTRUCTION) for n in range(pictures)]

    target, greedy = load_model(ModelSettings(str(target_directory))), []
    with (
        serving(str(target_directory), "exit_share=1.0") as url,
        VerifierEngine(target, EngineSettings(exit_share=1.0)) as engine,
    ):
        for values in WAYS:
            afar, here = replies(WebsocketChannel(url), values), replies(LocalChannel(engine), values)
            said = [[(one.tokens, one.text, one.finished) for one in replies] for replies in (afar, here)]
            assert said[0] == said[1], values
            assert len({tuple(one.tokens) for one in here}) == pictures
            if not values.get("temperature"):
                greedy.append(said[1])
    assert all(said == greedy[0] for said in greedy)
    assert sum(one.exits for one in afar) > 0
