# SPDX-License-Identifier: Apache-2.0
"""The metrics equal what robots saw over a real link, and no peer can make them grow."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from urllib.request import urlopen

import numpy as np
import pytest
from by_hand import Robot
from prometheus_client.parser import text_string_to_metric_families
from table_model import TableModel
from tiny_models import make_tiny_model
from websockets.sync.client import connect

from dsd_ros.cli import verifier
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics_server import MetricsServer, ServerError
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import EngineSettings, MetricsSettings, VerifierSettings
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.logs import LogSettings
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import PROTOCOL_VERSION, Draft, Observation, RefusalCode, SessionReply, SessionRequest
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 1, np.uint8)
ANY = MetricsSettings()
Samples = dict[str, float]


def samples(text: str) -> Samples:
    """``name{label="value",...}`` -> value, labels in order."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{key}="{sample.labels[key]}"' for key in sorted(sample.labels))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def scrape(url: str) -> Samples:
    with urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return samples(answer.read().decode())


def scrape_until(url: str, holds: Callable[[Samples], bool]) -> Samples:
    """The verifier counts a round once its outcome is on its way: wait for what must come."""
    deadline = time.monotonic() + 30
    while not holds(found := scrape(url)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def of(found: Samples, name: str, **labels: str) -> float:
    inside = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return found[f"dsd_verifier_{name}" + (f"{{{inside}}}" if inside else "")]


@pytest.fixture
def served():
    """An engine behind a websocket and its metrics: engine, robots' address, operators' address."""
    with (
        VerifierEngine(TableModel(1, ends=False)) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        MetricsServer(engine.metrics.registry, ANY) as operators,
    ):
        yield engine, server.url, operators.url


def test_the_counts_are_those_of_the_robots_session(served):
    _, robots, operators = served
    draft = TableModel(1, ends=False, noise=1.0)
    replies = {}
    with WebsocketChannel(robots) as channel:
        for mode, changes in (
            ("ar", {}),
            ("dsd", {}),
            ("dsd", {"temperature": 1.0, "seed": 3}),
            ("dssd", {"temperature": 1.0, "seed": 4}),
            ("stream", {}),
            ("stream", {"temperature": 1.0}),
        ):
            settings = DecodeSettings(mode=mode, max_tokens=20, **changes)
            with EdgeSession(channel, draft, settings) as session:
                replies.setdefault(mode, []).append(session.decode(IMAGE, "go"))
        rounds = {mode: sum(r.rounds for r in done) for mode, done in replies.items()}
        count = sum(map(len, replies.values()))
        found = scrape_until(
            operators,
            lambda f: (
                all(of(f, "rounds_total", mode=m) >= n for m, n in rounds.items() if m != "ar")
                and of(f, "sessions_ended_total", reason="closed") == count
                and of(f, "pass_seconds_count") == of(f, "pass_rounds_count")  # counted after what a pass gives is sent
                and of(f, "sent_bytes_total") >= channel.bytes_down
            ),
        )
        bytes_up, bytes_down = channel.bytes_up, channel.bytes_down
        assert of(found, "connections") == 1
    for mode, done in replies.items():
        records = [record for reply in done for record in reply.records]
        assert of(found, "sessions_opened_total", mode=mode) == len(done)
        assert of(found, "rounds_total", mode=mode) == len(records), mode
        assert of(found, "drafted_tokens_total", mode=mode) == sum(r.drafted for r in records)
        assert of(found, "accepted_tokens_total", mode=mode) == sum(r.accepted for r in records)
        assert of(found, "round_seconds_count", mode=mode) == len(records)
        assert of(found, "round_seconds_sum", mode=mode) > 0
    assert of(found, "accepted_tokens_total", mode="dsd") > 0
    assert of(found, "accepted_tokens_total", mode="dsd") < of(found, "drafted_tokens_total", mode="dsd")
    drafted = [r for m, done in replies.items() if m != "ar" for reply in done for r in reply.records]
    assert of(found, "round_accepted_tokens_count") == sum(bool(r.drafted) for r in drafted)
    assert of(found, "observation_seconds_count") == count
    apart = len(replies["dsd"]) + len(replies["dssd"])  # a stream's observation is the turn of its first step
    assert of(found, "queue_wait_seconds_count") >= sum(rounds.values()) + apart
    assert of(found, "pass_rounds_sum") == sum(of(found, "rounds_total", mode=mode) for mode in replies)
    assert of(found, "pass_seconds_count") == of(found, "pass_rounds_count")
    assert of(found, "prompt_tokens_total") == 2 * count  # a table's prompts are two tokens long
    tokens = sum(len(reply.tokens) for done in replies.values() for reply in done)
    assert of(found, "generation_tokens_total") == tokens
    assert of(found, "received_bytes_total") == bytes_up
    assert of(found, "sent_bytes_total") == bytes_down
    for name in ("sessions_resumed_total", "sessions_refused_total", "outcomes_resent_total", "failures_total"):
        assert of(found, name) == 0, name
    assert of(found, "sessions", link="up") == of(found, "queue_turns") == of(found, "queue_bytes") == 0
    assert sum(value for name, value in found.items() if "refusals_total" in name) == 0
    assert found["process_resident_memory_bytes"] > 1e6 and found["process_open_fds"] > 0
    info = next(name for name in found if name.startswith("dsd_verifier_info"))
    assert f'protocol="{PROTOCOL_VERSION}"' in info and TableModel(1).name in info


def request(number: int = 1, mode: str = "dsd", resume: bytes = b"", **changes) -> SessionRequest:
    fingerprint = TableModel(1).tokenizer_fingerprint
    fingerprint = changes.pop("tokenizer_fingerprint", fingerprint)
    return SessionRequest(number, PROTOCOL_VERSION, mode, fingerprint, 8, 0.0, 0, 1.0, 0, 64, resume=resume, **changes)


def test_resent_resumed_and_refused_are_counted(served):
    _engine, robots, operators = served
    with connect(robots, proxy=None) as robot:
        robot.send(encode(request()))
        opened = decode(robot.recv())
        for _ in range(2):  # no observation came
            robot.send(encode(Draft(opened.session, 1, 1, 0, [])))
            assert decode(robot.recv()).code == RefusalCode.NO_OBSERVATION
        robot.send(b"nonsense")
        assert decode(robot.recv()).code == RefusalCode.MALFORMED
        robot.send(encode(request(9, tokenizer_fingerprint="")))
        assert decode(robot.recv()).error
    scrape_until(operators, lambda f: of(f, "sessions", link="down") == 1)
    with WebsocketChannel(robots) as channel:
        channel.reconnect()
        channel.send(request(2, resume=opened.ticket))
        assert channel.receive(30).session == opened.session
        found = scrape_until(operators, lambda f: of(f, "sessions_resumed_total") == 1)
    assert of(found, "sessions_opened_total", mode="dsd") == 1
    assert of(found, "sessions_refused_total") == 1
    assert of(found, "refusals_total", code="no-observation") == 2
    assert of(found, "refusals_total", code="malformed") == 1


def test_expired_and_evicted_sessions_are_counted_apart():
    now = [0.0]
    settings = EngineSettings(max_sessions=1, session_expiry_s=50.0)
    with (
        VerifierEngine(TableModel(1), settings, clock=lambda: now[0]) as engine,
        MetricsServer(engine.metrics.registry, ANY) as operators,
    ):
        for peer in ("a", "b"):
            said: list[SessionReply] = []
            engine.submit(request(), said.append, peer)
            scrape_until(operators.url, lambda f, said=said: bool(said))
            engine.disconnect(peer)
        now[0] = 100.0
        found = scrape_until(operators.url, lambda f: of(f, "sessions_ended_total", reason="expired") == 1)
        assert of(found, "sessions_ended_total", reason="evicted") == 1
        assert of(found, "sessions_ended_total", reason="expired") == 1
        assert of(found, "sessions_limit") == 1
        assert of(found, "sessions_opened_total", mode="dsd") == 2


def test_tokens_held_are_counted(served):
    _engine, robots, operators = served
    with WebsocketChannel(robots) as channel:
        channel.reconnect()
        channel.send(request())
        session = channel.receive(30).session
        channel.send(Observation(session, 1, "go", 2, 2, "rgb8", IMAGE.tobytes(), verified=[3, 1], rounds=1))
        channel.send(Draft(session, 1, 2, 2, []))
        channel.receive(30)
        found = scrape_until(operators, lambda f: of(f, "generation_tokens_total") == 1)
        assert of(found, "prompt_tokens_total") == 2 + 2  # another verifier has generated two
        assert of(found, "session_tokens") == 5


def test_early_outcomes_are_counted_by_layer(tmp_path):
    model = load_model(ModelSettings(make_tiny_model(tmp_path / "target", seed=5, layers=3)))
    model.exits = ExitAdapters.untrained(model, [1, 2])
    with (
        VerifierEngine(model, EngineSettings(exit_share=1.0)) as engine,
        MetricsServer(engine.metrics.registry, ANY) as operators,
    ):
        robot, confirmed = (
            Robot(engine),
            0,
        )  # nothing stands between it and the engine where an early outcome is overtaken
        assert robot.open(mode="fsd", exits=True).exit_layers == [1, 2]
        robot.observe()
        heard: Counter[int] = Counter()
        for number in range(1, 9):
            robot.draft(number, confirmed, [8, 9])
            outcome, early = robot.final(number)
            confirmed += outcome.accepted + 1
            heard.update(each.layer for each in early)
        found = scrape_until(operators.url, lambda f: of(f, "rounds_total", mode="fsd") == 8)
        assert heard[1] == 8  # the first exit always speaks
        assert {layer: of(found, "early_outcomes_total", layer=str(layer)) for layer in (1, 2)} == {
            layer: heard[layer] for layer in (1, 2)
        }
        assert of(found, "early_outcomes_total", layer="other") == 0


def test_no_peer_makes_a_series(served):
    _engine, robots, operators = served
    before = scrape(operators)
    with connect(robots, proxy=None) as robot:
        for number in range(30):
            robot.send(encode(request(number, mode=f"mode-{number}", proof=f"proof{number}")))
            assert decode(robot.recv()).error
        for number in range(8):
            robot.send(b"junk %d" % number)
            assert decode(robot.recv()).code == RefusalCode.MALFORMED
    found = scrape_until(operators, lambda f: of(f, "connections") == 0)
    assert found.keys() == before.keys()
    assert of(found, "sessions_refused_total") == 30
    assert sum(v for name, v in found.items() if "sessions_opened" in name) == 0
    assert len(found) < 400
    labels = {label for name in found for label in re.findall(r'(\w+)="', name)}
    assert labels == {"mode", "code", "reason", "link", "layer", "le", "version", "protocol", "model"}
    modes = {m for name in found for m in re.findall(r'mode="([^"]*)"', name)}
    assert modes == {*PRESETS, "other"}


# ----------------------------------------------------------------------------- the metrics' server


def place(url: str) -> tuple[str, int]:
    host, port = url.partition("://")[2].removesuffix("/metrics").split(":")
    return host, int(port)


def ask(url: str, data: bytes) -> bytes:
    with socket.create_connection(place(url), timeout=30) as link:
        said = b""
        # What was not read of a request makes the end of a connection a reset.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            link.sendall(data)
            while more := link.recv(65536):
                said += more
        return said


def test_probes_are_answered_beside_the_metrics():
    said = [""]
    with (
        VerifierEngine(TableModel(1)) as engine,
        MetricsServer(engine.metrics.registry, ANY, lambda: said[0]) as server,
    ):
        for path in (b"healthz", b"readyz"):
            assert ask(server.url, b"GET /%s HTTP/1.1\r\n\r\n" % path).endswith(b"\r\n\r\nok\n")
        said[0] = "no room"
        assert b" 200 OK" in ask(server.url, b"GET /healthz HTTP/1.1\r\n\r\n")
        unready = ask(server.url, b"GET /readyz HTTP/1.1\r\n\r\n")
        assert b" 503 " in unready and unready.endswith(b"\r\n\r\nno room\n")
        assert scrape(server.url)


def test_while_a_verifier_loads_its_metrics_port_and_its_log_say_so(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    said = []

    @contextlib.contextmanager
    def loading(model, backend):
        said.append(ask(f"http://127.0.0.1:{port}/metrics", b"GET /readyz HTTP/1.1\r\n\r\n"))
        raise ServerError("enough of it")
        yield

    monkeypatch.setattr(verifier, "_target", loading)
    settings = VerifierSettings(port=0, metrics_port=port)
    with pytest.raises(ServerError, match="enough of it"):
        verifier.command(verifier.VerifierArguments(serving=settings, log=LogSettings(log_level="info")))
    assert b" 503 " in said[0] and said[0].endswith(b"\r\n\r\nloading\n")
    assert "loading target" in capsys.readouterr().err


def test_closing_gives_thread_and_socket_back():
    with VerifierEngine(TableModel(1)) as engine:
        before = set(threading.enumerate())
        server = MetricsServer(engine.metrics.registry, ANY)
        server.start()
        _, port = place(server.url)
        assert scrape(server.url)
        server.close()
        server.close()
        deadline = time.monotonic() + 30
        while not set(threading.enumerate()) <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(threading.enumerate()) <= before
        again = MetricsSettings(metrics_port=port)
        with MetricsServer(engine.metrics.registry, again) as first:
            assert scrape(first.url)
            with pytest.raises(ServerError, match=f"metrics port {port} on 127.0.0.1 is in use; .*0 for none"):
                MetricsServer(engine.metrics.registry, again).start()


def http_of(server: VerifierServer) -> str:
    return server.url.replace("ws://", "http://")


def test_the_robots_port_answers_for_health_alone(tmp_path):
    token = tmp_path / "token"
    token.write_text("correct-horse")
    settings = VerifierSettings(port=0, token_file=str(token))
    with VerifierEngine(TableModel(1)) as engine, VerifierServer(engine, settings) as server:
        for path in (b"healthz", b"readyz"):
            assert ask(http_of(server), b"GET /%s HTTP/1.1\r\n\r\n" % path).endswith(b"\r\n\r\nok\n")
        assert ask(http_of(server), b"GET /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("given", [{"metrics_port": -1}, {"metrics_port": 65536}, {"metrics_host": ""}])
def test_settings_out_of_place_are_refused(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        VerifierSettings(**given)
    with pytest.raises(ValueError, match="give the metrics another"):
        VerifierSettings(port=8000, metrics_port=8000)


# ------------------------------------------------------------------------------------ the names


def test_an_engine_that_is_dropped_is_not_kept_by_its_metrics():
    gc.collect()
    gc.disable()
    try:
        engine = VerifierEngine(TableModel(1))
        registry = engine.metrics.registry
        assert engine.close(30)
        gone = weakref.ref(engine)
        del engine
        deadline = time.monotonic() + 10
        while gone() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
        assert list(registry.collect())
    finally:
        gc.enable()
