# SPDX-License-Identifier: Apache-2.0
"""A real vLLM as the target, in .venv-vllm: replies, steps, distributions, and what is left of a killed one.

`make test-engine` runs these. DSD_VLLM_VENV names another environment than .venv-vllm.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from joint import chi_squared

from dsd_lab.bench.scenes import Scene, held_out_scenes
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings, SamplingSettings
from dsd_ros.edge.client import LinkSettings, VerifierRefused
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LinkClosed, LocalChannel
from dsd_ros.wire.messages import PROTOCOL_VERSION, DraftTokens, Observation, SessionRequest, VerifiedTokens
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.websocket import WebsocketChannel

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("DSD_VLLM_VENV", ROOT / ".venv-vllm")) / "bin"
PATIENT = LinkSettings(response_timeout_s=60.0, attempts=5)
RESTARTS = LinkSettings(response_timeout_s=60.0, attempts=60)  # vLLM takes half a minute to start
ROBOTS, REPLIES = 8, 100
SMALL = '{"enforce_eager": true, "kv_cache_memory_bytes": 536870912}'
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not BIN.exists(), reason="no .venv-vllm: make vllm-venv")]


def command(*options: str) -> list[str]:
    model = [] if "--model" in options else ["--model", str(ROOT / "models" / "target")]
    return [str(BIN / "dsd"), "verifier", "--backend", "vllm", *model, "--port", "0", *options]


class Served:
    """`dsd verifier --backend vllm` with the shipped target."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            command("--engine-args", SMALL, *options), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on ws" in line, line
        self.url = line.split()[-1]

    def engine(self) -> list[int]:
        """vLLM's engine and its workers."""
        found = _children(self.process.pid, "EngineCor")
        return [*found, *_children(found[0], "Worker")]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        self.process.stdout.close()


def _children(pid: int, name: str) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if name in line]


def all_end(pids: Sequence[int], seconds: float = 20.0) -> bool:
    """Whether these processes have ended within ``seconds``."""
    until = time.monotonic() + seconds
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]
        os.close(handle)
        if not ended:
            return False
    return True


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    one = Served()
    yield one
    pids = one.engine()
    one.close()
    assert all_end(pids)


@pytest.fixture(scope="module")
def pair():
    return [load_model(ModelSettings(str(ROOT / "models" / name), threads=1)) for name in ("draft", "target")]


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return held_out_scenes(25)


@pytest.fixture(scope="module")
def own(pair, scenes):
    """What the built-in target says to each of the scenes, greedily."""
    return said(pair[1], scenes)


def said(target: Any, scenes: Sequence[Scene]) -> list[list[int]]:
    with (
        VerifierEngine(target) as engine,
        LocalChannel(engine) as channel,
        EdgeSession(channel, None, DecodeSettings(mode="ar"), PATIENT) as session,
    ):
        return [session.decode(scene.image, scene.instruction).tokens for scene in scenes]


class Robot:
    """Drafts what it is told, all of it before the observation."""

    def __init__(self, url: str, target: Any, temperature: float = 0.0, max_tokens: int = 64, seed: int = 0) -> None:
        self.channel = WebsocketChannel(url)
        self.channel.reconnect()
        self.channel.send(
            SessionRequest(
                1, PROTOCOL_VERSION, "stream", target.tokenizer_fingerprint, target.vocab_size, temperature, 0, 1.0,
                seed, max_tokens,
            )
        )  # fmt: skip
        self.session, self.number = self.channel.receive(30.0).session, 0

    def reply(self, scene: Scene, draft: Sequence[int], verified: Sequence[int] = ()) -> tuple[list[int], int]:
        """The tokens of a reply, and how many steps they took."""
        self.number += 1
        if draft:
            self.channel.send(DraftTokens(self.session, self.number, 1, len(verified), list(draft)))
        height, width = scene.image.shape[:2]
        png = encode_picture(scene.image)
        self.channel.send(
            Observation(
                self.session, self.number, scene.instruction, height, width, "png", png, verified=list(verified)
            )
        )
        tokens, steps = list(verified), 0
        while True:
            message = self.channel.receive(30.0)
            assert isinstance(message, VerifiedTokens) and message.at == len(tokens), message
            tokens += message.tokens
            steps += 1
            if message.ended:
                return tokens, steps


