# SPDX-License-Identifier: Apache-2.0
"""The stream, trees and exits with models of the other families, as target and as draft, and of two together."""

from __future__ import annotations

import pytest
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

INSTRUCTION = "find the silver bottle"
PAIRS = [("qwen2_5_vl", "qwen2_5_vl"), ("qwen3_vl", "qwen3_vl"), ("qwen3_vl", "qwen2_vl"), ("qwen2_vl", "qwen3_vl")]
MODES = [
    {"mode": "stream"},
    {"mode": "dsd", "shape": "budget", "tree_budget": 6},
    {"mode": "fsd", "predraft_workers": 64, "pipeline_depth": 2},
]
COUPLED = {"proof": "coupled", "temperature": 0.9, "seed": 7}


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(pair))
def pair(request, tmp_path_factory):
    """(target with exits, draft): related where they are of one family."""
    folder = tmp_path_factory.mktemp("families")
    target, draft = request.param
    made = make_tiny_model(folder / "target", seed=5, layers=4, family=target)
    like = make_tiny_model(folder / "draft", 5, noise=0.08, vocab_rows=320, family=draft)
    model = load_model(ModelSettings(str(made)))
    model.exits = ExitAdapters.untrained(model)
    return model, load_model(ModelSettings(str(like)))


@pytest.mark.parametrize("sampling", [{}, COUPLED], ids=["greedy", "coupled"])
def test_every_mode_gives_the_targets_own_replies(pair, picture, sampling):
    target, draft = pair
    walk = [picture(1), picture(2, 150, 70)]
    replies = []
    with VerifierEngine(target) as engine:
        for values in ({"mode": "ar"}, *MODES):
            settings = DecodeSettings(**values | sampling, max_tokens=16)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                replies.append([session.decode(image, INSTRUCTION).tokens for image in walk])
    assert all(reply == replies[0] for reply in replies)
    assert len(replies[0][0]) > 3 and replies[0][0] != replies[0][1]
