# SPDX-License-Identifier: Apache-2.0
"""`dsd serve` as a user runs it: a process that ends when asked, and other people's programs in front of it."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from in_process import dsd

# The official client, an agent framework's, and a load tool.
PROGRAMS = ("openai", "langchain-openai", "locust")


@contextmanager
def serving(models: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The base URL and the process."""
    command = [sys.executable, "-m", "dsd_ros.cli", "serve", "--port", "0", *options]
    command += ["--draft", str(models / "draft"), "--target", str(models / "target")]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0], process
    finally:
        process.kill()
        process.wait()


def ask(url: str, **fields):
    body = {"model": "target", "messages": [{"role": "user", "content": "go"}]} | fields
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urlopen(request, timeout=60)


def test_ctrl_c_ends_it_within_two_seconds_in_the_middle_of_a_stream(models):
    with serving(models) as (url, process):
        with ask(url, max_tokens=8) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 8
        with ask(url, stream=True, max_tokens=400) as stream:
            assert stream.readline().startswith(b"data: ")
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0 and time.monotonic() - began < 2


def test_it_keeps_to_this_machine_without_a_token(capsys):
    code, _, err = dsd(capsys, "serve", "--host", "0.0.0.0")
    assert code == 2 and "api_token_file is not set" in err and err.count("\n") == 1


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Callable[..., str]:
    """Runs a program of an environment with ``PROGRAMS`` from PyPI; what it printed."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *PROGRAMS]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"PyPI gives no {', '.join(PROGRAMS)}: {done.stderr.strip().splitlines()[-1]}")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_PRELOAD")}

    def run(name: str, *words: str | Path, **more: str) -> str:
        command = [folder / "bin" / name, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment | more)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout + done.stderr

    return run


OPENAI = """
import json, sys
import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
(model,) = [each.id for each in client.models.list()]
url = {"type": "image_url", "image_url": {"url": sys.argv[2]}}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ["text", url]}]
messages[1]["content"][0] = {"type": "text", "text": "go"}
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24)
parts = list(client.chat.completions.create(
    model=model, messages=messages, max_tokens=24, stream=True, stream_options={"include_usage": True}
))
try:
    client.chat.completions.create(model=model, messages=messages, n=2)
except openai.BadRequestError as error:
    refused = error.param
print(json.dumps({
    "whole": whole.choices[0].message.content, "usage": whole.usage.model_dump(), "refused": refused,
    "streamed": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
    "streamed_usage": parts[-1].usage.model_dump(),
}))
"""
LANGCHAIN = """
import sys
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(model="target", base_url=sys.argv[1], api_key="none", temperature=0, max_tokens=24)
content = [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": {"url": sys.argv[2]}}]
messages = [("system", "Be brief."), ("user", content)]
said = llm.invoke(messages).content
assert "".join(part.content for part in llm.stream(messages)) == said
sys.stdout.write(said)
"""
LOCUST = """
import locust
from locust.contrib.oai import OpenAIUser


class Robot(OpenAIUser):
    host = ""

    @locust.task
    def ask(self):
        messages = [{"role": "user", "content": "go"}]
        self.client.chat.completions.create(model="target", messages=messages, max_tokens=8)
"""


@pytest.mark.slow
def test_other_peoples_programs_take_it_for_openai(models, picture, program, tmp_path):
    data = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    with serving(models) as (url, _):
        found = json.loads(program("python", "-c", OPENAI, url, data))
        assert found["whole"] == found["streamed"] and found["refused"] == "n"
        for usage in (found["usage"], found["streamed_usage"]):
            details = usage["completion_tokens_details"]
            assert 0 <= details["accepted_prediction_tokens"] < usage["completion_tokens"] <= 24
            assert details["rejected_prediction_tokens"] >= 0
        assert program("python", "-c", LANGCHAIN, url, data).strip() == found["whole"].strip()
        file = tmp_path / "locustfile.py"
        file.write_text(LOCUST)
        options = ["--headless", "-u", "4", "-r", "4", "-t", "5s", "--only-summary"]
        said = program("locust", "-f", file, *options, OPENAI_BASE_URL=url, OPENAI_API_KEY="none")
        assert re.search(r"Aggregated +[1-9]\d* +0\(0", said)
