# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time

import pytest
from by_hand import IMAGE, Robot
from table_model import TableModel

from dsd_ros.cloud.engine import MAX_WAITING_PER_SESSION, VerifierEngine
from dsd_ros.cloud.settings import EngineSettings, VerifierSettings
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.vlm.errors import PromptError
from dsd_ros.wire.messages import PROTOCOL_VERSION, Outcome, RefusalCode


@pytest.fixture
def model():
    return TableModel(1, ends=False)


@pytest.fixture
def engine(model):
    with VerifierEngine(model) as engine:
        yield engine


@pytest.fixture
def robot(engine):
    robot = Robot(engine)
    assert robot.open().error == ""
    robot.observe()
    return robot


def greedy(model, length: int) -> list[int]:
    sequence = model.prefill(IMAGE, "go")
    for _ in range(length):
        sequence.append([int(sequence.next_logits().argmax())])
    return sequence.tokens


def test_the_session_reply_describes_the_target(engine, model):
    reply = Robot(engine).open()
    assert (reply.error, reply.target_name, reply.vocab_size) == ("", "table-1", 8)
    assert reply.eos_token_ids == [7] and reply.session > 0 and len(reply.ticket) == 16


def test_duplicates_are_answered_alike_and_change_nothing(robot, model):
    said = greedy(model, 3)
    robot.draft(1, 0, said[:1])
    first = robot.get()
    for _ in range(3):
        robot.draft(1, 0, said[:1])
        assert robot.get() == first
    robot.observe()  # a doubled observation does not start the reply over
    robot.draft(2, 2)
    assert robot.get().next_token == said[2]
    robot.draft(1, 0, said[:1])  # older than the last round: its outcome was received
    assert robot.silent()


def test_what_belongs_to_an_older_reply_is_ignored(robot):
    robot.observe(reply=2)
    robot.draft(reply=1)
    robot.observe(reply=1)
    assert robot.silent()
    robot.draft(reply=2)
    assert robot.get().reply == 2


@pytest.mark.parametrize(("number", "confirmed"), [(2, 0), (3, 1), (1, 1), (0, 1)])
def test_a_round_out_of_step_is_refused_and_changes_nothing(robot, number, confirmed):
    robot.draft(number, confirmed)
    assert robot.get().code == RefusalCode.OUT_OF_STEP
    robot.draft(1, 0)
    assert isinstance(robot.get(), Outcome)


def test_a_draft_before_its_observation_is_refused(robot):
    robot.draft(reply=5)
    refusal = robot.get()
    assert (refusal.code, refusal.reply, refusal.round) == (RefusalCode.NO_OBSERVATION, 5, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_version": 99}, ["99", str(PROTOCOL_VERSION), "same release"]),
        ({"tokenizer_fingerprint": "digits"}, ["digits", "letters-8", "table-1"]),
        ({"tokenizer_fingerprint": ""}, ["none", "letters-8"]),
        ({"mode": "telepathy"}, ["telepathy", "ar, dsd"]),
        ({"temperature": 1000.0}, ["temperature"]),
        ({"proof": "oath"}, ["oath", "full, split", "coupled"]),
    ],
)
def test_a_session_that_cannot_be_is_refused_with_a_sentence(engine, changes, words):
    robot = Robot(engine)
    reply = robot.open(**changes)
    assert reply.session == 0 and reply.ticket == b"" and all(word in reply.error for word in words)
    assert robot.open().error == ""


def test_without_drafts_no_tokenizer_is_needed(engine):
    assert Robot(engine).open(mode="ar", tokenizer_fingerprint="", vocab_size=0).error == ""


def test_a_doubled_request_opens_one_session(engine):
    robot = Robot(engine)
    request = robot.request()
    robot.send(request)
    robot.send(request)
    assert robot.get() == robot.get()
    assert engine.sessions == 1


def test_a_session_is_resumed_by_another_peer_and_only_then_its(robot, engine, model):
    robot.draft(1, 0)
    first = robot.get()
    stranger = Robot(engine)
    stranger.session = robot.session
    stranger.draft(2, 1)
    assert stranger.get().code == RefusalCode.UNKNOWN_SESSION
    engine.disconnect(robot.peer)
    again = Robot(engine)
    assert again.open(resume=robot.ticket).session == robot.session
    again.draft(1, 0)
    assert again.get() == first
    again.draft(2, 1)
    assert again.get().next_token == greedy(model, 2)[1]
    engine.disconnect(robot.peer)  # late news of the old link does not concern the new one
    again.draft(3, 2)
    assert again.get().round == 3


def test_unused_sessions_expire(model):
    now = [0.0]
    with VerifierEngine(model, EngineSettings(session_expiry_s=10), lambda: now[0]) as engine:
        robot = Robot(engine)
        robot.open()
        now[0] += 11
        deadline = time.monotonic() + 60
        while engine.sessions and time.monotonic() < deadline:
            time.sleep(0.02)
        assert engine.sessions == 0
        robot.observe()
        assert robot.get().code == RefusalCode.UNKNOWN_SESSION


@pytest.mark.parametrize("changes", [{"image": b"nothing"}, {"height": 3}, {"encoding": "jpeg"}, {"encoding": "rgb8"}])
def test_a_bad_picture_is_refused_for_every_round_of_its_reply(robot, changes):
    robot.observe(reply=2, **changes)
    refusal = robot.get()
    assert (refusal.code, refusal.reply, refusal.round) == (RefusalCode.BAD_OBSERVATION, 2, 0)
    robot.draft(reply=2)
    assert robot.get() == refusal
    robot.observe(reply=3)
    robot.draft(reply=3)
    assert isinstance(robot.get(), Outcome)


