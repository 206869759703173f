# SPDX-License-Identifier: Apache-2.0
"""Queues in other orders than the product's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings as profile, strategies as st
from table_model import TableModel

from dsd_lab.bench.queues import CLIENT, SERVER, FifoOutbox, queues_of
from dsd_lab.links.emulation import EmulatedChannel, LinkProfile
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.ahead import Ahead
from dsd_ros.edge.outcomes import OutcomeQueue
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Outcome

ROUND = SimpleNamespace(number=1, can_follow=lambda *_: True, tokens_of=lambda *outcome: outcome)
named = st.tuples(st.integers(0, 4), st.integers(0, 10), st.floats(0.01, 1.0))


@given(st.lists(named, max_size=40), st.sampled_from(list(CLIENT)), st.integers(1, 10))
@profile(max_examples=60)
def test_each_outcome_comes_out_once_in_the_order_of_the_policy(items, policy, budget):
    queue = CLIENT[policy](ROUND, budget, paper=False)
    for accepted, token, score in items:
        queue.name(accepted, token, "guess", score)
    came = []
    while (predraft := queue.pop()) is not None:
        came.append(predraft)
        if len(came) % 3:
            queue.put_back(predraft)
    assert queue.begun == min(budget, len({(a, t) for a, t, _ in items})) and len(came) <= 3 * budget
    if policy == "fifo":
        assert [p.order for p in came] == sorted(p.order for p in came)


@pytest.mark.parametrize("server", SERVER)
@pytest.mark.parametrize("client", CLIENT)
def test_the_tokens_are_the_same_in_any_order(client, server):
    target, draft = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6)
    replies = []
    for mode, own in (("dsd", {}), ("fsd", {"client_queue": client, "server_queue": server})):
        chosen = DecodeSettings(mode=mode, max_tokens=30, predraft_source="guesses")
        with (
            queues_of(own), VerifierEngine(target) as engine,
            EmulatedChannel(LocalChannel(engine), LinkProfile()) as channel,
            EdgeSession(channel, draft, chosen) as session,
        ):  # fmt: skip
            replies.append(session.decode(np.full((2, 2, 3), 5, np.uint8), "go").tokens)
    assert replies[0] == replies[1] and Ahead.queue is OutcomeQueue


def test_early_outcomes_leave_in_the_order_they_came():
    box = FifoOutbox()
    for layer, confidence in ((1, 0.2), (2, 0.9), (3, 0.5)):
        box.put(Outcome(1, 1, 1, accepted=0, next_token=3, layer=layer, confidence=confidence, is_final=False))
    assert [box.get_nowait().layer for _ in range(3)] == [1, 2, 3] and box.get_nowait() is None
