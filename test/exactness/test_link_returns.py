# SPDX-License-Identifier: Apache-2.0
"""Over real websockets: a verifier that is killed and restarted, and a robot whose address changes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from table_model import TableModel
from websockets.utils import accept_key

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire import websocket
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.messages import Draft, Outcome, VerifiedTokens
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 5, np.uint8)
PATIENT = LinkSettings(attempts=60)
SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"
DRAFT = TableModel(4, ends=False, noise=0.6)


def settings(mode: str, max_tokens: int = 24) -> DecodeSettings:
    return DecodeSettings(mode=mode, temperature=1.0, seed=3, max_tokens=max_tokens)


def undisturbed(mode: str, max_tokens: int = 24) -> list[int]:
    with (
        VerifierEngine(TableModel(4, ends=False)) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, DRAFT, settings(mode, max_tokens)) as session,
    ):
        return session.decode(IMAGE, "go").tokens


def decoded(session: EdgeSession) -> list[int]:
    told: list[int] = []
    reply = session.decode(
        IMAGE,
        "go",
        lambda text, count, record: told.extend(record.gained),
        deadline=time.monotonic() + 60,  # a verifier that does not start again is no reason to hang
    )
    assert told == reply.tokens
    return told


class After(WebsocketChannel):
    """Something happens when the nth final outcome, or pass of a stream, has come."""

    def __init__(self, url: str, number: int, happens) -> None:
        super().__init__(url)
        self._left, self._happens = number, happens

    def receive(self, timeout):
        message = super().receive(timeout)
        if isinstance(message, VerifiedTokens) or (isinstance(message, Outcome) and message.is_final):
            self._left -= 1
            if self._left == 0:
                self._happens()
        return message


class Process:
    """A verifier in a process of its own."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), "table:4:0", f"port={port}"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def url(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()[-1]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._process.stdout.close()


def test_a_verifier_killed_and_started_again_goes_on_with_the_reply():
    processes = [Process()]
    try:
        url = processes[0].url()

        def happens():
            processes[0].kill()
            processes.append(Process(urlsplit(url).port))  # the robot dials until it listens

        chosen = settings("stream", 400)
        with After(url, 3, happens) as channel, EdgeSession(channel, DRAFT, chosen, PATIENT) as session:
            before = session._link.session
            assert decoded(session) == undisturbed("stream", 400)
            assert len(processes) == 2 and session._link.session != before
    finally:
        for process in processes[-1:]:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of the loopback on Linux")
@pytest.mark.parametrize("mode", ["stream", "dssd"])
def test_a_robot_that_changes_its_address_resumes_its_session(mode, monkeypatch):
    """The old connection is not closed: nothing of it arrives any more, and the verifier does not know."""
    address = ["127.0.0.2"]
    dial = websocket.connect
    dialled, left = [], []

    def connect(*args, **options):
        connection = dial(*args, source_address=(address[0], 0), **options)
        dialled.append(connection.local_address[0])
        return connection

    monkeypatch.setattr(websocket, "connect", connect)

    def roams():
        address[0] = "127.0.0.3"
        left.append(channel._connection)
        channel._connection = None

    with (
        VerifierEngine(TableModel(4, ends=False)) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        After(server.url, 2, roams) as channel,
        EdgeSession(channel, DRAFT, settings(mode), PATIENT) as session,
    ):
        before = session._link.session
        assert decoded(session) == undisturbed(mode)
        assert dialled == ["127.0.0.2", "127.0.0.3"]
        assert session._link.session == before and engine.sessions == 1
        # What the old address's end does to the session is nothing.
        left[0].close()
        assert decoded(session)
        assert session._link.session == before


def test_a_link_that_takes_nothing_more_is_given_up():
    """A verifier that stands still reads no more; what does not fit into the sockets must not block for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=_upgrade_and_freeze, args=(listening,), daemon=True)
        answering.start()
        channel = WebsocketChannel(f"ws://127.0.0.1:{listening.getsockname()[1]}", keepalive_s=0.5)
        with channel:
            channel.reconnect()
            answering.join(20)
            with pytest.raises(LinkClosed):
                for _ in range(40):
                    channel.send(Draft(1, 1, 1, 0, [1], evidence=bytes(1 << 20)))


FROZEN: list[socket.socket] = []


def _upgrade_and_freeze(listening: socket.socket) -> None:
    link, _ = listening.accept()
    FROZEN.append(link)  # open, and never read again
    request = link.recv(1 << 16).decode()
    key = next(line.split(": ")[1] for line in request.split("\r\n") if "Sec-WebSocket-Key" in line)
    link.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        + f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n".encode()
    )