class Failing(TableModel):
    """Fails when asked to."""

    fails: Exception | None = None

    def open(self, image, instruction, history=()):
        if instruction == "fail":
            raise RuntimeError("secret of the prefill")
        if instruction == "refuse":
            raise PromptError("the instruction is refused; say something else")
        return super().open(image, instruction, history)

    def forward_tokens(self, *arguments):
        if self.fails is not None:
            raise self.fails
        return super().forward_tokens(*arguments)


def test_a_failing_model_is_a_sentence_for_the_robot_and_a_traceback_in_the_log(caplog):
    model = Failing(1, ends=False)
    with VerifierEngine(model) as engine:
        robot = Robot(engine)
        robot.open()
        robot.observe(instruction="fail")
        refusal = robot.get()
        assert refusal.code == RefusalCode.MODEL_ERROR and "secret" not in refusal.sentence
        assert "secret of the prefill" in caplog.text
        robot.observe(reply=2, instruction="refuse")
        assert robot.get().sentence == "the instruction is refused; say something else"
        robot.observe(reply=3)
        robot.draft(1, 0, [2], reply=3)
        first = robot.get()
        model.fails = RuntimeError("secret of the pass")
        confirmed = first.accepted + 1
        robot.draft(2, confirmed, [1, 2], reply=3)
        refusal = robot.get()
        assert refusal.code == RefusalCode.MODEL_ERROR and "secret" not in refusal.sentence
        assert "secret of the pass" in caplog.text and "Traceback" in caplog.text
        model.fails = None
        robot.draft(2, confirmed, [1, 2], reply=3)
        assert isinstance(robot.get(), Outcome)


def test_broken_logits_are_a_model_error():
    model = TableModel(1)
    with VerifierEngine(model) as engine:
        robot = Robot(engine)
        robot.open()
        robot.observe()
        model.table[:] = float("nan")
        robot.draft(1, 0, [1])
        assert robot.get().code == RefusalCode.MODEL_ERROR


def test_messages_the_wrong_way_are_refused(robot):
    robot.send(Outcome(1, 1, 1, 1, 0, 1, 0.5, True))
    assert robot.get().code == RefusalCode.UNSUPPORTED


def test_an_answer_that_raises_does_not_end_the_verifier(engine, robot, caplog):
    def broken(_: object) -> None:
        raise RuntimeError("the link is odd")

    engine.submit(Robot(engine).request(), broken, object())
    robot.draft()
    assert isinstance(robot.get(), Outcome)
    assert Robot(engine).open().session
    assert "the link is odd" in caplog.text


def test_a_long_opening_holds_up_no_round_and_those_that_wait_end_with_their_link(engine, robot, monkeypatch):
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(engine.target, "check", lambda *_: begun.set() or gate.wait(60))
    first, gone, last = (Robot(engine) for _ in range(3))
    for each in (first, gone, last):
        each.send(each.request())
    assert begun.wait(10)
    robot.draft()
    assert isinstance(robot.get(), Outcome)
    engine.disconnect(gone.peer)
    gate.set()
    assert last.get().session and first.get().session
    assert gone.silent() and engine.sessions == 3


def test_what_waits_is_bounded_and_doubles_wait_once():
    gate = threading.Event()

    class Gated(TableModel):
        def open(self, image, instruction, history=()):
            gate.wait(120)
            return super().open(image, instruction, history)

    with VerifierEngine(Gated(1, ends=False)) as engine:
        robot = Robot(engine)
        robot.open()
        robot.observe()
        for _ in range(50):
            robot.draft(1, 0)
        assert robot.silent()
        for number in range(2, MAX_WAITING_PER_SESSION + 5):
            robot.draft(number, 0)
        assert robot.get().code == RefusalCode.OVERLOADED
        gate.set()
        while not isinstance(answer := robot.get(), Outcome):
            pass
        assert answer.round == 1


def test_closing_gives_the_thread_back(model):
    before = set(threading.enumerate())
    engine = VerifierEngine(model)
    robot = Robot(engine)
    robot.open(mode="stream")
    robot.observe()
    assert engine.close()
    assert set(threading.enumerate()) <= before
    assert engine.close() and not robot.send(robot.request())


@pytest.mark.parametrize(
    "values",
    [
        {"max_sessions": 0}, {"session_expiry_s": 0}, {"session_expiry_s": float("nan")}, {"port": 70_000},
        {"host": ""}, {"certificate": "c.pem"}, {"key": "k.pem"},
    ],
)  # fmt: skip
def test_settings_out_of_place_are_refused(values):
    with pytest.raises(ValueError, match="use|give"):
        VerifierSettings(**values)


def test_a_target_may_refuse_a_session(model):
    class Picky(LocalTarget):
        def check(self, request, sampling) -> None:
            if not sampling.greedy:
                raise ValueError("this target serves temperature 0 alone; set temperature 0")

    with VerifierEngine(Picky(model)) as engine:
        assert Robot(engine).open().error == ""
        assert Robot(engine).open(temperature=1.0).error == "this target serves temperature 0 alone; set temperature 0"
