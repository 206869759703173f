# SPDX-License-Identifier: Apache-2.0
"""Each robot has a name and a token of its own: the file, who is let in, how it changes, what is shown."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from table_model import TableModel
from websockets.sync.client import connect

import dsd_ros.cloud.server as server_module
from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings, VerifierSettingsError
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.logs import JsonFormatter
from dsd_ros.wire.authentication import AuthenticatedChannel
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkRefused, LinkTimeout, LocalChannel
from dsd_ros.wire.messages import Draft, Refusal, RefusalCode
from dsd_ros.wire.turns import RobotLink
from dsd_ros.wire.websocket import WebsocketChannel

MODEL = TableModel(1, ends=False)
IMAGE = np.full((2, 2, 3), 1, np.uint8)
TWO = """
# a comment
go2-01: 0123456789012345e10
go2-02: {token: [new-02, old-02], sessions: 1, connections: 2}
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(TWO)
    return path


@pytest.fixture
def engine():
    with VerifierEngine(MODEL) as engine:
        yield engine


def robot(url: str, token: str) -> AuthenticatedChannel:
    return AuthenticatedChannel(WebsocketChannel(url, token=token), token, others=False)


def session(channel) -> EdgeSession:
    return EdgeSession(channel, MODEL, DecodeSettings(mode="dsd", max_tokens=12), LinkSettings(attempts=1))


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    other.rename(path)


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("", 0, "names no robot; write a line 'NAME: TOKEN'"),
        ("- go2\n", 0, "names no robot"),
        ("go2: a\n  b: c: d\n", 2, "is no YAML"),
        ("go2: abc\n\n'go 2': abd\n", 3, "'go 2' is no name; use letters"),
        ("go2: abc\ngo3: abc\n", 2, "the token of go3 stands here a second time"),
        ("go2: abc\ngo2: abd\n", 2, "go2 stands here a second time"),
        ("go2: two words\n", 1, "the token of go2 cannot be used; write one line of printable ASCII"),
        ("go2:\n", 1, "the token of go2 cannot be used"),
        ("go2: {sessions: 2}\n", 1, "go2 has no token; add"),
        ("go2:\n  token: abc\n  session: 2\n", 3, "'session' is unknown or repeated; use token, sessions"),
        ("go2:\n  token: abc\n  sessions: 2\n  sessions: 3\n", 4, "'sessions' is unknown or repeated"),
        ("go2:\n  token: abc\n  sessions: 0\n", 3, "sessions is '0'; use 1 to 100000"),
        ("go2:\n  token: abc\n  sessions: -1\n", 3, "sessions is '-1'; use 1"),
        ("go2:\n  token: abc\n  connections: many\n", 3, "connections is 'many'; use 1"),
        ("go2:\n  token: abc\n  connections: 99999999999999\n", 3, "connections is '99999999999999'; use 1"),
        ("go2:\n  token: []\n", 2, "go2 has 0 tokens; give it 1 to 4"),
        ("go2:\n  token: [a, b, c, d, e]\n", 2, "go2 has 5 tokens"),
        ("go2:\n  token: {a: b}\n", 2, "the token of go2 must be one word"),
        ("[go2]: abc\n", 1, "a robot's name must be one word"),
        ("go2: abc\n---\ngo3: abd\n", 2, "is no YAML"),
        ("go2: a\x07c\n", 0, "is no YAML: it holds a control character"),
        (b"go2: \xff\n", 0, "is no UTF-8 text"),
    ],
)
def test_an_error_in_the_file_is_a_sentence_with_its_line(tmp_path, text, line, sentence):
    path = tmp_path / "tokens.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        Tokens.of("", str(path))
    said = str(caught.value)
    assert sentence in said and str(path) in said and "\n" not in said
    assert not line or f"line {line}" in said


def test_a_file_is_needed_and_only_one(tmp_path, file):
    with pytest.raises(ValueError, match="tokens file .*none cannot be read: No such file"):
        Tokens.of("", str(tmp_path / "none"))
    with pytest.raises(VerifierSettingsError, match="token_file and tokens_file are both set"):
        VerifierSettings(token_file=str(file), tokens_file=str(file))
    assert VerifierSettings(host="0.0.0.0", tokens_file=str(file)).tokens_file == str(file)


def test_a_token_never_becomes_a_number(file):
    assert Tokens.of("", str(file)).shown_by("Bearer 0123456789012345e10").name == "go2-01"


