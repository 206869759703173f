# SPDX-License-Identifier: Apache-2.0
"""The shipped pair on rendered pictures: the modes agree for trained models too."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsd_lab.pair.scenes import held_out_scenes
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

MODELS = Path(__file__).parents[2] / "models"
TREES = {"mode": "fsd", "proof": "coupled", "shape": "budget", "draft_length": 6}


def replies(engine, draft, scenes, **values) -> list[list[int]]:
    with LocalChannel(engine) as channel, EdgeSession(channel, draft, DecodeSettings(seed=4, **values)) as session:
        return [session.decode(image, text).tokens for image, text in scenes]


@pytest.mark.slow
def test_every_mode_says_what_the_shipped_target_says():
    draft = load_model(ModelSettings(str(MODELS / "draft")))
    images, labels = held_out_scenes(60)
    scenes = [(i, f"find the {f.replies[0][0]}") for i, f in zip(images, labels, strict=True)]
    with VerifierEngine(load_model(ModelSettings(str(MODELS / "target")))) as engine:
        alone = replies(engine, draft, scenes, mode="ar")
        assert replies(engine, draft, scenes, mode="dsd", draft_length=6) == alone
        for values in ({}, {"predraft_source": "exits"}, {"pipeline_depth": 3}):
            assert replies(engine, draft, scenes, mode="fsd", **values) == alone, values
        for values in ({"mode": "mc-dsd"}, {"mode": "coupled"}, TREES, TREES | {"tree_budget": 16, "draft_length": 8}):
            assert replies(engine, draft, scenes, **values) == alone, values
        noisy = replies(engine, draft, scenes, mode="ar", proof="coupled", temperature=1.0)
        assert replies(engine, draft, scenes, temperature=1.0, **TREES) == noisy != alone
        assert replies(engine, draft, scenes, mode="coupled", temperature=1.0) == noisy
        sampled = replies(engine, draft, scenes, mode="dsd", temperature=1.0)
        assert sampled != alone
        assert replies(engine, draft, scenes, mode="fsd", temperature=1.0) == sampled
