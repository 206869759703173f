# SPDX-License-Identifier: Apache-2.0
"""Several verifiers: a robot goes on at another when its own is full or dies, and its link may move."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from balancer import Balancer
from table_model import TableModel
from websockets.sync.client import connect

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.wire.channel import LinkClosed
from dsd_ros.wire.client import Limits
from dsd_ros.wire.websocket import WebsocketChannel

ENDLESS = TableModel(1, ends=False)
DRAFT = TableModel(1, ends=False, noise=0.3)
FULL = "the verifier already holds its 1 sessions; try again later, or raise its max_sessions"
IMAGE = np.full((2, 2, 3), 1, np.uint8)
SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"


class Verifier:
    """An engine and its server in this process."""

    def __init__(self, stack: contextlib.ExitStack, **settings: object) -> None:
        self.settings = VerifierSettings(**{"port": 0} | settings)
        self.engine = stack.enter_context(VerifierEngine(ENDLESS, self.settings))
        self.server = stack.enter_context(VerifierServer(self.engine, self.settings))
        self.url = self.server.url
        self.port = int(self.url.rsplit(":", 1)[1])

    def figure(self, name: str, **labels: str) -> float:
        return self.engine.metrics.registry.get_sample_value(f"dsd_verifier_{name}", labels) or 0.0

    @property
    def rounds(self) -> float:
        return self.figure("rounds_total", mode="dsd")


@pytest.fixture
def verifier():
    with contextlib.ExitStack() as stack:
        yield lambda **settings: Verifier(stack, **settings)


def session(channel, attempts: int = 4, tokens: int = 24) -> EdgeSession:
    link = LinkSettings(attempts=attempts, response_timeout_s=1.0)
    return EdgeSession(channel, DRAFT, DecodeSettings(mode="dsd", max_tokens=tokens, draft_length=3), link)


def alone(tokens: int = 24) -> list[int]:
    """The reply of a robot that nothing happens to."""
    with contextlib.ExitStack() as stack, WebsocketChannel(Verifier(stack).url) as channel:
        return session(channel, tokens=tokens).decode(IMAGE, "go").tokens


def ready(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


# ------------------------------------------------------------------------------------ full, try there


def test_a_full_verifier_sends_robots_elsewhere(verifier):
    """A robot that finds no room dials again, and a balancer gives it to another."""
    full, spare = verifier(max_sessions=1), verifier()
    with WebsocketChannel(full.url) as first, session(first) as held, Balancer(full.port) as balancer:
        with WebsocketChannel(balancer.url) as second:
            with pytest.raises(LinkClosed, match=FULL):
                session(second, attempts=2).open()
            assert full.figure("sessions_over_limit_total", reason="total") == 2
            balancer.backends.insert(0, spare.port)
            assert session(second).decode(IMAGE, "go").tokens == held.decode(IMAGE, "go").tokens
        assert full.rounds and spare.rounds
        assert ready(f"http{full.url[2:]}/readyz") == (503, f"{FULL}\n")
        assert ready(f"http{spare.url[2:]}/readyz") == (200, "ok\n")


def test_a_session_that_finds_no_room_on_an_open_link_is_moved_too(verifier):
    """A link stays when its session expires; what answers it then is a balancer's next verifier."""
    full, spare = verifier(max_sessions=1), verifier()
    with Balancer(full.port) as balancer, WebsocketChannel(balancer.url) as idle:
        idle.reconnect()  # over the balancer while there is room
        with WebsocketChannel(full.url) as first, session(first):
            balancer.backends.insert(0, spare.port)
            held = session(idle)
            held._link.up = True  # as after an expiry: the link is up
            assert len(held.decode(IMAGE, "go").tokens) == 24
    assert balancer.taken == [full.port, spare.port] and spare.rounds and not full.rounds


def test_a_robot_whose_link_broke_comes_back_to_a_full_verifier(verifier):
    """Also before the verifier has noticed that its old link is dead: what the robot resumes is its own."""
    full = verifier(max_sessions=1)
    with WebsocketChannel(full.url) as channel, session(channel) as held, connect(full.url, proxy=None):
        before = held.decode(IMAGE, "go").tokens
        number = held._link.session
        full.engine.disconnect = lambda _: None
        held._link.reconnect(Limits())
        assert held.decode(IMAGE, "go").tokens == before and held._link.session == number


# ---------------------------------------------------------------------------------- whole processes


class Process:
    """A verifier in a process of its own, which listens by the time that its ports are asked for."""

    def __init__(self) -> None:
        command = [sys.executable, str(SERVER), "table:1:0", "metrics"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @cached_property
    def addresses(self) -> tuple[str, int]:
        """The metrics' address, and the robots' port."""
        assert self._process.stdout is not None
        metrics = self._process.stdout.readline().split()[-1]
        return metrics, int(self._process.stdout.readline().strip().rpartition(":")[2])

    def counts(self) -> tuple[int, int]:
        """Observations read, and tokens given."""
        with urllib.request.urlopen(self.addresses[0]) as answer:
            shown = answer.read().decode()
        names = "observation_seconds_count", 'rounds_total{mode="dsd"}', 'accepted_tokens_total{mode="dsd"}'
        read, rounds, accepted = (float(shown.split(f"\ndsd_verifier_{name} ")[1].split()[0]) for name in names)
        return int(read), int(rounds + accepted)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Replicas:
    """Two verifiers behind a balancer; one that is killed is replaced."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.running: dict[int, Process] = {}
        self.start(2)

    def start(self, count: int = 1) -> None:
        for new in [Process() for _ in range(count)]:
            self.running[new.addresses[1]] = new
            self.balancer.backends.append(new.addresses[1])

    def kill(self, port: int) -> None:
        self.balancer.backends.remove(port)
        self.running.pop(port).end()


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_robot_whose_replica_is_killed_goes_on_at_another_with_the_same_tokens(kills):
    """The other replica reads the observation once; what was verified is not decoded again, and nothing is another."""
    tokens = 40
    expected = alone(tokens)
    with Balancer() as balancer, WebsocketChannel(balancer.url) as channel, contextlib.ExitStack() as stack:
        replicas = Replicas(balancer)
        stack.callback(lambda: [replicas.kill(port) for port in list(replicas.running)])
        held = session(channel, tokens=tokens)
        for kill in range(kills):
            known: list[int] = []
            before = {port: process.counts() for port, process in replicas.running.items()}

            def in_the_middle(_: str, verified: int, __: int, known: list = known, after: int = 2 + 7 * kill % 20):
                if not known and verified > after:
                    known.append(verified)
                    replicas.kill(balancer.taken[-1])

            assert held.decode(IMAGE, "go", on_progress=in_the_middle).tokens == expected, f"kill {kill}"
            ((port, other),) = replicas.running.items()
            assert known and port == balancer.taken[-1]
            read, given = (now - then for now, then in zip(other.counts(), before[port], strict=True))
            assert read == 1  # late by one prefill
            assert given <= tokens - known[0] + 4
            replicas.start()
