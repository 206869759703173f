# SPDX-License-Identifier: Apache-2.0
"""Where replies drafted as trees end; their tokens: test_reference.py, test_fsd.py."""

from __future__ import annotations

import numpy as np
import pytest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
DRAFT = TableModel(4, 12, ends=False, noise=0.6, padding=3)


def decode(engine, replies: int = 2, model=DRAFT, **values) -> list[DecodedReply]:
    tree = {"seed": 3, "temperature": 1.0, "shape": "expansion", "tree_expansion": "3,2,1"}
    with LocalChannel(engine) as channel, EdgeSession(channel, model, DecodeSettings(**tree | values)) as session:
        return [session.decode(IMAGE, f"go {n}") for n in range(replies)]


@pytest.mark.parametrize(
    "values", [{"mode": "dsd"}, {"mode": "dssd"}, {"mode": "fsd", "predraft_source": "guesses", "predraft_workers": 2}]
)
def test_replies_end_where_they_should(values):
    """At the target's own end, at max_tokens, or where its context or the draft's is full."""
    target, draft = TableModel(6, 9), TableModel(6, 9, noise=0.5, padding=2)
    short = TableModel(4, 12, ends=False, max_length=30)
    with VerifierEngine(target) as engine, VerifierEngine(short) as full:
        for longest in (1, 2, 5, 24):
            for reply in decode(engine, 4, draft, max_tokens=longest, **values):
                assert reply.finished or len(reply.tokens) == longest
                assert len(reply.tokens) <= longest
                assert target.eos_token_ids.isdisjoint(reply.tokens[:-1])
                assert reply.finished == (reply.tokens[-1] in target.eos_token_ids)
        small = TableModel(4, 12, ends=False, noise=0.6, max_length=20)
        for model in (small, DRAFT):
            for longest in (27, 28):  # the target holds 30, of which the prompt takes two
                (reply,) = decode(full, 1, model, max_tokens=longest, **values)
                assert len(reply.tokens) == longest
