# SPDX-License-Identifier: Apache-2.0
"""What a verifier names is bounded by the robot's own model, and no token outside the vocabulary counts as verified."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Outcome, SessionReply, VerifiedTokens

IMAGE = np.full((2, 2, 3), 1, np.uint8)


class Hostile(LocalChannel):
    """Changes fields of what the verifier sends."""

    def __init__(self, engine, kind: type, **changes) -> None:
        super().__init__(engine)
        self._kind, self._changes = kind, changes

    def receive(self, timeout):
        message = super().receive(timeout)
        return msgspec.structs.replace(message, **self._changes) if isinstance(message, self._kind) else message


@pytest.fixture
def engine():
    with VerifierEngine(TableModel(1, 12, ends=False)) as engine:
        yield engine


def refused(engine, kind: type, settings: DecodeSettings, draft=None, **changes) -> str:
    draft = draft or TableModel(1, 12, ends=False, noise=0.5, padding=2)
    channel = Hostile(engine, kind, **changes)
    with channel, pytest.raises(VerifierRefused) as caught, EdgeSession(channel, draft, settings) as session:
        session.decode(IMAGE, "go")
    return str(caught.value)


@pytest.mark.parametrize("size", [0, 2000, (1 << 32) - 1])
@pytest.mark.parametrize("mode", ["dssd", "stream"])
def test_a_vocabulary_that_is_not_the_robots_is_refused_before_memory_is_taken(engine, size, mode):
    tracemalloc.start()
    sentence = refused(engine, SessionReply, DecodeSettings(mode=mode, temperature=1.0), vocab_size=size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"vocabulary of {size}" in sentence and "share a tokenizer" in sentence
    assert peak < 50e6


@pytest.mark.parametrize("token", [12, (1 << 20) - 1])
@pytest.mark.parametrize("mode", ["dsd", "stream", "fsd"])
def test_a_token_outside_the_vocabulary_is_never_verified(engine, token, mode):
    settings = DecodeSettings(mode=mode)
    if settings.preset.streams:
        assert "does not follow the protocol" in refused(engine, VerifiedTokens, settings, tokens=[token])
        return
    sentence = refused(engine, Outcome, settings, next_token=token)
    assert f"token {token}" in sentence and "12 tokens" in sentence
    assert "accepted 60 of" in refused(engine, Outcome, settings, accepted=60)


@pytest.mark.parametrize("shape", ["sequence", "expansion"])
def test_a_drafted_token_that_the_target_does_not_have_is_never_verified(engine, shape):
    draft = TableModel(3, 14, ends=False)  # drafts ids of its padding
    draft.tokenizer_fingerprint = engine.model.tokenizer_fingerprint
    draft.table[..., 12] += 50.0
    sentence = refused(engine, Outcome, DecodeSettings(mode="dsd", shape=shape), draft, accepted=1)
    assert "token 12" in sentence and "12 tokens" in sentence


def test_padding_of_either_side_is_no_reason_to_refuse(engine):
    for padding in (0, 2, 1000):
        draft = TableModel(1, 12, ends=False, padding=padding)
        with LocalChannel(engine) as channel, EdgeSession(channel, draft, DecodeSettings(max_tokens=6)) as session:
            assert len(session.decode(IMAGE, "go").tokens) == 6
