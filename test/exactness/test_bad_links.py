# SPDX-License-Identifier: Apache-2.0
"""The reply is the same whatever a link does to the messages."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as profile, strategies as st
from lossy_channel import LossyChannel
from stepped import Unhurried
from table_model import TableModel

from dsd_lab.links.proxy import LinkProxy
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import EngineSettings, VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.messages import Outcome, VerifiedTokens
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
DECODES = {
    "stream": {"mode": "stream"},
    "dsd": {"mode": "dsd"},
    "split": {"mode": "dssd"},  # the robot draws what follows a rejection
    "fsd": {"mode": "fsd", "pipeline_depth": 3, "predraft_workers": 2},
}
PATIENT = LinkSettings(response_timeout_s=0.05, attempts=60)
TARGET, DRAFT = TableModel(4, 12, ends=False), TableModel(4, 12, ends=False, noise=0.6, padding=3)


def decode(channel, name: str, replies: int = 2) -> list[list[int]]:
    chosen = DecodeSettings(**{"temperature": 1.0, "seed": 3, "max_tokens": 24} | DECODES[name])
    session = EdgeSession(channel, DRAFT, chosen, PATIENT)
    tokens = [session.decode(IMAGE, f"go {n}").tokens for n in range(replies)]
    session.close()
    return tokens


@pytest.fixture(scope="module")
def undisturbed():
    with VerifierEngine(TARGET) as engine:
        replies = {}
        for name in DECODES:
            with LocalChannel(engine) as channel:
                replies[name] = decode(channel, name)
        return replies


@given(
    seed=st.integers(0, 1 << 20),
    name=st.sampled_from(list(DECODES)),
    loss=st.floats(0, 0.15),
    doubled=st.floats(0, 0.3),
    delayed=st.floats(0, 0.2),
    cut=st.floats(0, 0.04),
)
@profile(max_examples=30, suppress_health_check=list(HealthCheck))
def test_any_misfortune_leaves_the_reply_as_it_is(undisturbed, seed, name, loss, doubled, delayed, cut):
    with VerifierEngine(TARGET) as engine, LocalChannel(engine) as inner:
        channel = LossyChannel(inner, seed, loss, doubled, delayed, cut)
        assert decode(channel, name) == undisturbed[name]
        assert engine.sessions <= EngineSettings().max_sessions


class Cutting(WebsocketChannel):
    """Cuts its own TCP connection in the middle of a reply, once, after ``after`` outcomes."""

    def __init__(self, url: str, after: int) -> None:
        super().__init__(url)
        self.left = after
        self.cuts = 0

    def receive(self, timeout):
        message = super().receive(timeout)
        if isinstance(message, Outcome | VerifiedTokens) and self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.cuts += 1
                self._connection.socket.shutdown(socket.SHUT_RDWR)
        return message


@pytest.mark.parametrize(("mode", "late"), [("stream", 2), ("dsd", 4)])
def test_a_cut_connection_is_resumed_where_it_stood(mode, late, serving):
    replies = {}
    with serving("table:4:0") as url:
        for after in (0, 1, late):
            chosen = DecodeSettings(mode=mode, temperature=1.0, seed=3, max_tokens=24)
            draft = TableModel(4, ends=False, noise=0.6)
            with Cutting(url, after) as channel, EdgeSession(channel, draft, chosen) as session:
                before = session._link.session
                replies[after] = session.decode(IMAGE, "go").tokens
                assert channel.cuts == (after > 0)
                assert session._link.session == before
    assert replies[0] == replies[1] == replies[late]


def test_a_pulled_cable_changes_no_token(undisturbed):
    """For a second of the reply nothing passes, either way, and no end is told."""
    with (
        VerifierEngine(Unhurried(TARGET)) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        LinkProxy(("127.0.0.1", int(server.url.rpartition(":")[2]))) as proxy,
        WebsocketChannel(proxy.url, connect_timeout=0.3, keepalive_s=0.3) as channel,
    ):
        pulled: list[int] = []

        def pull(*_: object) -> None:
            if not pulled:
                pulled.append(1)
                proxy.silence()
                threading.Timer(1.0, proxy.restore).start()

        chosen = DecodeSettings(mode="stream", temperature=1.0, seed=3, max_tokens=24)
        with EdgeSession(channel, DRAFT, chosen, LinkSettings(response_timeout_s=0.3, attempts=60)) as session:
            assert session.decode(IMAGE, "go 0", pull).tokens == undisturbed["stream"][0]
    assert pulled


def test_an_expired_session_is_replaced_by_a_new_one():
    now = [0.0]
    settings = EngineSettings(session_expiry_s=5)
    chosen = DecodeSettings(max_tokens=8)
    with (
        VerifierEngine(TARGET, settings, clock=lambda: now[0]) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, DRAFT, chosen) as session,
    ):
        first = session.decode(IMAGE, "go").tokens
        now[0] += 1000
        deadline = time.monotonic() + 20
        while engine.sessions:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert session.decode(IMAGE, "go").tokens == first


def test_a_link_that_stays_down_is_given_up_and_comes_back():
    class Down(LocalChannel):
        down = False

        def reconnect(self):
            if self.down:
                raise LinkClosed("there is no network")
            super().reconnect()

        def send(self, message):
            if self.down:
                raise LinkClosed("there is no network")
            super().send(message)

    quick = LinkSettings(response_timeout_s=0.05, attempts=2)
    with VerifierEngine(TARGET) as engine, Down(engine) as channel:
        session = EdgeSession(channel, DRAFT, DecodeSettings(max_tokens=8), quick)
        first = session.decode(IMAGE, "go").tokens
        channel.down = True
        with pytest.raises(LinkClosed, match="no network"):
            session.decode(IMAGE, "go")
        channel.down = False
        assert session.decode(IMAGE, "go").tokens == first
