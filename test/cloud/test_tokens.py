# SPDX-License-Identifier: Apache-2.0
"""Each robot has a name and a token of its own: the file, who is let in, how it changes, what is shown."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from by_hand import Robot
from table_model import TableModel
from websockets.sync.client import connect

from dsd_ros.cloud.authentication import Authenticator
from dsd_ros.cloud.credentials import Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import EngineSettings, VerifierSettings, VerifierSettingsError
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.logs import JsonFormatter
from dsd_ros.wire.authentication import AuthenticatedChannel, Token
from dsd_ros.wire.channel import LinkClosed, LinkRefused, LinkTimeout, LocalChannel
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import Draft, Refusal, RefusalCode
from dsd_ros.wire.turns import RobotLink
from dsd_ros.wire.websocket import WebsocketChannel

MODEL = TableModel(1, ends=False)
IMAGE = np.full((2, 2, 3), 1, np.uint8)
TWO = """
# a comment
go2-01: 0123456789012345e10
go2-02: {token: [new-02, old-02], sessions: 1}
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


def robot(url: str, token: str) -> WebsocketChannel:
    return WebsocketChannel(url, token=token)


def session(channel) -> EdgeSession:
    return EdgeSession(channel, MODEL, DecodeSettings(mode="dsd", max_tokens=12), LinkSettings(attempts=1))


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    other.rename(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "names no robot; write a line 'NAME: TOKEN'"),
        ("go2: a\n  b: c: d\n", "line 2, is no YAML"),
        (b"go2: \xff\n", "is no YAML"),
        ("go2: abc\n\n'go 2': abd\n", "'go 2': that is no name; use letters"),
        ("go2: abc\ngo3: abc\n", "the token of go3 stands there twice"),
        ("go2: two words\n", "'go2': the token cannot be used; write one line of printable ASCII"),
        ("go2:\n", "'go2': Expected `str | array`, got `null`"),
        ("go2: {sessions: 2}\n", "'go2': Object missing required field `token`"),
        ("go2: {token: abc, session: 2}\n", "'go2': Object contains unknown field `session`"),
        ("go2: {token: abc, sessions: 0}\n", "'go2': Expected `int` >= 1 - at `$.sessions`"),
    ],
)
def test_an_error_in_the_file_is_a_sentence_without_the_token(tmp_path, text, sentence):
    path = tmp_path / "tokens.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        Tokens.of("", str(path))
    said = str(caught.value)
    assert sentence in said and str(path) in said and "\n" not in said and "secret" not in said


def test_a_file_is_needed_and_only_one(tmp_path, file):
    with pytest.raises(ValueError, match="tokens file .*none cannot be read: No such file"):
        Tokens.of("", str(tmp_path / "none"))
    with pytest.raises(VerifierSettingsError, match="token_file and tokens_file are both set"):
        VerifierSettings(token_file=str(file), tokens_file=str(file))
    assert VerifierSettings(host="0.0.0.0", tokens_file=str(file)).tokens_file == str(file)


def test_each_robot_has_its_token_its_limits_and_its_name(engine, file, caplog):
    caplog.set_level(logging.INFO, "dsd_ros")
    settings = VerifierSettings(port=0, tokens_file=str(file))
    with VerifierServer(engine, settings) as server, contextlib.ExitStack() as stack:
        first = stack.enter_context(robot(server.url, "0123456789012345e10"))
        second = stack.enter_context(robot(server.url, "old-02"))  # the one before is taken until it leaves the file
        held = [stack.enter_context(session(channel)) for channel in (first, second)]
        assert [len(one.decode(IMAGE, "go").tokens) for one in held] == [12] * 2
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
        assert figure("dsd_verifier_connections_refused_total", {"reason": "full"}) == 1
        held.pop().close()
    deadline = time.monotonic() + 20
    while figure("dsd_verifier_robot_sessions", {"robot": "go2-02"}) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert figure("dsd_verifier_robot_sessions", {"robot": "go2-02"}) == 0
    mine = [record for record in caplog.records if record.name.startswith("dsd_ros.cloud.")]
    lines = [json.loads(JsonFormatter().format(record)) for record in mine]
    for event in ("session opened", "observation read", "a session is over its limit", "connected from 127.0.0.1:"):
        assert {line.get("robot") for line in lines if event in line["message"]} <= {"go2-01", "go2-02"}
        assert any("robot" in line for line in lines if event in line["message"]), event
    said = [line["message"] for line in lines if "a connection from 127.0.0.1:" in line["message"]]
    assert "go2-02 already has its 2 conn" in said[0] and said[1].endswith("refused: wrong or missing bearer token")
    assert not any(token in line["message"] for line in lines for token in ("old-02", "new-02", "newer"))


