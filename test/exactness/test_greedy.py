# SPDX-License-Identifier: Apache-2.0
"""dsd gives exactly the tokens of the target alone, at every draft length and longest reply."""

from __future__ import annotations

import pytest

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel

INSTRUCTIONS = ("find the silver bottle", "go to the red chair", "stop")


def alone(model, image, instruction, length):
    """What the target itself says, with nothing of the protocol in between."""
    sequence = model.prefill(image, instruction)
    while len(sequence.tokens) < length:
        sequence.append([int(sequence.next_logits().argmax())])
        if sequence.tokens[-1] in model.eos_token_ids:
            break
    return sequence.tokens


def test_every_draft_length(target, draft, picture):
    rejected = accepted = 0
    with VerifierEngine(target) as engine:
        for gamma in range(1, 9):
            settings = DecodeSettings(mode="dsd", draft_length=gamma, max_tokens=24)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                for seed in (gamma, gamma + 1):
                    image, instruction = picture(seed), INSTRUCTIONS[seed % 3]
                    reply = session.decode(image, instruction)
                    assert reply.tokens == alone(target, image, instruction, 24)
                    accepted += sum(reply.accepted)
                    rejected += sum(record.drafted - record.accepted for record in reply.records)
    # Both cases of the rule were met.
    assert accepted > 16 and rejected > 16


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 17, 18])
def test_the_longest_reply_is_cut_at_the_same_token(target, draft, picture, max_tokens):
    wanted = alone(target, picture(1), "find the can", max_tokens)
    with VerifierEngine(target) as engine:
        for mode in ("stream", "ar", "dsd"):
            settings = DecodeSettings(mode=mode, max_tokens=max_tokens, draft_length=4)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                assert session.decode(picture(1), "find the can").tokens == wanted
    assert len(wanted) == max_tokens or wanted[-1] in target.eos_token_ids