def at_once(url: str, draft: Any, mode: str, scenes: Sequence[Scene], replies: int) -> list[tuple[int, Any]]:
    """(scene, reply) of as many robots at once as ROBOTS, ``replies`` in all."""

    def drive(robot: int) -> list[tuple[int, Any]]:
        settings = DecodeSettings(mode=mode)
        with WebsocketChannel(url) as channel, EdgeSession(channel, draft, settings, PATIENT) as session:
            mine = [number % len(scenes) for number in range(robot, replies, ROBOTS)]
            return [(n, session.decode(scenes[n].image, scenes[n].instruction)) for n in mine]

    with ThreadPoolExecutor(ROBOTS) as pool:
        return [one for found in pool.map(drive, range(ROBOTS)) for one in found]


@pytest.mark.parametrize("mode", ["stream", "ar"])
def test_every_reply_of_eight_robots_at_once_is_the_own_targets(served, pair, scenes, own, mode):
    found = at_once(served.url, pair[0], mode, scenes, REPLIES)
    assert len(found) == REPLIES and all(reply.tokens == own[n] for n, reply in found)
    accepted = sum(record.accepted for _, reply in found for record in reply.records)
    assert accepted == 0 if mode == "ar" else accepted > REPLIES


def test_a_known_reply_of_29_tokens_takes_at_most_6_steps(served, pair, scenes, own):
    """This fails where vLLM silently does not ask for drafts."""
    long = [n for n, tokens in enumerate(own) if len(tokens) > 29]
    robot = Robot(served.url, pair[1], max_tokens=29)
    for n in long[:5]:
        tokens, steps = robot.reply(scenes[n], own[n][:29])
        assert tokens == own[n][:29] and steps <= 6
        tokens, steps = robot.reply(scenes[n], [])
        assert tokens == own[n][:29] and steps > 12  # vLLM tells a slow reader of several at once
        tokens, steps = robot.reply(scenes[n], own[n][10:29], own[n][:10])  # another verifier has begun it
        assert tokens == own[n][:29] and steps <= 4


def test_wrong_drafts_and_ids_of_no_token_change_nothing(served, pair, scenes, own):
    size = pair[1].vocab_size
    robot = Robot(served.url, pair[1])
    for n in range(5):
        right = own[n][:60]
        wrong = [token if place % 5 else (token + 1) % size for place, token in enumerate(right, 1)]
        for draft in (wrong, [size, *right], [right[0], size + 5, *right], [2**20 - 1] * 60, right[1:]):
            assert robot.reply(scenes[n], draft)[0] == own[n]


def test_what_is_no_draft_leaves_the_engine_alive(served, pair, scenes, own):
    engine = served.engine()[0]
    opened = [path.readlink() for path in Path(f"/proc/{engine}/fd").iterdir()]
    with next(path for path in opened if path.name.startswith("drafts-")).open("wb", buffering=0) as pipe:
        rng = np.random.default_rng(0)
        for size in (1, 40, 4000):
            data = rng.bytes(size)
            pipe.write(size.to_bytes(2, "little") + data)
    for _ in range(3):
        assert Robot(served.url, pair[1]).reply(scenes[0], own[0][:40])[0] == own[0]


def test_sampled_tokens_follow_the_targets_distribution_with_drafts(served, pair, scenes, own):
    sampling, scene, target = SamplingSettings(temperature=1.5), scenes[0], pair[1]
    draft = own[0][:4]

    def drive(seed: int) -> list[list[int]]:
        robot = Robot(served.url, target, temperature=sampling.temperature, max_tokens=4, seed=seed)
        found = [robot.reply(scene, draft) for _ in range(100)]
        steps.extend(steps for tokens, steps in found if tokens == draft)
        return [tokens for tokens, _ in found]

    steps: list[int] = []
    with ThreadPoolExecutor(ROBOTS) as pool:
        replies = [tokens for found in pool.map(drive, range(ROBOTS)) for tokens in found]
    assert steps and np.mean(steps) < 3  # drafts were verified
    checked = 0
    for known in range(1, 4):
        following = Counter(tokens[known] for tokens in replies if tokens[:known] == draft[:known])
        if following.total() < 100:
            break
        sequence = target.prefill(scene.image, scene.instruction)
        sequence.append(draft[:known])
        p = transform(sequence.next_logits(), sampling).double().numpy()
        assert chi_squared(np.array([following[token] for token in range(len(p))]), p) > 1e-4
        checked += 1
    assert checked >= 2


def test_a_models_repetition_penalty_counts_with_drafts_too(tmp_path, scenes, own):
    """Prompt, reply and drafted tokens are penalized, as in transformers and so in the built-in target."""
    folders = []
    for name in ("draft", "target"):
        shutil.copytree(ROOT / "models" / name, tmp_path / name)
        config = tmp_path / name / "generation_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.5}))
        folders.append(load_model(ModelSettings(str(tmp_path / name), threads=1)))
    draft, target = folders
    expected = said(target, scenes)
    assert sum(a != b for a, b in zip(expected, own, strict=True)) > len(scenes) / 5
    one = Served("--model", str(tmp_path / "target"))
    found = at_once(one.url, draft, "stream", scenes, REPLIES)
    one.close()
    assert all(reply.tokens == expected[n] for n, reply in found)
    assert sum(record.accepted for _, reply in found for record in reply.records) > REPLIES


