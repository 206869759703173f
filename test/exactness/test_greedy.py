# SPDX-License-Identifier: Apache-2.0
"""dsd gives exactly the tokens of ar."""

from __future__ import annotations

import pytest

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

INSTRUCTIONS = ("find the silver bottle", "go to the red chair", "stop")


def alone(model, image, instruction, length):
    """What the target itself says, with nothing of the protocol in between."""
    sequence = model.prefill(image, instruction)
    while len(sequence.tokens) < length:
        sequence.append([int(sequence.next_logits().argmax())])
        if sequence.tokens[-1] in model.eos_token_ids:
            break
    return sequence.tokens


@pytest.mark.parametrize("gamma", range(1, 9))
def test_every_draft_length_in_process(target, draft, picture, gamma):
    with VerifierEngine(target) as engine, LocalChannel(engine) as channel:
        settings = DecodeSettings(mode="dsd", draft_length=gamma, max_tokens=24)
        with EdgeSession(channel, draft, settings) as session:
            accepted = 0
            for seed in range(4):
                image, instruction = picture(seed), INSTRUCTIONS[seed % 3]
                reply = session.decode(image, instruction)
                assert reply.tokens == alone(target, image, instruction, 24)
                accepted += sum(reply.accepted)
    assert accepted > 0


@pytest.mark.parametrize("pictures", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_pictures_through_a_websocket(target, target_directory, draft, picture, serving, pictures):
    rejected = accepted = 0
    with (
        serving(str(target_directory)) as url,
        WebsocketChannel(url) as first,
        WebsocketChannel(url) as second,
        EdgeSession(first, draft, DecodeSettings(mode="ar", max_tokens=20)) as ar,
        EdgeSession(second, draft, DecodeSettings(mode="dsd", max_tokens=20)) as dsd,
    ):
        for seed in range(pictures):
            image, instruction = picture(seed), INSTRUCTIONS[seed % 3]
            one, other = ar.decode(image, instruction), dsd.decode(image, instruction)
            assert one.tokens == other.tokens
            assert one.text == other.text
            assert one.finished == other.finished
            if seed < 5:
                assert one.tokens == alone(target, image, instruction, 20)
            accepted += sum(other.accepted)
            rejected += sum(r.drafted - r.accepted for r in other.records)
    # Both cases of the rule were met.
    assert accepted > pictures and rejected > pictures


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8, 13])
def test_the_longest_reply_is_cut_at_the_same_token(target, draft, picture, max_tokens):
    with VerifierEngine(target) as engine:
        tokens = {}
        for mode in ("ar", "dsd"):
            settings = DecodeSettings(mode=mode, max_tokens=max_tokens, draft_length=4)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                tokens[mode] = session.decode(picture(1), "find the can").tokens
    assert tokens["ar"] == tokens["dsd"] == alone(target, picture(1), "find the can", max_tokens)
    assert len(tokens["ar"]) == max_tokens or tokens["ar"][-1] in target.eos_token_ids
