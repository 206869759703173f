# SPDX-License-Identifier: Apache-2.0
"""vLLM as the target, as far as that can be tried without vLLM; with it: test_vllm_engine.py."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from by_hand import Robot

import dsd_ros.cloud.vllm.engine as module
from dsd_ros.cloud.settings import BackendSettings
from dsd_ros.cloud.vllm import CAUSE
from dsd_ros.cloud.vllm.pipe import DraftReader, DraftWriter
from dsd_ros.cloud.vllm.target import VllmTarget
from dsd_ros.decoding.generation import TokenOptions
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_front
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import Draft, DraftTokens

PROCESSES = Path(__file__).parents[1] / "support" / "engine_processes.py"


def test_drafts_reach_the_engines_process_whole_and_in_order(tmp_path):
    reader = DraftReader(str(tmp_path))
    writer = DraftWriter(str(tmp_path))
    sent = [DraftTokens(3, 1, n, 4 * n, list(range(n, n + 64))) for n in range(20)]
    for message in sent:
        writer.send(message)
    assert list(reader.read()) == sent
    assert list(reader.read()) == []
    writer.close()


def test_what_is_no_draft_never_passes_and_a_full_pipe_holds_nobody_up(tmp_path):
    reader = DraftReader(str(tmp_path))
    writer = DraftWriter(str(tmp_path))
    good = DraftTokens(1, 1, 1, 0, [5])
    frames = [b"", b"\xc1", encode(Draft(1, 1, 1, 0, [1])), encode(good)[:-1], os.urandom(60), encode(good)]
    os.write(writer._pipes[0], b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames))
    assert list(reader.read()) == [good]
    for _ in range(3000):  # far more than it holds
        writer.send(DraftTokens(1, 1, 1, 0, [511] * 64))
    found = [message for _ in range(3) for message in reader.read()]
    assert 100 < len(found) < 3000
    assert all(message.tokens == [511] * 64 for message in found)
    writer.close()
    writer = DraftWriter(str(tmp_path))
    writer.send(good)
    assert list(reader.read()) == [good]
    writer.close()


def test_an_engine_and_its_workers_end_with_a_killed_verifier(tmp_path):
    with subprocess.Popen([sys.executable, PROCESSES, tmp_path], stdout=subprocess.PIPE, text=True) as verifier:
        assert verifier.stdout is not None
        ended = [os.pidfd_open(int(pid)) for pid in verifier.stdout.readline().split()]
        assert len(ended) == 2 and not select.select(ended, [], [], 0)[0]
        verifier.kill()
        for one in ended:
            assert select.select([one], [], [], 20)[0]
            os.close(one)


def test_a_failing_engine_leaves_word_of_the_first_cause(tmp_path):
    subprocess.run([sys.executable, PROCESSES, tmp_path, "no weights here\nsecond line"], check=True, timeout=60)
    assert (tmp_path / CAUSE).read_text() == "no weights here"


def test_a_lost_engine_ends_the_process_at_once():
    code = "from dsd_ros.cloud.vllm.target import exit_without_answer; exit_without_answer('the engine has died')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 70
    assert "the engine has died; this verifier exits, and its robots go on with the next one" in result.stderr


@pytest.mark.parametrize("mode", PRESETS)
def test_modes_that_need_distributions_are_refused(target, mode):
    robot = Robot(SimpleNamespace(model=target))
    check = VllmTarget.__new__(VllmTarget).check
    if mode in ("stream", "ar"):
        check(robot.request(mode=mode), None)
        with pytest.raises(ValueError, match="does not hold replies to a form; set constrain to none, or use .* local"):
            check(robot.request(mode=mode, grammar="go\n"), None)
    else:
        with pytest.raises(ValueError, match=f"no distributions, which mode {mode} needs; use mode stream or ar, or"):
            check(robot.request(mode=mode), None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"backend": "tgi"}, "backend is 'tgi'; use local or vllm"),
        ({"backend": "local", "tensor_parallel": 2}, "tensor_parallel is for backend vllm, and the backend is local"),
        ({"backend": "local", "drafts": False}, "drafts is for backend vllm, and the backend is local"),
        ({"backend": "vllm", "engine_args": "{"}, "engine_args is no JSON"),
        ({"backend": "vllm", "engine_args": "[]"}, "engine_args is JSON but no object"),
        ({"backend": "vllm", "engine_timeout_s": 0.0}, "engine_timeout_s is 0.0; use 0.1 to 3600 seconds"),
    ],
)
def test_backends_that_do_not_exist_or_lack_something(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        BackendSettings(**given)


def test_options_of_a_model_that_vllm_does_not_follow_are_named():
    assert module.ignored_options(TokenOptions(repetition_penalty=1.05)) == []
    options = TokenOptions(repetition_penalty=1.05, min_new_tokens=3, suppress_tokens=(7,))
    assert module.ignored_options(options) == ["min_new_tokens", "suppress_tokens"]


def test_without_vllm_or_the_plug_in_the_remedy_is_named(target_directory, monkeypatch):
    front = load_front(ModelSettings(str(target_directory)))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package vllm in this environment; make vllm-venv"):
        VllmTarget(front, BackendSettings("vllm"), "float32")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "entry_points", lambda **_: [])
    with pytest.raises(ModelError, match="do not find dsd_ros.*make vllm-venv"):
        VllmTarget(front, BackendSettings("vllm"), "float32")


def test_a_model_without_its_weights_says_the_same_of_itself(target, target_directory, picture):
    front = load_front(ModelSettings(str(target_directory)))
    for name in (
        "name", "fingerprint", "tokenizer_fingerprint", "vocab_size", "num_layers", "max_length", "eos_token_ids",
    ):  # fmt: skip
        assert getattr(front, name) == getattr(target, name), name
    past = [(picture(1), "stop")]
    assert front.prompt(picture(0), "go", past).tokens == target.prompt_tokens("go", 6, [(6, "stop")])
    for image, text, history in [(None, "go", past), (picture(0, 2, 900), "go", []), (picture(0), "x" * 900, [])]:
        with pytest.raises(ValueError) as expected:
            target.prefill(image, text, history)
        with pytest.raises(type(expected.value)) as found:
            front.prompt(image, text, history)
        assert str(found.value) == str(expected.value)