def test_each_robot_has_its_token_its_limits_and_its_name(engine, file, caplog):
    caplog.set_level(logging.INFO, "dsd_ros")
    settings = VerifierSettings(port=0, tokens_file=str(file), connections_per_address=1, sessions_per_address=1)
    with VerifierServer(engine, settings) as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(robot(server.url, "0123456789012345e10"))
        second = stack.enter_context(robot(server.url, "old-02"))  # the one before is taken until it leaves the file
        held = [stack.enter_context(session(channel)) for channel in (first, second)]
        assert [len(one.decode(IMAGE, "go").tokens) for one in held] == [12] * 2
        # Both have one address here, of which one connection and one session are allowed without names.
        third = stack.enter_context(robot(server.url, "new-02"))
        with pytest.raises(VerifierRefused, match="go2-02 already holds its 1 sessions.*'sessions'.*tokens file"):
            session(third).open()
        with robot(server.url, "new-02") as fourth, pytest.raises(LinkClosed, match="go2-02 already has its 2 conn"):
            session(fourth).open()
        with robot(server.url, "newer") as other, pytest.raises(LinkRefused, match="refused the token"):
            session(other).open()
        figure = engine.metrics.registry.get_sample_value
        assert figure("dsd_verifier_robot_sessions", {"robot": "go2-02"}) == 1
        assert figure("dsd_verifier_robot_rounds_total", {"robot": "go2-01"}) > 0
        assert figure("dsd_verifier_robot_refusals_total", {"robot": "go2-02"}) == 2
        assert figure("dsd_verifier_sessions_over_limit_total", {"reason": "robot"}) == 1
        assert figure("dsd_verifier_connections_refused_total", {"reason": "robot"}) == 1
        held.pop().close()
    deadline = time.monotonic() + 20
    while figure("dsd_verifier_robot_sessions", {"robot": "go2-02"}) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert figure("dsd_verifier_robot_sessions", {"robot": "go2-02"}) == 0
    mine = [record for record in caplog.records if record.name.startswith("dsd_ros.cloud.metrics")]
    lines = [json.loads(JsonFormatter().format(record)) for record in mine]
    for event in ("session opened", "observation read", "a session is over its limit", "a connection is refused"):
        assert {line.get("robot") for line in lines if event in line["message"]} <= {"go2-01", "go2-02"}
        assert any("robot" in line for line in lines if event in line["message"]), event
    assert not any("02" in line["message"] for line in lines)  # no token in a line


