# SPDX-License-Identifier: Apache-2.0
"""Several verifiers: a robot goes on at another when its own is full, drains, or dies, and its link may move."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from balancer import Balancer
from table_model import TableModel
from websockets.sync.client import connect

import dsd_ros.cloud.server as server_module
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics_server import MetricsServer
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.edge.settings import LinkSettings
from dsd_ros.wire.channel import LinkClosed
from dsd_ros.wire.client import Limits
from dsd_ros.wire.websocket import WebsocketChannel

ENDLESS, ENDS = TableModel(1, ends=False), TableModel(9)  # its reply ends after eleven tokens
DRAFT = TableModel(1, ends=False, noise=0.3)
FULL = "the verifier already holds its 1 sessions; try again later, or raise its max_sessions"
IMAGE = np.full((2, 2, 3), 1, np.uint8)
SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"


class Verifier:
    """An engine and its server in this process."""

    def __init__(self, stack: contextlib.ExitStack, model: TableModel = ENDLESS, **settings: object) -> None:
        self.settings = VerifierSettings(**{"port": 0} | settings)
        self.engine = stack.enter_context(VerifierEngine(model, self.settings))
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
        yield lambda *args, **settings: Verifier(stack, *args, **settings)


def session(channel, attempts: int = 4, tokens: int = 24) -> EdgeSession:
    link = LinkSettings(attempts=attempts, response_timeout_s=1.0)
    return EdgeSession(channel, DRAFT, DecodeSettings(mode="dsd", max_tokens=tokens, draft_length=3), link)


def alone(tokens: int = 24, model: TableModel = ENDLESS) -> list[int]:
    """The reply of a robot that nothing happens to."""
    with contextlib.ExitStack() as stack, WebsocketChannel(Verifier(stack, model).url) as channel:
        return session(channel, tokens=tokens).decode(IMAGE, "go").tokens


def until(holds, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


# ------------------------------------------------------------------------------------------- draining


def test_a_robot_that_never_pauses_is_sent_away_when_its_next_reply_begins(verifier, monkeypatch):
    monkeypatch.setattr(server_module, "_LOOK_S", 60.0)  # nothing is noticed in a pause
    expected = alone(model=ENDS)
    one, two = verifier(ENDS), verifier(ENDS)
    with Balancer(one.port) as balancer, WebsocketChannel(balancer.url) as channel:
        held = session(channel)
        held.open()
        one.server._draining = True
        balancer.backends.insert(0, two.port)
        assert held.decode(IMAGE, "go").tokens == expected
        assert balancer.taken == [one.port, two.port] and not one.rounds


def test_a_draining_verifier_takes_nobody_lets_replies_end_and_sends_robots_elsewhere(verifier, monkeypatch):
    monkeypatch.setattr(server_module, "QUIET_S", 300.0)  # the end token tells that a reply is over
    expected = alone(model=ENDS)
    one, two = verifier(ENDS), verifier(ENDS)
    metrics = MetricsServer(one.engine.metrics.registry, VerifierSettings(), one.server.unready)
    began, drained = threading.Event(), threading.Event()

    def drain() -> None:
        began.wait(60)
        one.server.drain(60.0)
        drained.set()

    thread = threading.Thread(target=drain)
    thread.start()
    with metrics, Balancer(one.port, two.port) as balancer, WebsocketChannel(balancer.url) as channel:
        held = session(channel)
        assert ready(metrics.url.replace("/metrics", "/readyz")) == (200, "ok\n")

        def in_the_middle(*_: object) -> None:
            if not began.is_set():
                began.set()
                until(lambda: one.server._draining)
                time.sleep(3 * server_module._LOOK_S)
                assert not drained.is_set()

        assert held.decode(IMAGE, "go", on_progress=in_the_middle).tokens == expected
        assert balancer.taken == [one.port]  # the reply ended where it began
        assert drained.wait(50) and one.figure("connections_moved_total") == 1
        assert ready(metrics.url.replace("/metrics", "/readyz")) == (503, "the verifier is shutting down\n")
        assert ready(metrics.url.replace("/metrics", "/healthz")) == (200, "ok\n")  # alive: it is not to be killed
        with pytest.raises(OSError):
            connect(one.url, proxy=None)
        assert held.decode(IMAGE, "go").tokens == expected
        assert balancer.taken == [one.port, two.port] and two.rounds
    thread.join(20)


def test_draining_ends_after_its_time_and_a_reply_goes_on_elsewhere(verifier):
    expected = alone()
    one, two = verifier(), verifier()
    with Balancer(one.port, two.port) as balancer, WebsocketChannel(balancer.url) as channel:
        done = []

        def in_the_middle(*_: object) -> None:
            if not done:
                one.server.drain(0.3)
                one.server.close()
                done.append(True)

        assert session(channel).decode(IMAGE, "go", on_progress=in_the_middle).tokens == expected
    assert balancer.taken == [one.port, two.port] and one.rounds and two.rounds


# ---------------------------------------------------------------------------------- whole processes


class Process:
    """A verifier in a process of its own, which listens by the time that its ports are asked for."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, str(SERVER), "table:1:0", "metrics", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @cached_property
    def addresses(self) -> tuple[str, int]:
        """The metrics' address, and the robots' port."""
        assert self.process.stdout is not None
        metrics = self.process.stdout.readline().split()[-1]
        return metrics, int(self.process.stdout.readline().strip().rpartition(":")[2])

    def counts(self) -> tuple[int, int]:
        """Observations read, and tokens given."""
        with urllib.request.urlopen(self.addresses[0]) as answer:
            shown = answer.read().decode()
        names = "observation_seconds_count", 'rounds_total{mode="dsd"}', 'accepted_tokens_total{mode="dsd"}'
        read, rounds, accepted = (float(shown.split(f"\ndsd_verifier_{name} ")[1].split()[0]) for name in names)
        return int(read), int(rounds + accepted)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


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


def test_sigterm_drains_and_a_second_one_ends_it_at_once():
    verifier = Process("drain_s=60")
    try:
        with WebsocketChannel(f"ws://127.0.0.1:{verifier.addresses[1]}") as channel:
            session(channel).decode(IMAGE, "go")  # cut off at its length: the verifier cannot know that it has ended
            verifier.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                verifier.process.wait(1.0)
            verifier.process.send_signal(signal.SIGTERM)
            assert verifier.process.wait(20) == 0
    finally:
        verifier.end()
