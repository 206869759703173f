# SPDX-License-Identifier: Apache-2.0
"""Token trees through real sessions: greedy and coupled replies, what is drafted ahead, and where replies end."""

from __future__ import annotations

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Draft

IMAGE = np.full((2, 2, 3), 5, np.uint8)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
EXPANSION = {"shape": "expansion", "tree_expansion": "3,2,1"}
BUDGET = {"shape": "budget", "tree_budget": 12, "draft_length": 5}
AHEAD = (
    {"mode": "fsd"},
    {"mode": "fsd", "pipeline_depth": 3, "predraft_workers": 64},
    {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 2},
)


class Watched(LocalChannel):
    """Keeps the drafts that went up."""

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.drafts: list[Draft] = []

    def send(self, message):
        if isinstance(message, Draft):
            self.drafts.append(message)
        super().send(message)


def decode(engine, replies: int = 2, model=DRAFT, **values) -> list[DecodedReply]:
    return watched(engine, replies, model, **values)[0]


def watched(engine, replies: int = 2, model=DRAFT, **values) -> tuple[list[DecodedReply], list[Draft]]:
    chosen = DecodeSettings(**({"seed": 3, "max_tokens": 40, "mode": "dsd"} | values))
    with Watched(engine) as channel, EdgeSession(channel, model, chosen) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)], channel.drafts


def tokens_of(replies: list[DecodedReply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


def some_used(engine, replies: list[DecodedReply], **values) -> bool:
    """Whether a pre-draft came true in these, or in others like them: on a busy machine it may come too late."""
    for _ in range(20):
        if sum(reply.predrafts_used for reply in replies) > 0:
            return True
        replies = decode(engine, **values)
    return False


@pytest.mark.parametrize("shape", [EXPANSION, BUDGET], ids=lambda shape: shape["shape"])
@pytest.mark.parametrize("sampling", [{}, {"proof": "coupled", "temperature": 0.8, "top_k": 6}])
def test_replies_are_the_targets(shape, sampling):
    with VerifierEngine(TARGET) as engine:
        wanted = tokens_of(decode(engine, mode="ar", **sampling))
        plain = decode(engine, **sampling)
        for values in ({}, *AHEAD):
            replies, drafts = watched(engine, **shape, **sampling, **values)
            assert tokens_of(replies) == wanted, values
            assert not any(reply.worker_error for reply in replies)
            assert any(draft.parents for draft in drafts)
            for draft in drafts:
                assert not (draft.evidence or draft.resampled)
                assert len(draft.parents) in (0, len(draft.tokens))
            assert sum(reply.rounds for reply in replies) < sum(reply.rounds for reply in plain)
            if values:
                assert some_used(engine, replies, **shape, **sampling, **values)


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, AHEAD[2] | {"temperature": 1.0}])
@pytest.mark.parametrize("proof", ["full", "split"])
def test_replies_end_where_they_should(proof, values):
    """At the target's own end, at max_tokens, or where its context or the draft's is full."""
    target, draft = TableModel(6, 9), TableModel(6, 9, noise=0.5, padding=2)
    short = TableModel(4, 12, ends=False, max_length=30)
    with VerifierEngine(target) as engine, VerifierEngine(short) as full:
        for longest in (1, 2, 3, 5, 24):
            replies = decode(engine, 4, draft, proof=proof, max_tokens=longest, **EXPANSION, **values)
            for reply in replies:
                assert reply.finished or len(reply.tokens) == longest
                assert len(reply.tokens) <= longest
                assert target.eos_token_ids.isdisjoint(reply.tokens[:-1])
                assert reply.finished == (reply.tokens[-1] in target.eos_token_ids)
        small = TableModel(4, 12, ends=False, noise=0.6, max_length=20)
        for model in (small, DRAFT):
            for longest in (27, 28):  # the target holds 30, of which the prompt takes two
                (reply,) = decode(full, 1, model, proof=proof, max_tokens=longest, **EXPANSION, **values)
                assert len(reply.tokens) == longest
