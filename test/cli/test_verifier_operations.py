# SPDX-License-Identifier: Apache-2.0
"""`dsd verifier` as an operator runs it: a metrics port, log lines without secrets, a quick shutdown."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import numpy as np
import pytest
from in_process import dsd

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.logs import JsonFormatter, LogSettings, TextFormatter, logging_to_stderr
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.websocket import WebsocketChannel

SECRET = "correct-horse-battery"
INSTRUCTION = "go to the purple elephant"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_verifier_at_work_serves_who_has_its_token_and_ends_when_asked(models, picture, capsys, tmp_path):
    """Its tokens are those of a target in this process; metrics and log count what it does, without a secret."""
    token, wrong, port = tmp_path / "token", tmp_path / "wrong", free_port()
    token.write_text(SECRET)
    wrong.write_text("an0ther-one")
    for secret in (token, wrong):
        secret.chmod(0o600)
    command = [sys.executable, "-m", "dsd_ros.cli", "verifier", "--port", "0", "--model", str(models / "target")]
    command += ["--token-file", str(token), "--metrics-port", str(port), "--log-format", "json", "--log-level", "debug"]
    asked = ["decode", "--image", picture, "--instruction", INSTRUCTION, "--max-tokens", "24"]
    asked += ["--draft", models / "draft", "--target", models / "target", "--json"]
    said = tmp_path / "stderr"
    with said.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        url = re.search(r"ws://\S+", process.stdout.readline())[0]
        metrics = re.search(r"http://\S+", process.stdout.readline())[0]
        assert metrics == f"http://127.0.0.1:{port}/metrics"
        here, there = (dsd(capsys, *asked, *options) for options in ((), ("--verifier", url, "--token-file", token)))
        assert here[0] == there[0] == 0 and json.loads(here[1])["tokens"] == json.loads(there[1])["tokens"]
        for options in ([], ["--token-file", wrong]):
            code, out, err = dsd(capsys, *asked, "--verifier", url, *options)
            assert (code, out) == (3, "") and err.count("\n") == 1 and "token" in err and SECRET not in err
        draft = load_model(ModelSettings(str(models / "draft")))
        settings = DecodeSettings(mode="dsd", max_tokens=8)
        with WebsocketChannel(url, token=SECRET) as channel, EdgeSession(channel, draft, settings) as session:
            reply = session.decode(np.zeros((56, 56, 3), np.uint8), INSTRUCTION)
            number, ticket = session.verifier.session, session.verifier.ticket
        deadline, shown = time.monotonic() + 30, ""
        while f'rounds_total{{mode="dsd"}} {reply.rounds}.0' not in shown and time.monotonic() < deadline:
            shown = urlopen(metrics, timeout=30).read().decode()
            time.sleep(0.05)
        assert f'dsd_verifier_rounds_total{{mode="dsd"}} {reply.rounds}.0' in shown
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with socket.create_server(("127.0.0.1", port)):
        pass  # it was given back
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert {"session opened", "observation read"} <= {line["message"] for line in lines}
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    rounds = [line["round"] for line in lines if line["message"] == "round verified" and line["session"] == number]
    assert rounds == list(range(1, reply.rounds + 1))
    for text in (said.read_text(), shown):
        for secret in (SECRET, ticket.hex(), repr(ticket), INSTRUCTION, "elephant"):
            assert secret not in text


def record(message: str, *args, level=logging.INFO, **extra) -> logging.LogRecord:
    made = logging.LogRecord("dsd_ros.cloud.metrics", level, "", 0, message, args, None)
    vars(made).update(extra)
    return made


def test_a_line_says_what_it_is_about_and_a_peers_text_cannot_make_one():
    made = record(
        "refused: %s", "a\nERROR all is lost\x1b[31m", session=7, seconds=0.0125, ticket=b"x", websocket=object()
    )
    line = TextFormatter().format(made)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO dsd_ros\.cloud\.metrics: refused: a\\nERROR all is "
        r"lost\\x1b\[31m session=7 seconds=0\.013", line,
    )  # fmt: skip
    spoken = JsonFormatter().format(made)
    assert json.loads(spoken).keys() == {"time", "level", "logger", "message", "session", "seconds"}
    assert "\n" not in spoken and "\x1b" not in spoken


def test_logging_ends_with_its_block(capsys):
    log = logging.getLogger("dsd_ros.cloud.metrics")
    before = list(logging.getLogger().handlers)
    with logging_to_stderr(LogSettings(log_level="info")):
        log.info("session opened", extra={"session": 5})
        log.debug("not this")
        logging.getLogger("websockets.server").info("nor this")
    assert capsys.readouterr().err.rstrip().endswith("session opened session=5")
    assert logging.getLogger().handlers == before
    with pytest.raises(ValueError, match="log_format is 'xml'; use text or json"):
        LogSettings(log_format="xml")
