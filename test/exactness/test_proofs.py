# SPDX-License-Identifier: Apache-2.0
"""What each proof sends: its number of bytes, and nothing that is not needed. Its tokens: test_reference.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Draft, Outcome

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
PROOFS = ("coupled", "split", "truncated")


def over(channel, replies: int = 2, model=DRAFT, link=None, **values) -> list[DecodedReply]:
    chosen = DecodeSettings(**({"mode": "dsd", "temperature": 1.0, "seed": 3, "max_tokens": 40} | values))
    with EdgeSession(channel, model, chosen, link) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


def tokens_of(replies: list[DecodedReply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("proof", PROOFS)
def test_greedy_every_proof_sends_ids_alone_and_says_what_the_target_says(proof):
    with VerifierEngine(TARGET) as engine:
        with LocalChannel(engine) as channel:
            wanted = tokens_of(over(channel, mode="ar", temperature=0.0))
        for mode in ("dsd", "fsd"):
            with Watched(engine) as channel:
                replies = over(channel, mode=mode, proof=proof, temperature=0.0)
            assert tokens_of(replies) == wanted
            for draft in channel.drafts:
                assert not (draft.evidence or draft.resampled)


class Watched(LocalChannel):
    """Keeps the drafts that went up."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.drafts: list[Draft] = []

    def send(self, message):
        if isinstance(message, Draft):
            self.drafts.append(message)
        super().send(message)


def packed(number: int) -> int:
    """Bytes that MessagePack takes for a number."""
    return 1 + sum(number >= bound for bound in (128, 256)) + 2 * (number >= 1 << 16)


def varints(ids: list[int]) -> int:
    """Bytes of ids, seven bits in each."""
    return sum(1 + (token >= 1 << 7) + (token >= 1 << 14) for token in ids)


def overhead(draft: Draft) -> int:
    """Bytes of a draft that are not about its tokens: kind, session, three numbers and a length."""
    return 2 + 5 + sum(map(packed, (draft.reply, draft.round, draft.confirmed))) + 2


def test_coupled_sends_nothing_but_ids():
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        (reply,) = over(channel, 1, mode="coupled", max_tokens=96)
    for draft in channel.drafts:
        assert len(encode(draft)) == overhead(draft) + varints(draft.tokens) <= 24
    assert sum(map(overhead, channel.drafts)) <= 12 * reply.rounds


@pytest.mark.parametrize("top_k", [0, 5])
def test_split_sends_a_number_a_token_and_gets_a_row_where_one_is_rejected(top_k):
    class Both(Watched):
        def receive(self, timeout):
            message = super().receive(timeout)
            if isinstance(message, Outcome):
                outcomes.append(message)
            return message

    outcomes: list[Outcome] = []
    with VerifierEngine(TARGET) as engine, Both(engine) as channel:
        (reply,) = over(channel, 1, mode="dssd", max_tokens=96, top_k=top_k)
    for draft in channel.drafts:
        # No distributions, and 12 bits each; after a rejection nothing for parents.
        told = 3 + varints(draft.resampled) if draft.resampled else 0
        brought = 2 + -(-3 * len(draft.tokens) // 2)
        assert len(encode(draft)) <= overhead(draft) + varints(draft.tokens) + brought + told
    assert sum(bool(draft.resampled) for draft in channel.drafts) > 0
    row = 5 + (5 * 4 + 7) // 8 + 4 * 5 if top_k else 1 + 4 * 12
    for outcome in outcomes:
        rejected = outcome.accepted < len(channel.drafts[outcome.round - 1].tokens)
        assert len(outcome.distribution) == (row if rejected else 0)
    assert reply.bytes_up < 96 * (12 + 2 * 4)


def test_truncated_sends_half_floats_and_packed_ids():
    with VerifierEngine(TARGET) as engine, Watched(engine) as channel:
        (reply,) = over(channel, 1, mode="tslt", max_tokens=96, top_k_proof=3)
    for draft in channel.drafts:
        gamma = len(draft.tokens)
        # A count, 3 ids of 4 bits for a vocabulary of 15, 3 float16.
        assert len(draft.evidence) == (1 + gamma * (2 + 2 + 6) if gamma else 0)
        ids = varints(draft.tokens)
        assert len(encode(draft)) <= overhead(draft) + ids + len(draft.evidence) + 2
    assert sum(reply.accepted) > 0


def test_a_draft_that_no_message_could_hold_is_refused_at_once():
    wide = TableModel(4, 12, padding=200_000)
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as channel:
        chosen = DecodeSettings(temperature=1.0, draft_length=64, mode="dsd")
        with pytest.raises(ValueError, match="draft_length 64 is too long.* use 52 or less"):
            EdgeSession(channel, wide, chosen)
        EdgeSession(channel, wide, replace(chosen, draft_length=52))
        EdgeSession(channel, wide, replace(chosen, proof="coupled"))
