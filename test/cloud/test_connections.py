# SPDX-License-Identifier: Apache-2.0
"""What connections may take of a verifier: few of a robot, none of a stranger, and no flood keeps others waiting."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from prometheus_client import generate_latest
from table_model import TableModel
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from dsd_ros.cloud.connections import RobotConnection
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import PROTOCOL_VERSION, Draft, SessionReply, SessionRequest, VerifiedTokens
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 1, np.uint8)
MODEL = TableModel(1, ends=False)


@pytest.fixture
def engine():
    with VerifierEngine(MODEL) as engine:
        yield engine


def served(engine, **settings) -> VerifierServer:
    return VerifierServer(engine, VerifierSettings(port=0, **settings))


def request(number: int = 1) -> bytes:
    return encode(SessionRequest(number, PROTOCOL_VERSION, "dsd", MODEL.tokenizer_fingerprint, 8, 0.0, 0, 1.0, 0, 64))


def replies(url: str, count: int = 1) -> list[list[int]]:
    with (
        WebsocketChannel(url) as channel,
        EdgeSession(channel, MODEL, DecodeSettings(mode="dsd", max_tokens=12)) as session,
    ):
        return [session.decode(IMAGE, "go").tokens for _ in range(count)]


def refused(engine, reason: str) -> float:
    shown = generate_latest(engine.metrics.registry).decode()
    line = f'dsd_verifier_connections_refused_total{{reason="{reason}"}} '
    return float(shown.split(line)[1].split()[0])


class Raw:
    """A websocket by hand, which may be flooded."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("ws://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert b"101" in self.socket.recv(4096)

    @staticmethod
    def frame(data: bytes) -> bytes:
        assert len(data) < 126
        return bytes([0x82, 0x80 | len(data)]) + bytes(4) + data


def test_connections_are_bounded_by_the_sessions(engine):
    with served(engine, max_sessions=1) as server:
        links = [connect(server.url, proxy=None) for _ in range(2)]
        with pytest.raises(InvalidStatus) as caught:
            connect(server.url, proxy=None)
        assert caught.value.response.status_code == 503 and b"its 1 sessions" in caught.value.response.body
        assert refused(engine, "full") == 1
        for link in links:
            link.close()
        deadline = time.monotonic() + 60
        while server._served and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(replies(server.url)[0]) == 12


def test_connections_of_robots_with_names_are_bounded_in_all_too(engine, tmp_path):
    """Not at the robot's own limit, so nothing is counted against it."""
    (tmp_path / "tokens").write_text("go2-01: first\ngo2-02: second\n")
    with served(engine, max_sessions=1, tokens_file=str(tmp_path / "tokens")) as server, ExitStack() as stack:
        shown = [{"Authorization": f"Bearer {token}"} for token in ("first", "second")]
        for headers in shown:
            stack.enter_context(connect(server.url, additional_headers=headers, proxy=None))
        with pytest.raises(InvalidStatus) as caught:
            connect(server.url, additional_headers=shown[1], proxy=None)
        assert caught.value.response.status_code == 503 and b"its 1 sessions" in caught.value.response.body
        assert refused(engine, "full") == 1
        count = engine.metrics.registry.get_sample_value("dsd_verifier_robot_refusals_total", {"robot": "go2-02"})
        assert count == 0


def test_a_stranger_without_the_token_is_refused_before_its_first_frame(engine, tmp_path):
    """What it sends with the upgrade request is never read as a message."""
    (tmp_path / "token").write_text("correct-horse")
    with served(engine, token_file=str(tmp_path / "token")) as server:
        with pytest.raises(AssertionError):
            Raw(server.url)
        assert refused(engine, "token") == 1
        assert engine.metrics.registry.get_sample_value("dsd_verifier_received_bytes_total") == 0
        with connect(server.url, additional_headers={"Authorization": "Bearer correct-horse"}, proxy=None) as robot:
            robot.send(request())
            assert decode(robot.recv(timeout=10)).session


def test_a_flood_of_tiny_messages_leaves_others_their_turns(engine):
    with served(engine) as server:
        alone = time.monotonic()
        first = replies(server.url, 5)
        alone = time.monotonic() - alone
        robot, stop, sent = Raw(server.url), threading.Event(), [0]
        robot.socket.sendall(Raw.frame(request()))
        session = decode(robot.socket.recv(4096)[2:])
        assert isinstance(session, SessionReply)
        flood = Raw.frame(encode(Draft(session.session, 0, 1, 0, []))) * 2000

        def pour() -> None:
            robot.socket.settimeout(0.2)
            while not stop.is_set():
                try:
                    sent[0] += robot.socket.send(flood)
                except TimeoutError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=pour)
        thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        assert replies(server.url, 5) == first
        took = time.monotonic() - began
        stop.set()
        thread.join(10)
        robot.socket.close()
    assert took < 5 + 10 * alone


def test_a_stream_that_goes_on_over_a_new_link_is_a_reply_in_progress():
    connection = RobotConnection.__new__(RobotConnection)
    connection._replies = set()
    assert connection.between_replies(60.0)
    connection.carried(VerifiedTokens(1, 1, 5, [3]), {7})
    assert not connection.between_replies(60.0)
    connection.carried(VerifiedTokens(1, 1, 6, [7], ended=True), {7})
    assert connection.between_replies(60.0)
