# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from table_model import TableModel
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import dsd_ros.cloud.server as server_module
from dsd_ros.cloud.credentials import Certificate, Tokens
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics import Metrics
from dsd_ros.cloud.metrics_server import ServerError
from dsd_ros.cloud.server import MAX_MALFORMED_FRAMES, VerifierServer
from dsd_ros.cloud.settings import VerifierSettings, VerifierSettingsError
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.wire.channel import LinkClosed, LinkRefused, read_token
from dsd_ros.wire.codec import decode, encode
from dsd_ros.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    DraftTokens,
    Observation,
    Outcome,
    Refusal,
    RefusalCode,
    SessionRequest,
)
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.websocket import WebsocketChannel

IMAGE = np.full((2, 2, 3), 1, np.uint8)
SETTINGS = VerifierSettings(port=0)


@pytest.fixture
def model():
    return TableModel(1, ends=False)


@pytest.fixture
def engine(model):
    with VerifierEngine(model) as engine:
        yield engine


@pytest.fixture
def url(engine):
    with VerifierServer(engine, SETTINGS) as server:
        yield server.url


def reply(channel, model, mode="dsd", **changes):
    with EdgeSession(channel, model, DecodeSettings(mode=mode, max_tokens=12, **changes)) as session:
        return session.decode(IMAGE, "go").tokens


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("correct-horse\n")
    return path


def test_the_token_is_asked_for(engine, model, token_file):
    settings = VerifierSettings(port=0, token_file=str(token_file))
    with VerifierServer(engine, settings) as server:
        with WebsocketChannel(server.url, token="correct-horse") as channel:
            assert len(reply(channel, model)) == 12
        for token in (None, "correct", "correct-horse2", "Correct-horse"):
            with (
                WebsocketChannel(server.url, token=token) as channel,
                pytest.raises(LinkRefused, match="refused the token"),
            ):
                reply(channel, model)
        with pytest.raises(InvalidStatus, match="401"):
            headers = [("Authorization", "Bearer correct-horse"), ("Authorization", "Bearer x")]
            connect(server.url, additional_headers=headers, proxy=None)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "robot.example"])
def test_a_verifier_that_others_reach_needs_a_token(host, token_file):
    with pytest.raises(VerifierSettingsError, match=f"host {host} .*token_file.*openssl.*allow_unauthenticated"):
        VerifierSettings(host=host)
    assert VerifierSettings(host=host, token_file=str(token_file)).host == host
    assert VerifierSettings(host=host, allow_unauthenticated=True).host == host
    assert all(VerifierSettings(host=near).host == near for near in ("127.0.0.1", "127.0.1.1", "::1", "localhost"))


