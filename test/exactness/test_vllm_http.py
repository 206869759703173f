# SPDX-License-Identifier: Apache-2.0
"""A vLLM that somebody else runs: the own target's tokens, and no wrong one from a stand-in that misbehaves."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import closing

import pytest
import vllm_http_standin
import vllm_standin
from by_hand import Robot
from tiny_models import make_tiny_model
from vllm_standin import decode, decode_at_once, questions

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import BackendSettings, EngineSettings, VerifierSettings
from dsd_ros.cloud.vllm import http
from dsd_ros.cloud.vllm.http import HttpEngine
from dsd_ros.cloud.vllm.target import EngineTarget
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import LinkSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model
from dsd_ros.wire.messages import Outcome, Refusal, RefusalCode
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.websocket import WebsocketChannel

GREEDY = [{"mode": "dsd"}, {"mode": "ar"}, {"mode": "fsd"}, {"mode": "mc-dsd"}, {"mode": "coupled"}]
COUPLED = [{"mode": "coupled"}, {"mode": "fsd", "proof": "coupled"}, {"mode": "ar", "proof": "coupled"}]
PLANS = [plan | {"temperature": 0.0} for plan in GREEDY] + [
    plan | {"temperature": 0.9, "top_k": 12} for plan in COUPLED
]


@pytest.fixture
def vllm(monkeypatch, target_directory):
    vllm_standin.install(monkeypatch)
    with closing(vllm_http_standin.VllmServer(str(target_directory))) as server:
        yield server


@pytest.fixture
def connect(vllm, target_directory):
    """Makes a target that asks the server."""
    open_ones = []

    def make(timeout_s: float = 60.0, **backend):
        settings = BackendSettings("vllm-http", engine_url=vllm.url, engine_timeout_s=timeout_s, **backend)
        front = load_front(ModelSettings(str(target_directory)))
        open_ones.append(EngineTarget(front, HttpEngine(front, settings), timeout_s, pytest.fail))
        return open_ones[-1]

    yield make
    for one in open_ones:
        one.close()


@pytest.fixture
def serve(connect):
    """Makes an engine whose target asks the server."""
    open_ones = []

    def make(timeout_s: float = 60.0, **backend):
        open_ones.append(VerifierEngine(connect(timeout_s, **backend), EngineSettings(max_batch=8)))
        return open_ones[-1]

    yield make
    for one in open_ones:
        one.close()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_what_can_be_served_says_what_the_own_target_says(serve, vllm, target, draft, picture, plan):
    settings = DecodeSettings(seed=3, max_tokens=12, **plan)
    engine, asked = serve(), questions(picture, 2)
    probed = vllm.pixels_sent, vllm.without_cache
    with VerifierEngine(target) as own:
        assert decode(engine, draft, settings, asked) == decode(own, draft, settings, asked)
    # A picture travels to the server once a reply, and the prefix cache serves every round.
    assert (vllm.pixels_sent, vllm.without_cache) == (probed[0] + 4, probed[1])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_other_families_say_what_the_own_target_says(monkeypatch, tmp_path, draft, picture, family):
    vllm_standin.install(monkeypatch)
    made = ModelSettings(str(make_tiny_model(tmp_path / "target", seed=5, family=family)))
    front, settings, asked = load_front(made), DecodeSettings(mode="dsd", max_tokens=12), questions(picture, 2)
    with closing(vllm_http_standin.VllmServer(made.path)) as server:
        client = HttpEngine(front, BackendSettings("vllm-http", engine_url=server.url))
        served = EngineTarget(front, client, 60.0, pytest.fail)
        with closing(served), VerifierEngine(served) as engine, VerifierEngine(load_model(made)) as own:
            assert decode(engine, draft, settings, asked) == decode(own, draft, settings, asked)


@pytest.mark.parametrize("normalises", [True, False])
def test_pictures_go_as_the_server_wants_them(serve, vllm, target, draft, picture, normalises):
    vllm.normalises = normalises
    settings = DecodeSettings(mode="dsd", max_tokens=12)
    with VerifierEngine(target) as own:
        asked = questions(picture, 2)
        assert decode(serve(), draft, settings, asked) == decode(own, draft, settings, asked)


@pytest.mark.parametrize("fault", ["cached", "not-json", "short", "null", "forgets", "tie"])
@pytest.mark.parametrize("mode", ["dsd", "mc-dsd"])
def test_what_the_server_lacks_it_is_asked_for_again(serve, vllm, target, draft, picture, fault, mode):
    plan, asked = DecodeSettings(mode=mode, max_tokens=10, seed=1), questions(picture, 1)
    engine = serve()
    vllm.faults.extend(["", *[fault] * 400])
    before = vllm.requests
    with VerifierEngine(target) as own:
        assert decode(engine, draft, plan, asked) == decode(own, draft, plan, asked)
    assert vllm.requests - before > 6


def test_eight_robots_at_once_get_what_each_gets_alone(serve, target, draft, picture):
    plans = [DecodeSettings(seed=number, max_tokens=10, **PLANS[number]) for number in range(8)]
    engine, asked = serve(), questions(picture, 2)
    found = decode_at_once(engine, draft, plans, asked)
    for number, plan in enumerate(plans):
        with VerifierEngine(target) as own:
            assert found[number] == decode(own, draft, plan, asked), plan.mode


@pytest.mark.parametrize(
    "plan", [{"mode": "dsd"}, {"mode": "dssd"}, {"mode": "tslt"}, {"mode": "mc-tslt"}], ids=lambda plan: plan["mode"]
)
def test_what_needs_distributions_is_refused_by_a_sentence(serve, draft, picture, plan):
    with pytest.raises(Exception, match=r"gives no distributions: use temperature 0, or proof coupled"):
        decode(serve(), draft, DecodeSettings(temperature=0.9, **plan), questions(picture, 1))


def test_without_the_plug_in_coupled_rounds_are_refused_by_a_sentence(serve, vllm, draft, picture):
    vllm.coupled = False
    engine = serve()
    with pytest.raises(Exception, match=r"install dsd_ros beside it and start it with --logits-processors"):
        decode(engine, draft, DecodeSettings(mode="coupled", temperature=0.9), questions(picture, 1))
    assert decode(engine, draft, DecodeSettings(mode="coupled", max_tokens=4), questions(picture, 1))


# ------------------------------------------------------------------------------------------- a round that fails


@pytest.fixture
def robot(serve, picture):
    """A robot at the second round of a reply."""

    def make(timeout_s: float = 60.0, **session):
        engine = serve(timeout_s)
        found = Robot(engine)
        found.open(**session)
        image = picture(0)
        found.observe(height=image.shape[0], width=image.shape[1], image=encode_picture(image))
        found.draft(1, 0, [1, 2])
        assert isinstance(found.get(), Outcome)
        return found, list(engine._sessions.find(found.session, found.peer).reply.tokens)

    return make


def own_outcome(target, picture, before):
    sequence = target.prefill(picture(0), "go")
    sequence.append(before)
    rows = sequence.verify([3])
    return [(0, int(rows[0].argmax())), (1, int(rows[1].argmax()))]


@pytest.mark.parametrize(
    ("faults", "code", "sentence"),
    [
        (["400"], RefusalCode.MODEL_ERROR, r"the engine at http\S+ refuses a request \(400\): not now second line"),
        (["500"] * 2, RefusalCode.MODEL_ERROR, r"the engine at http\S+ refuses a request \(500\)"),
        (["429"], RefusalCode.OVERLOADED, r"the engine at http\S+ is busy \(429"),
        (["html"], RefusalCode.MODEL_ERROR, r"the answer of http\S+ to /inference/v1/generate is not vLLM's"),
        (["huge"], RefusalCode.MODEL_ERROR, r"http\S+ answers /inference/v1/generate with more than 64 MB"),
        (["other"], RefusalCode.MODEL_ERROR, r"read \d+ tokens of \d+; does it run another model\?"),
        (["garbage"], RefusalCode.MODEL_ERROR, r"the engine gave a row that holds no probabilities"),
        (["nan"], RefusalCode.MODEL_ERROR, r"the engine gave a row that holds no probabilities"),
        (["padding"] * 3, RefusalCode.MODEL_ERROR, r"the engine chooses token \d+, and \S+ has \d+"),
        (["cut"], RefusalCode.OVERLOADED, r"nothing answers at http"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_failed_request_fails_its_round_alone(robot, vllm, target, picture, faults, code, sentence):
    robot, before = robot()
    vllm.faults.extend(faults)
    robot.draft(2, len(before), [3])
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == code and "\n" not in refusal.sentence
    assert re.search(sentence, refusal.sentence), refusal.sentence
    for _ in range(100):  # nothing has changed, and the next attempt is right
        robot.draft(2, len(before), [3])
        if isinstance(outcome := robot.get(), Outcome):
            break
        time.sleep(0.05)
    assert (outcome.accepted, outcome.next_token) in own_outcome(target, picture, before)


def test_coupled_logits_that_are_not_finite_give_no_token(robot, vllm):
    robot, before = robot(temperature=0.9, mode="coupled")
    vllm.faults.extend(["nan"] * 2)
    robot.draft(2, len(before), [3])
    assert robot.get().sentence.startswith("the verifier's model failed on this")


def test_a_slow_request_holds_up_no_other_robot(robot, vllm, picture):
    slow, before = robot()
    quick = Robot(slow.engine)
    quick.open()
    vllm.faults.append("slow")
    slow.draft(2, len(before), [3])
    while vllm.faults:
        time.sleep(0.01)
    quick.observe(height=56, width=84, image=encode_picture(picture(1)))
    quick.draft(1, 0, [4])
    assert isinstance(quick.get(), Outcome) and slow.silent()
    vllm.free.set()
    assert slow.get().round == 2


def test_a_silent_server_is_lost_and_taken_again_when_it_answers(robot, vllm, target, picture):
    robot, before = robot(6.0)
    vllm.faults.append("silent")
    robot.draft(2, len(before), [3])
    assert robot.get().sentence == "the engine has given no answer for 6 s"
    engine = robot.engine
    assert "no answer for 6 s" in engine.away
    until = time.monotonic() + 60
    while engine.away and time.monotonic() < until:
        time.sleep(0.05)
    robot.draft(2, len(before), [3])
    outcome = robot.get()
    assert (outcome.accepted, outcome.next_token) in own_outcome(target, picture, before)


def test_a_reply_goes_on_when_the_server_is_back(serve, vllm, target, draft, picture):
    """Its links are closed with the reason, nobody is let in, and the robot goes on with the same tokens."""
    settings = DecodeSettings(mode="dsd", draft_length=2, max_tokens=12)
    engine, asked = serve(), questions(picture, 1)
    with VerifierEngine(target) as own:
        expected = decode(own, draft, settings, asked)
    patient = LinkSettings(response_timeout_s=5.0, attempts=60)
    unready: list[str] = []

    def come_back() -> None:
        until = time.monotonic() + 10
        while not server.unready() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.5)
        unready.append(server.unready())
        vllm.alive = True

    with (
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        WebsocketChannel(server.url) as channel,
        EdgeSession(channel, draft, settings, patient) as session,
    ):
        seen: list[int] = []
        back = threading.Thread(target=come_back)

        def watch(*_: object) -> None:
            seen.append(1)
            if len(seen) == 2:
                vllm.alive = False
                back.start()

        image, text, history = asked[0]
        found = session.decode(image, text, history=history, on_progress=watch)
        back.join()
    assert [found.tokens] == expected
    assert unready[0].startswith("nothing answers at http")
    assert engine.metrics.refused_connections["engine"]._value.get() > 0


def test_a_server_that_comes_back_with_another_model_is_not_asked(robot, vllm):
    robot, before = robot()
    vllm.faults.append("dies")
    robot.draft(2, len(before), [3])
    assert robot.get().code == RefusalCode.OVERLOADED
    vllm.front.vocab_size -= 7
    vllm.alive = True
    until = time.monotonic() + 20
    while "not the model" not in robot.engine.away and time.monotonic() < until:
        time.sleep(0.05)
    assert "its vocabulary is smaller" in robot.engine.away
    robot.draft(2, len(before), [3])
    assert "its vocabulary is smaller" in robot.get().sentence


# -------------------------------------------------------------------------------------------------- the probe


def with_attributes(**values):
    def change(vllm) -> None:
        for name, value in values.items():
            setattr(vllm, name, value)

    return change


def other_tokenizer(vllm) -> None:
    vllm.answer = lambda path, body, answer=vllm.answer: (
        (200, {"tokens": [1, 2]}) if path == "/tokenize" else answer(path, body)
    )


def other_pictures(vllm) -> None:
    vllm._rendered = lambda body, rendered=vllm.front.images: {"features": {}}


def other_rows(vllm) -> None:
    vllm._rows = lambda tokens, logits, *rest, rows=vllm._rows: rows(tokens, logits.roll(1, -1), *rest)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_attributes(scale_out=False), "takes no token ids: it lacks --enable-scale-out; start it with"),
        (with_attributes(details=False), "it lacks --enable-prompt-tokens-details; start it with"),
        (with_attributes(max_logprobs=1), "too few logprobs .* start it without --max-logprobs, or with 2 or more"),
        (with_attributes(key="secret"), "wants its API key; give a file with it as engine_key_file"),
        (with_attributes(version={"name": "ollama"}), "is no vLLM server: .*; give the address of one as engine_url"),
        (with_attributes(name="other"), None),
        (with_attributes(alive=False), "nothing answers at .*; start it with `vllm serve MODEL --enable-scale-out"),
        (other_tokenizer, "which is not the model in .*: its tokenizer makes other tokens; give the folder"),
        (lambda vllm: setattr(vllm.front, "vocab_size", vllm.front.vocab_size + 5), "its vocabulary is larger"),
        (other_pictures, "does not say how it prepares pictures"),
        (other_rows, "generates other tokens than its prompt_logprobs say, .*; start it without --logprobs-mode"),
    ],
)
def test_the_probe_names_what_is_missing(connect, vllm, change, sentence):
    change(vllm)
    if sentence is None:
        assert connect().model.name == "target"
        return
    with pytest.raises(ModelError, match=sentence) as found:
        connect()
    assert "\n" not in str(found.value) and len(str(found.value)) < 600


def test_an_address_where_nothing_listens(vllm, target_directory):
    front = load_front(ModelSettings(str(target_directory)))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ModelError, match="nothing answers at .*or give another engine_url"):
        EngineTarget(front, HttpEngine(front, BackendSettings("vllm-http", engine_url=url)), 5.0)


def test_an_address_that_never_answers(connect, vllm):
    vllm.answer = lambda path, body: time.sleep(5)
    with pytest.raises(ModelError, match=r"gave no answer for 0.5 s; is it vLLM\?"):
        connect(0.5)


def test_a_named_model_a_key_and_a_shorter_context(connect, vllm, tmp_path):
    vllm.key, vllm.name, vllm.max_model_len = "secret", "theirs", 90
    (tmp_path / "key").write_text("secret\n")
    assert connect(engine_key_file=str(tmp_path / "key"), engine_model="theirs").model.max_length == 89
    with pytest.raises(ModelError, match="serves theirs, not ours; name one of them as engine_model"):
        connect(engine_key_file=str(tmp_path / "key"), engine_model="ours")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"backend": "vllm-http"}, "backend vllm-http needs engine_url, the address of a vLLM server"),
        ({"backend": "vllm", "engine_url": "http://a"}, "engine_url is for backend vllm-http, and the backend is vllm"),
        ({"backend": "vllm-http", "engine_url": "ws://a:1"}, "'ws://a:1' is not the address of a vLLM server"),
        ({"backend": "vllm-http", "engine_url": "http://u:p@a"}, "is not the address of a vLLM server"),
    ],
)
def test_settings_that_cannot_be_used(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        BackendSettings(**given)


def test_the_sentences_name_the_flags_that_docs_show():
    assert http.FLAGS == "--enable-scale-out --enable-prompt-tokens-details"
