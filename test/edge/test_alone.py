# SPDX-License-Identifier: Apache-2.0
"""Unverified replies, and how long the robot waits before it accepts one."""

from __future__ import annotations

import time

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.client import DecodeCancelled, LinkSilent

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12), TableModel(4, 12, noise=0.6)


class Silent(LocalChannel):
    """A link that can stop to carry anything, without breaking; messages up to the nth are carried."""

    carries = 1 << 30

    def send(self, message):
        self.carries -= 1
        if self.carries >= 0:
            super().send(message)


@pytest.fixture
def channel():
    with VerifierEngine(TARGET) as engine, Silent(engine) as channel:
        yield channel


def alone(channel, **settings):
    chosen = DecodeSettings(max_tokens=20, seed=5, **settings)
    with EdgeSession(channel, DRAFT, chosen) as session:
        return session.decode_alone(IMAGE, "go"), session


def test_a_greedy_one_is_the_drafts_own_greedy_reply(channel):
    reply, _ = alone(channel)
    sequence = DRAFT.prefill(IMAGE, "go")
    expected = []
    while len(expected) < 20 and not (expected and expected[-1] in DRAFT.eos_token_ids):
        expected.append(int(sequence.next_logits().argmax()))
        sequence.append(expected[-1:])
    assert reply.tokens == expected
    assert not reply.verified and reply.records == [] and reply.tau > 0
    assert reply.finished == (expected[-1] in DRAFT.eos_token_ids)
    assert reply.bytes_up == reply.bytes_down == 0
    assert reply.summary() and reply.as_json()["verified"] is False


def test_a_coupled_one_draws_with_the_noise_of_the_target(channel):
    reply, session = alone(channel, mode="coupled", temperature=1.0)
    sequence = DRAFT.prefill(IMAGE, "go")
    for position, token in enumerate(reply.tokens):
        q = transform(sequence.next_logits(), session.settings.sampling)
        assert token == choose(q, gumbel(5, 0, position, len(q)))
        sequence.append([token])


def test_there_is_none_without_a_draft_model(channel):
    session = EdgeSession(channel, None, DecodeSettings(mode="ar"))
    assert not session.can_decode_alone
    with pytest.raises(ValueError, match="mode ar has no draft model"):
        session.decode_alone(IMAGE, "go")


def test_it_can_be_cancelled_and_ends_with_the_context(channel):
    session = EdgeSession(channel, DRAFT, DecodeSettings(mode="dsd"))
    with pytest.raises(DecodeCancelled):
        session.decode_alone(IMAGE, "go", cancelled=lambda: True)
    short = TableModel(4, 12, noise=0.6, ends=False, max_length=10)
    session = EdgeSession(channel, short, DecodeSettings(mode="dsd"))
    reply = session.decode_alone(IMAGE, "go")
    assert not reply.finished and 5 < len(reply.tokens) <= 10


@pytest.mark.parametrize("carries", [1, 3])
def test_patience_ends_a_decode_whose_verifier_falls_silent(channel, carries):
    """... and only then: a slow reply that keeps coming is waited for. Afterwards the session goes on."""
    settings = DecodeSettings(mode="dsd", max_tokens=20, seed=5)
    with EdgeSession(channel, DRAFT, settings, LinkSettings(response_timeout_s=60)) as session:
        expected = session.decode(IMAGE, "go", patience=30.0).tokens
        channel.carries = carries
        began = time.monotonic()
        with pytest.raises(LinkSilent, match=r"0\.2 s"):
            session.decode(IMAGE, "go", patience=0.2)
        assert time.monotonic() - began < 20
        channel.carries = 1 << 30
        assert session.decode(IMAGE, "go").tokens == expected


def test_reconnecting_finds_out_whether_the_link_works(channel):
    class Down(LocalChannel):
        down = False

        def reconnect(self):
            if self.down:
                raise LinkClosed("there is no network")
            super().reconnect()

    with VerifierEngine(TARGET) as engine, Down(engine) as down, EdgeSession(down, DRAFT, DecodeSettings()) as session:
        before = session.decode(IMAGE, "go").tokens
        down.down = True
        with pytest.raises(LinkClosed, match="no network"):
            session.reconnect()
        down.down = False
        session.reconnect()
        assert engine.sessions == 1  # it was resumed
        engine._sessions.clear()
        session.reconnect()
        assert engine.sessions == 1  # and opened again
        assert session.decode(IMAGE, "go").tokens == before
