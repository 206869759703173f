# SPDX-License-Identifier: Apache-2.0
"""A real vLLM as the target, in .venv-vllm: 306 replies of eight robots at once, a killed engine.

`make test-engine` runs these. DSD_VLLM_VENV names another environment than .venv-vllm.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsd_lab.bench.scenes import held_out_scenes
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.websocket import WebsocketChannel

ROOT = Path(__file__).resolve().parents[2]
DSD = Path(os.environ.get("DSD_VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "dsd"
PATIENT = LinkSettings(response_timeout_s=60.0, attempts=5)
RESTARTS = LinkSettings(response_timeout_s=60.0, attempts=60)  # vLLM takes half a minute to start
ROBOTS, REPLIES = 8, 17  # for each of 18 settings: 306 in all
SETTINGS = [DecodeSettings(mode=mode, temperature=t, seed=7) for mode in PRESETS for t in (0.0, 0.9)]
ENVIRONMENT = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not DSD.exists(), reason="no .venv-vllm: make vllm-venv")]


class Served:
    """`dsd verifier --backend vllm` with the shipped target."""

    def __init__(self, port: int = 0) -> None:
        options = ["--engine-args", '{"enforce_eager": true, "block_size": 32}', "--engine-timeout-s", "30"]
        command = [DSD, "verifier", "--backend", "vllm", "--port", str(port), "--model", ROOT / "models" / "target"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on ws" in line, line
        self.url = line.split()[-1]

    def engine(self) -> int:
        """The process of vLLM's engine."""
        listed = subprocess.run(
            ["ps", "-o", "pid=,comm=", "--ppid", str(self.process.pid)], capture_output=True, text=True
        )
        return next(int(line.split()[0]) for line in listed.stdout.splitlines() if "EngineCor" in line)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


@pytest.fixture(scope="module")
def pair():
    return [load_model(ModelSettings(str(ROOT / "models" / name), threads=1)) for name in ("draft", "target")]


def check_replies(url: str, pair: Any, plans: list[DecodeSettings], replies: int) -> None:
    """Eight robots at once get the own target's replies, ``replies`` of each setting."""
    draft, target = pair
    scenes = held_out_scenes(replies)
    work: queue.SimpleQueue[DecodeSettings] = queue.SimpleQueue()
    for settings in plans:
        work.put(settings)
    found: dict[DecodeSettings, list[list[int]]] = {}
    failures: list[BaseException] = []

    def drive() -> None:
        try:
            while True:
                settings = work.get_nowait()
                with WebsocketChannel(url) as channel, EdgeSession(channel, draft, settings, PATIENT) as session:
                    found[settings] = [session.decode(scene.image, scene.instruction).tokens for scene in scenes]
        except queue.Empty:
            pass
        except BaseException as error:
            failures.append(error)

    robots = [threading.Thread(target=drive) for _ in range(ROBOTS)]
    for robot in robots:
        robot.start()
    for robot in robots:
        robot.join()
    assert not failures
    same = 0
    with VerifierEngine(target) as engine:
        for settings in plans:
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings, PATIENT) as session:
                own = [session.decode(scene.image, scene.instruction).tokens for scene in scenes]
            equal = sum(x == y for x, y in zip(own, found[settings], strict=True))
            print(f"{settings.mode:8} {settings.proof:8} temperature {settings.temperature}: {equal} of {replies}")
            same += equal
    assert same == len(plans) * replies


def test_every_reply_of_eight_robots_at_once_is_the_own_targets(served, pair):
    check_replies(served.url, pair, SETTINGS, REPLIES)


def test_a_reply_goes_on_after_its_engine_was_killed(pair):
    draft, target = pair
    scene = held_out_scenes(1)[0]
    settings = DecodeSettings(mode="dsd", temperature=0.9, seed=3)
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, draft, settings, RESTARTS) as session,
    ):
        _, own = [session.decode(scene.image, scene.instruction).tokens for _ in range(2)]
    first = Served()
    replaced: list[Served] = []

    def replace() -> None:
        os.kill(first.engine(), signal.SIGKILL)
        assert first.process.wait(20) == 70
        replaced.append(Served(int(first.url.rpartition(":")[2])))

    killer = threading.Thread(target=replace)
    with WebsocketChannel(first.url) as channel, EdgeSession(channel, draft, settings, RESTARTS) as session:
        session.decode(scene.image, scene.instruction)
        begun = time.monotonic()
        seen: list[int] = []

        def watch(*_: object) -> None:
            seen.append(1)
            if len(seen) == 2:
                killer.start()
                time.sleep(0.5)

        found = session.decode(scene.image, scene.instruction, on_progress=watch)
    killer.join()
    replaced[0].close()
    assert found.tokens == own and time.monotonic() - begun > 1.0