@pytest.mark.parametrize("content", ["", "   \n", "two words", "umlaut-ä", "a\x07b"])
def test_a_token_file_without_a_token_is_refused(engine, tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no token"):
        VerifierServer(engine, VerifierSettings(token_file=str(path)))
    with pytest.raises(ValueError, match="cannot be read"):
        VerifierServer(engine, VerifierSettings(token_file=str(tmp_path / "none")))


def test_a_token_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "token"
    path.write_text("secret\n", encoding="utf-8-sig")
    assert read_token(path) == "secret"
    path.write_text("go2: secret\n", encoding="utf-8-sig")
    assert Tokens.of("", str(path)).names == {"go2"}


def test_files_with_secrets_that_anybody_can_read_are_named_in_the_log(certificate, tmp_path, caplog):
    key, token, tokens = tmp_path / "key", tmp_path / "token", tmp_path / "tokens"
    key.write_bytes(certificate[1].read_bytes())
    token.write_text("secret\n")
    tokens.write_text("go2: secret\n")
    for mode in (0o640, 0o644):
        for path in (key, token, tokens):
            path.chmod(mode)
        Certificate(str(certificate[0]), str(key))
        Tokens.of(str(token))
        Tokens.of("", str(tokens))
        for path in (key, token, tokens):
            assert (f"every user of this machine can read {path}, which" in caplog.text) == (mode == 0o644)
    assert "go2" not in caplog.text


def new_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {name}.key -out {name}.pem"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=30)
    return folder / f"{name}.pem", folder / f"{name}.key"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1 and its key."""
    return new_certificate(tmp_path_factory.mktemp("tls"), "tls")


def test_tls(engine, model, certificate):
    settings = VerifierSettings(port=0, certificate=str(certificate[0]), key=str(certificate[1]))
    assert Certificate(settings.certificate, settings.key).context.num_tickets == 0  # with them 4 dials of 1000 stall
    with VerifierServer(engine, settings) as server:
        assert server.url.startswith("wss://")
        with WebsocketChannel(server.url, ca_file=certificate[0], keepalive_s=60.0) as channel:
            assert len(reply(channel, model)) == 12
            began = time.monotonic()
            assert len(reply(channel, model, "stream")) == 12
            assert time.monotonic() - began < 4.0  # nothing waits for a ping or for being asked again
        with WebsocketChannel(server.url) as channel, pytest.raises(LinkRefused, match="not trusted"):
            channel.reconnect()
        with (
            WebsocketChannel(server.url.replace("wss", "ws"), connect_timeout=1) as channel,
            pytest.raises(LinkClosed, match="cannot be reached"),
        ):
            channel.reconnect()


def shown_certificate(url: str) -> str:
    host, port = url.removeprefix("wss://").split(":")
    return ssl.get_server_certificate((host, int(port)))


def until(holds, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def test_a_changed_certificate_is_used_without_a_restart(engine, model, tmp_path, caplog):
    (first, first_key), (second, second_key) = (new_certificate(tmp_path, name) for name in ("first", "second"))
    certificate, key = tmp_path / "in_use.pem", tmp_path / "in_use.key"
    shutil.copy(first, certificate)
    shutil.copy(first_key, key)
    with VerifierServer(engine, VerifierSettings(port=0, certificate=str(certificate), key=str(key))) as server:
        with (
            WebsocketChannel(server.url, ca_file=first) as channel,
            EdgeSession(channel, model, DecodeSettings(max_tokens=12)) as session,
        ):
            before = session.decode(IMAGE, "go").tokens
            for source, target in ((second, certificate), (second_key, key)):
                shutil.copy(source, tmp_path / "new")
                (tmp_path / "new").rename(target)
                server.reload()
                if target is certificate:  # the key does not fit yet: the pair before stays in use
                    assert until(lambda: "the one before stays in use" in caplog.text)
                    assert shown_certificate(server.url).split() == first.read_text().split()
            assert until(lambda: shown_certificate(server.url).split() == second.read_text().split())
            assert session.decode(IMAGE, "go").tokens == before  # the open connection goes on
        with WebsocketChannel(server.url, ca_file=second) as channel:
            assert reply(channel, model) == before


def test_an_encrypted_key_is_refused_without_a_question(engine, certificate, tmp_path):
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(certificate[1]), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    settings = VerifierSettings(port=0, certificate=str(certificate[0]), key=str(locked))
    with pytest.raises(ValueError, match=r"locked.pem is encrypted; decrypt it"):
        VerifierServer(engine, settings)


def test_a_certificate_that_is_none_is_refused(engine, certificate, tmp_path):
    wrong = VerifierSettings(port=0, certificate=str(certificate[1]), key=str(certificate[1]))
    with pytest.raises(ValueError, match="cannot be used"):
        VerifierServer(engine, wrong)
    with pytest.raises(ValueError, match="cannot be used"):
        WebsocketChannel("wss://127.0.0.1:1", ca_file=certificate[1])


def test_a_port_in_use_is_a_sentence(engine, url):
    port = int(url.rsplit(":", 1)[1])
    before = set(threading.enumerate())
    with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is in use; choose another"):
        VerifierServer(engine, VerifierSettings(port=port)).start()
    with pytest.raises(ServerError, match="cannot be listened on"):
        VerifierServer(engine, VerifierSettings(port=0, host="192.0.2.1", allow_unauthenticated=True)).start()
    assert set(threading.enumerate()) <= before


def test_garbage_is_refused_and_hurts_no_other_robot(url, model):
    with WebsocketChannel(url) as channel, EdgeSession(channel, model, DecodeSettings()) as session:
        first = session.decode(IMAGE, "go").tokens
        with connect(url, proxy=None) as vandal:
            frames = (b"", b"\xff" * 100, b"\x91" * 5000, "text", os.urandom(200))
            for frame in frames:
                vandal.send(frame)
                answer = decode(vandal.recv(timeout=10))
                assert isinstance(answer, Refusal) and answer.code == RefusalCode.MALFORMED
            # None after the one that ends the connection.
            for _ in range(MAX_MALFORMED_FRAMES + 1 - len(frames)):
                vandal.send(b"more")
            with pytest.raises(ConnectionClosed, match="too many malformed frames"):
                while True:
                    vandal.recv(timeout=10)
        with connect(url, proxy=None) as vandal:
            vandal.send(bytes(MAX_FRAME_BYTES + 1))
            with pytest.raises(ConnectionClosed, match="1009"):
                vandal.recv(timeout=10)
        with socket.create_connection(url.removeprefix("ws://").split(":")) as raw:
            raw.sendall(b"\x00\x01 no http at all\r\n\r\n")
            raw.settimeout(10)
            raw.recv(100)
        assert session.decode(IMAGE, "go").tokens == first


def test_a_robot_that_does_not_read_is_bounded_and_hurts_no_other(engine, model, url, monkeypatch):
    """Asks for the tokens of a long reply again and again, and never reads them."""
    monkeypatch.setattr(server_module, "MAX_UNSENT_FRAMES", 500)
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    narrow.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    with WebsocketChannel(url) as channel, connect(url, sock=narrow, proxy=None, max_queue=1) as silent:
        request = SessionRequest(1, PROTOCOL_VERSION, "stream", model.tokenizer_fingerprint, 8, 0.0, 0, 1.0, 0, 512)
        silent.send(encode(request))
        session = decode(silent.recv(timeout=10)).session
        silent.send(encode(Observation(session, 1, "go", 2, 2, "png", encode_picture(IMAGE))))
        with pytest.raises(ConnectionClosed):
            for number in range(60_000):
                silent.send(encode(DraftTokens(session, 1, number, 0)))
                time.sleep(0.001)
        assert len(reply(channel, model)) == 12


class Teller:
    """In the engine's place: says what the test tells it to."""

    answer = None
    target = LocalTarget(TableModel(1))
    model = target.model

    def __init__(self) -> None:
        self.metrics = Metrics(self)

    def submit(self, message, reply, peer) -> bool:
        self.answer = reply
        return True

    def disconnect(self, peer) -> None:
        pass

    def has_room(self) -> bool:
        return True


def said(number: int, confidence: float, token: int = 0, final: bool = False) -> Outcome:
    return Outcome(1, 1, number, 1, 0, token, round(confidence * 65535) / 65535, final)


def test_a_slow_link_carries_the_final_outcome_before_early_ones():
    """The robot does not read until the link is full and everything has been said."""
    teller = Teller()
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    request = SessionRequest(1, PROTOCOL_VERSION, "fsd", "", 8, 0.0, 0, 1.0, 0, 64)
    with VerifierServer(teller, SETTINGS) as server:
        narrow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        with connect(server.url, sock=narrow, proxy=None, max_queue=1) as robot:
            robot.send(encode(request))
            assert until(lambda: teller.answer)
            filler = Refusal(1, 1, 1, "code", "x" * 1024)
            for _ in range(2000):
                teller.answer(filler)
            for token in range(40):
                teller.answer(said(1, token / 40, token))
            teller.answer(said(2, 0.25, 1))
            teller.answer(said(2, 0.75, 2))
            final = said(1, 0.5, final=True)
            teller.answer(final)
            teller.answer(said(1, 1.0, 99))
            read = [decode(robot.recv(timeout=20)) for _ in range(2003)]
            with pytest.raises(TimeoutError):
                robot.recv(timeout=0.2)
    assert read[:2001] == [filler] * 2000 + [final]
    assert [early.next_token for early in read[2001:]] == [2, 1]


def test_early_outcomes_do_not_fill_the_pipe_in_front_of_the_final_one():
    """What the kernel has taken cannot be overtaken, and it would take all of these."""
    teller, count = Teller(), 10_000
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with VerifierServer(teller, SETTINGS) as server:
        narrow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        with connect(server.url, sock=narrow, proxy=None, max_queue=1) as robot:
            robot.send(encode(SessionRequest(1, PROTOCOL_VERSION, "fsd", "", 8, 0.0, 0, 1.0, 0, 64)))
            assert until(lambda: teller.answer)
            for token in range(count):
                teller.answer(said(1, 0.5, token))
                if token % 20 == 0:
                    time.sleep(0.001)  # the sender takes them as the link does
            teller.answer(said(1, 0.5, final=True))
            before = 0
            while not decode(robot.recv(timeout=20)).is_final:
                before += 1
    assert before < count / 10


def test_shutting_down_gives_threads_and_sockets_back(engine, model):
    before = set(threading.enumerate())
    server = VerifierServer(engine, SETTINGS)
    url = server.start()
    channel = WebsocketChannel(url)
    session = EdgeSession(channel, model, DecodeSettings(max_tokens=8))
    session.decode(IMAGE, "go")
    # One peer that will not answer the closing handshake.
    mute = socket.create_connection(url.removeprefix("ws://").split(":"))
    began = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began < 10
    with pytest.raises(LinkClosed):
        for _ in range(100):
            channel.receive(1)
    channel.close()
    mute.close()
    with VerifierServer(engine, VerifierSettings(port=int(url.rsplit(":", 1)[1]))):
        pass  # the port is free again
    assert until(lambda: set(threading.enumerate()) <= before)


def test_the_process_prints_its_address_and_ends_on_a_signal():
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "serve_model.py"), "table:1:0", "drain_s=60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("verifier of table-1 listening on ws://127.0.0.1:")
        with WebsocketChannel(line.split()[-1]) as channel:
            assert len(reply(channel, TableModel(1, ends=False))) == 12
            process.send_signal(signal.SIGHUP)  # it has no certificate to read again, and stays
            assert len(reply(channel, TableModel(1, ends=False))) == 12
            process.send_signal(signal.SIGINT)  # at once: nothing drains
            out, errors = process.communicate(timeout=20)
        assert process.returncode == 0 and out == "" and "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()
