# SPDX-License-Identifier: Apache-2.0
"""What many connections, idle ones, half-sent frames and floods may take of a verifier."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from table_model import TableModel
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from dsd_ros.cloud.connections import HANDSHAKES, RobotConnection, address_group
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import (
    FIRST_FRAME_BYTES,
    PROTOCOL_VERSION,
    Draft,
    Observation,
    Refusal,
    SessionReply,
    SessionRequest,
    VerifiedTokens,
)
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
    """A websocket by hand, which may send half a frame."""

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
    def frame(data: bytes, opcode: int = 2, announced: int | None = None) -> bytes:
        size = len(data) if announced is None else announced
        head = (
            bytes([0x80 | opcode, 0x80 | size])
            if size < 126
            else bytes([0x80 | opcode, 0xFF]) + struct.pack(">Q", size)
        )
        return head + bytes(4) + data


def ended(link: socket.socket, seconds: float = 10.0) -> bool:
    """Whether the other end closes the connection in time."""
    link.settimeout(seconds)
    try:
        while link.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_one_address_has_its_share_of_the_connections(engine):
    with served(engine, connections_per_address=3) as server:
        links = [connect(server.url, proxy=None) for _ in range(3)]
        with pytest.raises(InvalidStatus) as caught:
            connect(server.url, proxy=None)
        sentence = caught.value.response.body.decode()
        assert caught.value.response.status_code == 503
        assert "its 3 connections" in sentence and "connections_per_address" in sentence
        assert refused(engine, "address") == 1
        links.pop().close()
        assert len(replies(server.url)[0]) == 12
        for link in links:
            link.close()


def test_idle_connections_of_one_address_are_few(engine):
    with served(engine, connections_per_address=3) as server:
        where = tuple(server.url.removeprefix("ws://").split(":"))
        idle = [socket.create_connection(where) for _ in range(3 + HANDSHAKES + 20)]
        deadline = time.monotonic() + 60
        while refused(engine, "address") < 20 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert refused(engine, "address") == 20
        deadline = time.monotonic() + 60
        while sum(ended(link, 0.01) for link in idle) < 20 and time.monotonic() < deadline:
            pass  # what is refused is counted before it is closed
        assert sum(ended(link, 0.01) for link in idle) == 20
        for link in idle:
            link.close()
        deadline = time.monotonic() + 60
        while server.door._open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(replies(server.url)[0]) == 12


@pytest.mark.parametrize(
    ("host", "group"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:2%eth0", "2001:db8::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_network_of_one_machine_is_one_address(host, group):
    assert address_group(host) == group


def test_messages_are_small_until_a_session_is_open(engine):
    large = encode(Observation(1, 1, "go", 400, 400, "rgb8", bytes(3 * 400 * 400)))
    assert len(large) > FIRST_FRAME_BYTES
    with served(engine, message_mb=1) as server:
        with connect(server.url, proxy=None) as robot, pytest.raises(ConnectionClosed, match="1009"):
            robot.send(large)
            robot.recv(timeout=10)
        with WebsocketChannel(
            server.url, relays=True
        ) as channel:  # a bridge: its robot does not know that the link is new
            channel.reconnect()
            channel.send(decode(large))
            channel.send(Draft(5, 1, 1, 0, []))
            assert channel.receive(10).code == "unknown-session"
        with connect(server.url, proxy=None) as robot:
            robot.send(request())
            session = decode(robot.recv(timeout=10)).session
            robot.send(encode(Observation(session, 1, "go", 400, 400, "rgb8", bytes(3 * 400 * 400))))
            robot.send(encode(Draft(session, 1, 1, 0, [])))
            assert decode(robot.recv(timeout=10)).round == 1
            robot.send(bytes((1 << 20) + 8192))
            with pytest.raises(ConnectionClosed, match="1009"):
                robot.recv(timeout=10)


def test_half_sent_frames_take_one_budget(engine):
    """Each announces 20 MB and sends all but the end; the greediest are cut off, and others are not."""
    with served(engine, memory_mb=256) as server:  # 64 MB of it for frames being received
        robots = [Raw(server.url) for _ in range(5)]
        for number, robot in enumerate(robots):
            robot.socket.sendall(Raw.frame(request(number)))
            robot.socket.recv(4096)
            piece = Raw.frame(bytes(19 << 20), announced=20 << 20)
            with contextlib.suppress(OSError):  # cut off meanwhile
                robot.socket.sendall(piece)
        deadline = time.monotonic() + 60
        while refused(engine, "memory") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert refused(engine, "memory") == 2
        assert sum(server.door._holding.values()) <= 64 << 20
        assert len(replies(server.url)[0]) == 12
        for robot in robots:
            robot.socket.close()


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


def test_a_flood_of_pings_is_cut_off(engine):
    with served(engine) as server:
        robot = Raw(server.url)
        with pytest.raises(OSError):
            for _ in range(1000):
                robot.socket.sendall(Raw.frame(b"x", opcode=9) * 100)
                time.sleep(0.005)
        assert refused(engine, "flood") == 1
        assert len(replies(server.url)[0]) == 12


def test_slow_messages_in_pieces_arrive_whole(engine):
    """Slices, pauses and a stream that ends: what is read a little at a time is all read."""
    with served(engine, messages_per_second=400) as server, connect(server.url, proxy=None, max_queue=None) as robot:
        robot.send(request())
        session = decode(robot.recv(timeout=10)).session
        for number in range(1, 301):
            robot.send(encode(Draft(session, 9, number, 0, [])))  # each is refused: there is no observation
        seen = [decode(robot.recv(timeout=20)) for _ in range(300)]
    assert all(isinstance(refusal, Refusal) for refusal in seen)
    assert {refusal.round for refusal in seen} <= set(range(1, 301)) and len({r.round for r in seen}) > 20


def test_few_descriptors_are_no_reason_to_fill_the_log(tmp_path):
    """Before: 48 696 tracebacks in 13 s."""
    script = Path(__file__).parents[1] / "support" / "serve_model.py"
    command = f"ulimit -n 64; exec {sys.executable} {script} table:1:0"
    log = tmp_path / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        url = process.stdout.readline().split()[-1]
        where = tuple(url.removeprefix("ws://").split(":"))
        with WebsocketChannel(url) as channel, EdgeSession(channel, MODEL, DecodeSettings(max_tokens=12)) as session:
            first = session.decode(IMAGE, "go").tokens
            idle = [socket.create_connection(where) for _ in range(150)]
            ticks = _ticks(process.pid)
            for _ in range(5):
                assert session.decode(IMAGE, "go").tokens == first
                time.sleep(0.5)
            assert _ticks(process.pid) - ticks < 150  # 1.5 s of 2.5: it does not spin
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < 60
            for link in idle:
                link.close()
        deadline, again = time.monotonic() + 60, []
        while not again and time.monotonic() < deadline:
            try:
                again = replies(url)
            except Exception:
                time.sleep(0.2)
        assert again == [first]
    finally:
        process.kill()
        process.communicate()
    text = log.read_text()
    assert "Traceback" not in text and len(text) < 4000


def _ticks(pid: int) -> int:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return int(user) + int(system)


def test_a_stream_that_goes_on_over_a_new_link_is_a_reply_in_progress():
    connection = RobotConnection.__new__(RobotConnection)
    connection._replies = set()
    assert connection.between_replies(60.0)
    connection.carried(VerifiedTokens(1, 1, 5, [3]), {7})
    assert not connection.between_replies(60.0)
    connection.carried(VerifiedTokens(1, 1, 6, [7], ended=True), {7})
    assert connection.between_replies(60.0)
