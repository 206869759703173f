# SPDX-License-Identifier: Apache-2.0
"""vLLM as the target, with a stand-in for its engine: the own target's tokens, and no wrong one when it misbehaves."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import vllm_standin
from by_hand import Robot
from hypothesis import given, strategies as st
from tiny_models import make_tiny_model
from vllm_standin import decode, decode_at_once, questions

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import BackendSettings, EngineSettings
from dsd_ros.cloud.vllm.engine import VllmEngine
from dsd_ros.cloud.vllm.target import MAX_LEAVES, EngineTarget, bounded, leaves_of, node_paths
from dsd_ros.decoding.coupling import choose, gumbel, gumbel_rows
from dsd_ros.decoding.sampling import transform
from dsd_ros.decoding.settings import DecodeSettings, SamplingSettings
from dsd_ros.decoding.tree import TokenTree
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model
from dsd_ros.wire.messages import Outcome, Refusal, RefusalCode
from dsd_ros.wire.pictures import encode_picture


@pytest.fixture
def standin(monkeypatch):
    vllm_standin.install(monkeypatch)


@pytest.fixture
def serve(standin, target_directory):
    """Makes (engine, vLLM, what its target was lost for)."""
    open_ones = []

    def make(timeout_s: float = 20.0, **backend):
        front = load_front(ModelSettings(str(target_directory)))
        lost: list[Exception] = []
        client = VllmEngine(front, BackendSettings("vllm", **backend), "float32")
        target = EngineTarget(front, client, timeout_s, lost.append)
        engine = VerifierEngine(target, EngineSettings(max_batch=8))
        open_ones.extend([engine, target])
        return engine, vllm_standin.AsyncLLM.last, lost

    yield make
    for one in open_ones:
        one.close()


@pytest.mark.parametrize(
    ("mode", "temperature"),  # the engine gives its likeliest token, its choice with the robot's noise, or whole rows
    [("stream", 0.0), ("mc-dsd", 0.0), ("fsd", 0.0), ("stream", 0.9), ("coupled", 0.9), ("dssd", 0.9)],
)
def test_every_mode_says_what_the_own_target_says(serve, target, draft, picture, mode, temperature):
    settings = DecodeSettings(mode=mode, temperature=temperature, seed=3, max_tokens=12)
    engine, vllm, lost = serve()
    asked = questions(picture, 2)
    with VerifierEngine(target) as own:
        assert decode(engine, draft, settings, asked) == decode(own, draft, settings, asked)
    assert not lost and vllm.requests > 4
    assert vllm.pixels_sent == 4  # a picture travels to the engine once a reply


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_other_families_say_what_the_own_target_says(standin, tmp_path, picture, family):
    from dsd_ros.cloud.vllm import worker

    made = str(make_tiny_model(tmp_path / "target", seed=5, family=family))
    like = load_model(ModelSettings(str(make_tiny_model(tmp_path / "draft", 5, noise=0.08, family=family))))
    settings, asked = DecodeSettings(mode="dsd", max_tokens=12), questions(picture, 2)
    front = load_front(ModelSettings(made))
    client = VllmEngine(front, BackendSettings("vllm"), "float32")
    with contextlib.closing(EngineTarget(front, client, 20.0, pytest.fail)) as served, VerifierEngine(served) as engine:
        vllm = vllm_standin.AsyncLLM.last
        (chosen,) = vllm.args.hf_overrides["architectures"]
        assert getattr(worker, chosen).is_pooling_model
        with VerifierEngine(load_model(ModelSettings(made))) as own:
            assert decode(engine, like, settings, asked) == decode(own, like, settings, asked)
        assert vllm.pixels_sent == 4


def test_eight_robots_at_once_get_what_each_gets_alone(serve, target, draft, picture):
    modes = [{"mode": "dsd"}, {"mode": "coupled", "temperature": 0.8}, {"mode": "mc-dsd"}, {"mode": "ar"}]
    plans = [DecodeSettings(seed=number, max_tokens=10, **modes[number % 4]) for number in range(8)]
    asked = questions(picture, 2)
    engine, vllm, _ = serve()
    found = decode_at_once(engine, draft, plans, asked)
    for number, plan in enumerate(plans):
        with VerifierEngine(target) as own:
            assert found[number] == decode(own, draft, plan, asked), plan.mode
    assert vllm.most > 1


@pytest.mark.parametrize("fault", ["rows", "forgets"])
@pytest.mark.parametrize("settings", [{"mode": "dsd"}, {"mode": "mc-dsd", "temperature": 0.9}])
def test_what_the_engine_lacks_it_is_asked_for_again(serve, target, draft, picture, fault, settings):
    plan = DecodeSettings(seed=1, max_tokens=10, **settings)
    engine, vllm, lost = serve()
    vllm.faults.extend(["", *[fault] * 400])
    asked = questions(picture, 1)
    with VerifierEngine(target) as own:
        assert decode(engine, draft, plan, asked) == decode(own, draft, plan, asked)
    assert not lost
    assert (vllm.asked_again if fault == "rows" else vllm.pixels_sent) > 1


@pytest.fixture
def robot(serve, picture):
    """A robot at the first round of a reply, with the engine and what it was lost for."""

    def make(timeout_s: float = 20.0):
        engine, vllm, lost = serve(timeout_s)
        found = Robot(engine)
        found.open()
        image = picture(0)
        found.observe(height=image.shape[0], width=image.shape[1], image=encode_picture(image))
        found.draft(1, 0, [1, 2])
        assert isinstance(found.get(), Outcome)
        return found, vllm, lost

    return make


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("error", "vLLM gave no answer: a worker failed"),
        ("raises", "vLLM refuses a request: the prompt is longer than the maximum"),
        ("nan", "the verifier's model failed on this"),
    ],
)
def test_a_failed_request_fails_its_round_alone(robot, target, picture, fault, sentence):
    robot, vllm, lost = robot()
    before = list(robot.engine._sessions.find(robot.session, robot.peer).reply.tokens)
    vllm.faults.append(fault)
    robot.draft(2, len(before), [3])
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == RefusalCode.MODEL_ERROR
    assert refusal.sentence.startswith(sentence) and "\n" not in refusal.sentence
    robot.draft(2, len(before), [3])  # nothing has changed, and the next attempt is right
    outcome = robot.get()
    sequence = target.prefill(picture(0), "go")
    sequence.append(before)
    rows = sequence.verify([3])
    assert (outcome.accepted, outcome.next_token) in [(0, int(rows[0].argmax())), (1, int(rows[1].argmax()))]
    assert not lost


@pytest.mark.parametrize(("fault", "reason"), [("dies", "has died"), ("silent", "no answer for 0.3 s")])
def test_a_lost_engine_answers_nothing_and_ends_the_verifier(robot, fault, reason):
    robot, vllm, lost = robot(0.3 if fault == "silent" else 20.0)
    vllm.faults.append(fault)
    robot.draft(2, len(robot.engine._sessions.find(robot.session, robot.peer).reply.tokens), [3])
    assert robot.silent(1.5)
    assert lost and reason in str(lost[0])


def test_an_idle_engine_that_dies_is_noticed(serve):
    _, vllm, lost = serve()
    vllm.errored = True
    for _ in range(100):
        if lost:
            break
        threading.Event().wait(0.05)
    assert "has died" in str(lost[0])


def test_a_lost_engine_ends_the_process_at_once():
    code = (
        "from dsd_ros.cloud.vllm.target import EngineLost, exit_without_answer; "
        "exit_without_answer(EngineLost('the engine has died'))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 70
    assert "the engine has died; this verifier exits, and its robots go on with the next one" in result.stderr


def test_a_slow_request_holds_up_no_other_robot(robot, picture):
    slow, vllm, _ = robot()
    quick = Robot(slow.engine)
    quick.open()
    vllm.faults.append("slow")
    slow.draft(2, len(slow.engine._sessions.find(slow.session, slow.peer).reply.tokens), [3])
    while vllm.faults:
        threading.Event().wait(0.01)
    image = picture(1)
    quick.observe(height=image.shape[0], width=image.shape[1], image=encode_picture(image))
    quick.draft(1, 0, [4])
    assert isinstance(quick.get(), Outcome) and slow.silent()
    vllm.free.set()
    assert slow.get().round == 2


def test_rows_of_another_width_are_another_model(robot):
    robot, vllm, _ = robot()
    robot.engine._sessions.find(robot.session, robot.peer)
    sampled = Robot(robot.engine)
    sampled.open(temperature=1.0, mode="dsd")
    sampled.observe(height=56, width=84, image=encode_picture(np.zeros((56, 84, 3), np.uint8)))
    vllm.faults.extend(["", "shape"])
    sampled.draft(1, 0, [])
    assert "is it another model?" in sampled.get().sentence


def test_padding_is_never_chosen_and_the_noise_is_the_robots(standin):
    from dsd_ros.cloud.vllm.worker import judged

    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[:, 30:] = 50.0
    logits[3] = torch.nan
    assert judged(logits, {"want": "argmax", "tokens": 30})[:, 0].tolist() == [
        *logits[:3, :30].argmax(-1).tolist(), -1.0, float(logits[4, :30].argmax()),
    ]  # fmt: skip
    sampling = {"temperature": 0.7, "top_k": 12, "top_p": 0.9}
    names = [(2**60 + 1, 5, position) for position in range(9)]
    found = judged(logits, {"want": "coupled", "tokens": 30, "names": names, **sampling})
    for row in (0, 1, 2, 4):
        p = transform(torch.cat([logits[row, :30], torch.full((10,), -torch.inf)]), SamplingSettings(**sampling))
        assert found[row, 0] == choose(p, gumbel(*names[4 + row], 40))
    assert judged(logits, {"want": "rows", "tokens": 30})[0, :30].equal(logits[0, :30])
    assert logits[0, 35] == 50.0  # the engine's own


def test_noise_on_a_device_has_the_same_bits():
    names = [(seed, reply, position) for seed in (0, 2**64 - 1) for reply in (0, 9) for position in (0, 77)]
    for row, name in zip(gumbel_rows(names, 3000, "cpu"), names, strict=True):
        assert np.array_equal(row.numpy(), gumbel(*name, 3000))


@st.composite
def trees(draw):
    parents: list[int] = []
    for node in range(draw(st.integers(0, 64))):
        parents.append(draw(st.integers(max([-1, *parents[-1:]]), min(node - 1, max([-1, *parents[-1:]]) + 9))))
    return TokenTree(
        tuple(draw(st.lists(st.integers(0, 5), min_size=len(parents), max_size=len(parents)))), tuple(parents)
    )


@given(trees())
def test_leaves_cover_each_node_once(tree):
    tree = bounded(tree)
    paths = node_paths(tree, 4)
    leaves = leaves_of(paths)
    assert len(leaves) <= MAX_LEAVES
    covered = [leaf[:end] for leaf, rows in leaves for end in range(len(leaf) - rows + 1, len(leaf) + 1)]
    assert sorted(covered) == sorted(set(paths))


def test_a_bushy_tree_is_verified_as_far_as_its_leaves_allow():
    wide = TokenTree(tuple(range(4)) + tuple(range(40)), (-1,) * 4 + tuple(node // 10 for node in range(40)))
    assert len(bounded(wide)) == 4
    assert len(bounded(TokenTree(tuple(range(40)), (-1,) * 40))) == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"engine_args": '{"no_such": 1}'}, "vLLM does not take these engine_args: .*no_such"),
        ({"engine_args": "{"}, "engine_args is no JSON"),
        ({"engine_args": "[]"}, "engine_args is JSON but no object"),
        ({"engine_timeout_s": 0.0}, "engine_timeout_s is 0.0; use 0.1 to 3600 seconds"),
    ],
)
def test_backend_settings_that_cannot_be_used(serve, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        serve(**{"timeout_s": 1.0} | given) if "engine_timeout_s" not in given else BackendSettings("vllm", **given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"backend": "tgi"}, "backend is 'tgi'; use local or vllm"),
        ({"backend": "local", "tensor_parallel": 2}, "tensor_parallel is for backend vllm, and the backend is local"),
    ],
)
def test_backends_that_do_not_exist_or_lack_something(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        BackendSettings(**given)


def test_without_vllm_or_the_plug_in_the_remedy_is_named(target_directory, standin, monkeypatch):
    import dsd_ros.cloud.vllm.engine as module

    front = load_front(ModelSettings(str(target_directory)))
    monkeypatch.setattr(module, "entry_points", lambda **_: [])
    with pytest.raises(ModelError, match="do not find dsd_ros.*make vllm-venv"):
        VllmEngine(front, BackendSettings("vllm"), "float32")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs the package vllm in this environment; make vllm-venv"):
        VllmEngine(front, BackendSettings("vllm"), "float32")


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