def test_strangers_do_not_fill_the_log(engine, file, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "dsd_ros")
    monkeypatch.setattr("dsd_ros.cloud.server._LOG_S", 0.5)
    lines = lambda: [r.getMessage() for r in caplog.records if "is refused: wrong" in r.getMessage()]  # noqa: E731
    with VerifierServer(engine, VerifierSettings(port=0, tokens_file=str(file))) as server:
        tries, began = 0, time.monotonic()
        while len(lines()) < 2:
            tries += 1
            with robot(server.url, "newer") as other, pytest.raises(LinkRefused, match="refused the token"):
                session(other).open()
    assert tries > 2 and time.monotonic() - began >= 0.5
    assert lines()[1].endswith(f"; {tries - 2} more since the last line")


def test_a_robot_may_not_go_on_in_the_session_of_another(engine, file):
    with (
        VerifierServer(engine, VerifierSettings(port=0, tokens_file=str(file))) as server,
        robot(server.url, "0123456789012345e10") as channel,
        session(channel) as held,
        connect(server.url, additional_headers={"Authorization": "Bearer new-02"}, proxy=None) as other,
    ):
        held.open()
        other.send(encode(Draft(held._link.session, 1, 1, 0, [])))
        assert decode(other.recv(timeout=10)).code == RefusalCode.UNKNOWN_SESSION
        assert len(held.decode(IMAGE, "go").tokens) == 12


def test_tokens_change_without_a_restart(engine, file, caplog):
    caplog.set_level(logging.INFO, "dsd_ros")

    def changes(text: str, line: str) -> None:
        caplog.clear()
        replace(file, text)
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
            changes("go2-01: 0123456789012345e10\ngo2-02: new-02\n", "are in use")
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
        self.guard = Authenticator(self.submit, tokens, per_robot=2)

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
        session(first).decode(IMAGE, "go")
        with pytest.raises(VerifierRefused, match="go2-01 already holds its 2 sessions"):
            session(first).open()
    with topic.channel("unknown") as stranger, pytest.raises((VerifierRefused, LinkTimeout)):
        session(stranger).open()


def test_recorded_openings_leave_room_for_robots_that_are_there():
    with VerifierEngine(MODEL, EngineSettings(max_sessions=3)) as engine:
        topic, heard = Topic(engine, Tokens.shared("secret")), queue.SimpleQueue()

        def play() -> None:
            """As to a verifier that was restarted, and knows none of them."""
            for _ in range(5):
                topic.guard.submit(Token("secret").sign(Robot(engine).request()), heard.put, "dds")
            assert all(heard.get(timeout=10).session for _ in range(5))

        with topic.channel("secret") as channel:
            play()
            held = session(channel)
            tokens, number = held.decode(IMAGE, "go").tokens, held.verifier.session
            play()
            assert held.decode(IMAGE, "go").tokens == tokens
            assert held.verifier.session == number and engine.sessions == 3


def test_a_ticket_resumes_its_owners_session_alone(engine, file):
    def opened(name: str, resume: bytes = b"") -> tuple[int, bytes]:
        reply = Robot(engine, RobotLink(name, 8)).open(resume=resume)
        return reply.session, reply.ticket

    def opened_over_a_topic(name: str, resume: bytes = b"") -> tuple[int, bytes]:
        token, heard = Token({"go2-01": "0123456789012345e10", "go2-02": "new-02"}[name]), queue.SimpleQueue()
        request = token.sign(Robot(engine).request(resume=resume))
        guard.submit(request, heard.put, "dds")
        reply = heard.get(timeout=10)
        return reply.session, token.session_key(request.nonce, reply, robot=True).ticket

    for opens in (opened, opened_over_a_topic):
        guard = Authenticator(engine.submit, Tokens.of("", str(file)))
        engine._sessions.clear()
        owned, ticket = opens("go2-01")
        assert opens("go2-02", ticket)[0] not in (0, owned)
        assert opens("go2-01", ticket)[0] == owned


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


def test_the_denial_of_an_unknown_session_is_made_for_few_tokens_only(engine, tmp_path):
    path = tmp_path / "tokens.yaml"
    path.write_text("".join(f"r{number}: token-{number}\n" for number in range(40)))
    guard = Authenticator(engine.submit, Tokens.of("", str(path)))
    heard = []
    guard.submit(Draft(7, 1, 1, 0, [], tag=bytes(20)), heard.append, "dds")
    assert 1 <= len(heard) <= 8
    assert all(isinstance(one, Refusal) and one.code == RefusalCode.UNKNOWN_SESSION for one in heard)
    assert len({msgspec.structs.replace(one, tag=b"") for one in heard}) == 1