def test_what_vllm_cannot_do_is_refused_by_a_sentence(served, pair, scenes):
    with (
        pytest.raises(VerifierRefused, match=r"vLLM refuses it: temperature must be in \[0, 2\], got 3"),
        WebsocketChannel(served.url) as channel,
        EdgeSession(channel, pair[0], DecodeSettings(temperature=3.0)) as session,
    ):
        session.decode(scenes[0].image, scenes[0].instruction)
    with (
        pytest.raises(VerifierRefused, match="mode dsd needs; use mode stream or ar, or use .* --backend local"),
        WebsocketChannel(served.url) as channel,
        EdgeSession(channel, pair[0], DecodeSettings(mode="dsd")) as session,
    ):
        session.decode(scenes[0].image, scenes[0].instruction)


def test_without_drafts_it_says_the_same_and_a_silent_engine_ends_it(pair, scenes, own):
    one = Served("--no-drafts", "--engine-timeout-s", "5")
    robot = Robot(one.url, pair[1])
    for n in range(5):
        tokens, steps = robot.reply(scenes[n], own[n][:60])
        assert tokens == own[n] and steps > 12
    pids = one.engine()
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(LinkClosed):  # no answer, so that a robot goes on elsewhere
        robot.reply(scenes[0], [])
    assert one.process.wait(20) == 70 and all_end(pids)


def test_a_reply_goes_on_after_its_engine_was_killed_and_nothing_is_left_of_it(pair, scenes, own):
    first = Served()
    replaced: list[Served] = []
    pids = first.engine()

    def replace() -> None:
        os.kill(pids[0], signal.SIGKILL)
        assert first.process.wait(20) == 70
        assert all_end(pids)
        replaced.append(Served("--port", first.url.rpartition(":")[2]))

    killer = threading.Thread(target=replace)
    with WebsocketChannel(first.url) as channel, EdgeSession(channel, pair[0], DecodeSettings(), RESTARTS) as session:
        session.decode(scenes[0].image, scenes[0].instruction)
        begun, seen = time.monotonic(), []

        def watch(*_: object) -> None:
            seen.append(1)
            if len(seen) == 2:
                killer.start()
                time.sleep(0.5)

        found = session.decode(scenes[1].image, scenes[1].instruction, on_progress=watch)
    killer.join()
    pids = replaced[0].engine()
    replaced[0].process.kill()  # not even then
    assert all_end(pids)
    replaced[0].process.wait()
    assert found.tokens == own[1] and time.monotonic() - begun > 1.0


def test_a_failed_start_says_why():
    few = '{"enforce_eager": true, "kv_cache_memory_bytes": 1}'
    found = subprocess.run(command("--engine-args", few), capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert found.returncode
    (said,) = [line for line in found.stderr.splitlines() if "vLLM cannot load the model in" in line]
    assert "memory" in said and "See root cause" not in said


MOVED = """
import sys
import dsd_ros.cloud.vllm
from vllm.v1.core.sched.scheduler import Scheduler
from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.vllm.engine import engine_arguments
from dsd_ros.vlm.loading import load_front
from dsd_ros.vlm.settings import ModelSettings
front = load_front(ModelSettings(r"{model}"))
for moved in (False, True):
    if moved:
        del sys.modules["dsd_ros.cloud.vllm.scheduler"], dsd_ros.cloud.vllm.scheduler
        Scheduler.update_draft_token_ids = lambda self, drafts, more: None
    arguments, without = engine_arguments(front, BackendSettings("vllm"), "float32")
    print(arguments.scheduler_cls, bool(arguments.speculative_config), without)
"""


def test_a_vllm_that_has_moved_starts_as_it_is():
    script = MOVED.format(model=ROOT / "models" / "target")
    found = subprocess.run(
        [BIN / "python", "-c", script], capture_output=True, text=True, env=ENVIRONMENT, timeout=120, check=True
    )
    ours, stock = found.stdout.splitlines()[-2:]
    assert ours.split() == ["dsd_ros.cloud.vllm.scheduler.DraftScheduler", "True"]
    assert stock.startswith(
        "None False this vLLM is not as it is known here (its scheduler takes drafts in another way"
    )
