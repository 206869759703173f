# SPDX-License-Identifier: Apache-2.0
"""A verifier that restarts at any message: the reply continues, and no token is repeated or changed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as profile, strategies as st
from restarting_channel import EVENTS, RestartingChannel
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Message, Observation, Outcome, VerifiedTokens

IMAGE = np.full((2, 2, 3), 5, np.uint8)
PATIENT = LinkSettings(response_timeout_s=0.1, attempts=60)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)
AHEAD = {"pipeline_depth": 3, "predraft_workers": 2}
DECODES = {
    "stream": {"mode": "stream"},
    "dsd": {"mode": "dsd"},
    "split trees": {"mode": "dssd", "shape": "expansion", "tree_expansion": "2,2"},
    "fsd": {"mode": "fsd"} | AHEAD,
}


def decoded(channel: RestartingChannel, name: str, max_tokens: int = 14) -> list[int]:
    """The reply, whose progress never shrank and reported each token once."""
    chosen = DecodeSettings(**{"temperature": 1.0, "seed": 3, "max_tokens": max_tokens} | DECODES[name])
    told: list[int] = []

    def on_progress(text, count, record):
        told.extend(record.gained)
        assert count == len(told)

    with channel, EdgeSession(channel, DRAFT, chosen, PATIENT) as session:
        reply = session.decode(IMAGE, "go", on_progress)
    assert told == reply.tokens
    assert reply.verified
    return reply.tokens


@functools.cache
def undisturbed(name: str) -> list[int]:
    return decoded(RestartingChannel(TARGET, lambda boundary, message: ""), name)


@given(
    name=st.sampled_from(list(DECODES)), events=st.dictionaries(st.integers(0, 60), st.sampled_from(EVENTS), max_size=8)
)
@profile(max_examples=30, suppress_health_check=list(HealthCheck))
def test_restarts_cuts_and_doubles_at_any_message_leave_the_reply_as_it_is(name, events):
    channel = RestartingChannel(TARGET, lambda boundary, message: events.get(boundary, ""))
    assert decoded(channel, name) == undisturbed(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stream", "dsd", "fsd"])
def test_a_restart_at_every_single_message_leaves_the_reply_as_it_is(name):
    for at in range(60):
        event = ("restart", "restart and cut")[at % 2]
        channel = RestartingChannel(TARGET, lambda boundary, message, at=at, event=event: event * (boundary == at))
        assert decoded(channel, name) == undisturbed(name), at
        if not channel.restarts:
            break


class Replaced(LocalChannel):
    """Comes back with another target, once: when the observation leaves, or when the first tokens have come."""

    def __init__(self, begun: bool) -> None:
        self._due, self._begun = True, begun
        super().__init__(VerifierEngine(TARGET))

    def send(self, message: Message) -> None:
        if isinstance(message, Observation) and not self._begun:
            self._replace()
        super().send(message)

    def receive(self, timeout: float) -> Message:
        message = super().receive(timeout)
        if isinstance(message, (VerifiedTokens, Outcome)) and self._begun:
            self._replace()
        return message

    def close(self) -> None:
        super().close()
        self._engine.close(20)

    def _replace(self) -> None:
        if self._due:
            self._due = False
            assert self._engine.close(20)
            self._engine = VerifierEngine(TableModel(9, 12, ends=False))
            self.reconnect()  # what was on its way is lost


@pytest.mark.parametrize("mode", ["stream", "dsd"])
def test_a_reply_goes_on_with_its_own_target_alone(mode):
    chosen = DecodeSettings(mode=mode, seed=3, max_tokens=60)
    with Replaced(begun=True) as channel, EdgeSession(channel, DRAFT, chosen, PATIENT) as session:
        with pytest.raises(VerifierRefused, match=r"table-9, which cannot go on .* table-4"):
            session.decode(IMAGE, "go")
        of_another = session.decode(IMAGE, "go").tokens
    # As long as nothing is verified, the reply is simply the new target's.
    with Replaced(begun=False) as channel, EdgeSession(channel, DRAFT, chosen, PATIENT) as session:
        assert session.decode(IMAGE, "go").tokens == of_another
