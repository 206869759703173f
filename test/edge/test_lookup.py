# SPDX-License-Identifier: Apache-2.0
"""Drafts that are looked up in prompt and reply: what is found, and that replies stay the target's."""

from __future__ import annotations

import pytest
from tiny_text import make_tiny_text

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings, SettingsError
from dsd_ros.edge.lookup import look_up
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel

ASKED = "Repeat: go left, go right, go left, go right, go left."


@pytest.mark.parametrize(
    ("tokens", "length", "found"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),  # three tokens are the same
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, [9]),  # the longest common end, not the latest place
        ([5, 3, 7, 5, 3, 8, 5, 3], 1, [8]),  # the latest of equals
        ([4, 4, 4], 8, [4]),  # up to the end of what there is
        ([1, 2, 3], 4, []),
        ([1], 4, []),
        ([], 4, []),
        ([1, 1], 0, []),
    ],
)
def test_what_followed_the_same_tokens_is_found(tokens, length, found):
    assert look_up(tokens, length) == found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(ModelSettings(str(make_tiny_text(tmp_path_factory.mktemp("m"), seed=4)), threads=1))


@pytest.mark.parametrize(
    ("alone", "mode", "temperature"), [("preset", "dsd", 0.0), ("coupled", "coupled", 1.0), ("coupled", "coupled", 0.2)]
)
def test_replies_are_the_targets(model, alone, mode, temperature):
    common = {"temperature": temperature, "max_tokens": 48, "seed": 3}
    replies = []
    with VerifierEngine(model) as engine:
        for settings in (
            DecodeSettings(mode="ar", proof=alone, **common),
            DecodeSettings(mode=mode, draft_source="lookup", draft_length=6, **common),
        ):
            with LocalChannel(engine) as channel, EdgeSession(channel, model, settings) as session:
                replies.append([session.decode(None, text) for text in (ASKED, "Say it.", "Go on. Go on.")])
    ar, looked_up = replies
    assert [reply.tokens for reply in looked_up] == [reply.tokens for reply in ar]
    drafted = sum(record.drafted for reply in looked_up for record in reply.records)
    accepted = sum(sum(reply.accepted) for reply in looked_up)
    assert drafted > 0 and accepted <= drafted
    if temperature < 1.0:  # such a model soon repeats itself
        assert accepted > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "fsd"}, {"mode": "auto"}, {"mode": "dsd", "temperature": 1.0}, {"mode": "mc-dsd"},
        {"mode": "dsd", "draft_length": 0}, {"mode": "coupled", "temperature": 1.0, "shape": "budget"},
    ],
)  # fmt: skip
def test_settings_that_look_up_cannot_serve_are_refused(wrong):
    with pytest.raises(SettingsError, match="use mode dsd at temperature 0, or coupled"):
        DecodeSettings(draft_source="lookup", **wrong)
    assert DecodeSettings(mode="ar", draft_source="lookup").looks_up is False
