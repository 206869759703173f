# SPDX-License-Identifier: Apache-2.0
"""fsd against ar and dsd through a real websocket to a verifier in another process."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from tiny_models import make_tiny_model

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.websocket import WebsocketChannel

INSTRUCTIONS = ("find the silver bottle", "go to the red chair", "stop")
VARIANTS = (
    {"predraft_source": "exits"},
    {"predraft_source": "guesses", "predraft_workers": 1},
    {"predraft_source": "both"},
    {"predraft_source": "both", "pipeline_depth": 3},
    {"predraft_source": "exits", "pipeline_depth": 2},
)


@pytest.fixture(scope="module")
def speaking_directory(tmp_path_factory):
    """A target of three layers with an exit beside it after each but the last."""
    directory = make_tiny_model(tmp_path_factory.mktemp("fsd") / "target", seed=5, layers=3)
    model = load_model(ModelSettings(str(directory)))
    ExitAdapters.untrained(model).save(directory, model.fingerprint)
    return directory


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("pictures", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_every_way_to_draft_ahead_gives_the_same_tokens(
    speaking_directory, draft, picture, serving, temperature, pictures
):
    exits = used = 0
    with ExitStack() as stack:
        url = stack.enter_context(serving(str(speaking_directory), "exit_share=1.0"))

        def session(**values):
            channel = stack.enter_context(WebsocketChannel(url))
            settings = DecodeSettings(temperature=temperature, seed=7, max_tokens=16, **values)
            return stack.enter_context(EdgeSession(channel, draft, settings))

        # When sampling, ar draws other tokens of the same distribution; dsd is held to it elsewhere.
        reference = session(mode="ar" if temperature == 0.0 else "dsd")
        others = [session(mode="fsd", **values) for values in VARIANTS]
        assert others[0].verifier.exit_layers == [1, 2]
        for seed in range(pictures):
            image, instruction = picture(seed), INSTRUCTIONS[seed % 3]
            wanted = reference.decode(image, instruction)
            for values, other in zip(VARIANTS, others, strict=True):
                reply = other.decode(image, instruction)
                assert reply.tokens == wanted.tokens, f"picture {seed}, {values}"
                assert not reply.worker_error
                exits += reply.exits
                used += reply.predrafts_used
    assert exits > 0 and used > 0