def test_robots_do_not_read_each_others_figures(engine, file):
    with VerifierServer(engine, VerifierSettings(port=0, tokens_file=str(file))) as server:
        request = urllib.request.Request(f"http{server.url[2:]}/metrics", headers={"Authorization": "Bearer new-02"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)


def test_a_robot_may_not_go_on_in_the_session_of_another(engine, file):
    with VerifierServer(engine, VerifierSettings(port=0, tokens_file=str(file))) as server:
        with robot(server.url, "0123456789012345e10") as channel, session(channel) as held:
            number = held._link.session
            with connect(server.url, additional_headers={"Authorization": "Bearer new-02"}, proxy=None) as other:
                from dsd_ros.wire.codec import decode, encode

                other.send(encode(Draft(number, 1, 1, 0, [], tag=bytes(20))))
                with pytest.raises(TimeoutError):
                    decode(other.recv(timeout=0.3))
            assert len(held.decode(IMAGE, "go").tokens) == 12
            dropped = "dsd_verifier_messages_dropped_total", {"reason": "forged"}
            deadline = time.monotonic() + 60
            while not engine.metrics.registry.get_sample_value(*dropped) and time.monotonic() < deadline:
                time.sleep(0.01)
        assert engine.metrics.registry.get_sample_value(*dropped) == 1


@pytest.mark.parametrize("how", ["seen", "asked"])
def test_tokens_change_without_a_restart(engine, file, how, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "dsd_ros")
    monkeypatch.setattr(server_module, "RELOAD_POLL_S", 0.05 if how == "seen" else 1e6)

    def changes(text: str, line: str) -> None:
        caplog.clear()
        replace(file, text)
        if how == "asked":
            server.reload()
        deadline = time.monotonic() + 20
        while line not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        assert line in caplog.text

    with VerifierServer(engine, VerifierSettings(port=0, tokens_file=str(file))) as server:
        with robot(server.url, "0123456789012345e10") as stays, robot(server.url, "old-02") as leaves:
            held, gone = session(stays), session(leaves)
            assert held.decode(IMAGE, "go").tokens == gone.decode(IMAGE, "go").tokens
            changes("go2-01: [", "those before stay in use")
            assert len(gone.decode(IMAGE, "go").tokens) == 12
            changes("go2-01: 0123456789012345e10\ngo2-02: new-02\n", "have changed and are in use")
            with pytest.raises(LinkClosed, match="its token is no longer taken"):
                for _ in range(200):
                    leaves.receive(0.1)
            with pytest.raises((LinkRefused, LinkClosed)):
                gone.decode(IMAGE, "go")
            assert len(held.decode(IMAGE, "go").tokens) == 12  # over the link that it has
        with robot(server.url, "new-02") as channel, session(channel) as again:
            assert len(again.decode(IMAGE, "go").tokens) == 12


def test_a_token_that_all_share_changes_too(engine, tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    with VerifierServer(engine, VerifierSettings(port=0, token_file=str(path))) as server:
        replace(path, "second\n")
        server.reload()
        deadline = time.monotonic() + 20
        while True:
            try:
                with robot(server.url, "second") as channel, session(channel) as held:
                    assert len(held.decode(IMAGE, "go").tokens) == 12
                break
            except LinkRefused:
                assert time.monotonic() < deadline


class Topic:
    """Robots on one topic: the verifier sees one peer for all of them."""

    def __init__(self, engine: VerifierEngine, tokens: Tokens) -> None:
        self.peers = []
        self._engine, self.metrics = engine, engine.metrics
        self.guard = Authenticator(self, tokens, 64)

    def submit(self, message, reply, peer) -> bool:
        self.peers.append(peer)
        return self._engine.submit(message, reply, peer)

    def disconnect(self, peer) -> None:
        self._engine.disconnect(peer)

    def channel(self, token: str) -> AuthenticatedChannel:
        topic = self.guard

        class OnTopic:
            def submit(self, message, reply, peer) -> bool:
                return topic.submit(message, reply, "dds")

            def disconnect(self, peer) -> None:
                pass

        return AuthenticatedChannel(LocalChannel(OnTopic()), token)


def test_over_a_topic_each_robot_has_its_share_and_its_limit(engine, file):
    topic = Topic(engine, Tokens.of("", str(file)))
    with topic.channel("0123456789012345e10") as first, topic.channel("new-02") as second:
        assert session(first).decode(IMAGE, "go").tokens == session(second).decode(IMAGE, "go").tokens
        links = set(topic.peers)
        assert {link.robot for link in links} == {"go2-01", "go2-02"} and len(links) == 2
        assert all(isinstance(link, RobotLink) for link in links)
        with pytest.raises(VerifierRefused, match="go2-02 already holds its 1 sessions"):
            session(second).open()
        session(first).open()
    with topic.channel("unknown") as stranger, pytest.raises((VerifierRefused, LinkTimeout)):
        session(stranger).open()


def test_over_a_topic_a_restarted_verifier_is_noticed_at_once_whoever_asks(engine, file):
    topic = Topic(engine, Tokens.of("", str(file)))
    for token in ("0123456789012345e10", "old-02"):
        channel = topic.channel(token)
        held = EdgeSession(channel, MODEL, DecodeSettings(mode="dsd", max_tokens=12))
        first = held.decode(IMAGE, "go").tokens
        topic.guard._served.clear()
        engine._sessions.clear()  # as in a verifier that was restarted
        began = time.monotonic()
        assert held.decode(IMAGE, "go").tokens == first
        assert time.monotonic() - began < LinkSettings().response_timeout_s  # no time-out was needed


def test_what_a_removed_token_opened_is_over(engine, file):
    tokens = Tokens.of("", str(file))
    topic = Topic(engine, tokens)
    with topic.channel("old-02") as channel:
        held = session(channel)
        assert len(held.decode(IMAGE, "go").tokens) == 12
        replace(file, TWO.replace(", old-02", ""))
        assert tokens.reload()
        before = len(topic.peers)
        with pytest.raises(LinkError):
            held.decode(IMAGE, "go")
        assert len(topic.peers) == before  # nothing of it reached the engine


def test_the_denial_of_an_unknown_session_is_made_for_few_tokens_only(engine, tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text("".join(f"r{number}: token-{number}\n" for number in range(40)))
    guard = Authenticator(engine, Tokens.of("", str(path)), 64)
    heard = []
    guard.submit(Draft(7, 1, 1, 0, [], tag=bytes(20)), heard.append, "dds")
    assert 1 <= len(heard) <= 8
    assert all(isinstance(one, Refusal) and one.code == RefusalCode.UNKNOWN_SESSION for one in heard)
    assert len({msgspec.structs.replace(one, tag=b"") for one in heard}) == 1
