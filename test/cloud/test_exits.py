# SPDX-License-Identifier: Apache-2.0
"""Early outcomes: which exits send them and when, and that they never change the final outcome."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from by_hand import Robot
from tiny_models import make_tiny_model

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.exits import ExitListener, ExitRules, RoundExits
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.session import EdgeSession
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.wire.channel import LocalChannel
from dsd_ros.wire.messages import Outcome, SessionClose
from dsd_ros.wire.pictures import encode_picture

torch.set_num_threads(1)
LAYERS = 5
EVERY_EXIT = EngineSettings(exit_share=1.0)
IMAGE = np.random.default_rng(3).integers(0, 256, (56, 56, 3), dtype=np.uint8)
PICTURE = {"image": encode_picture(IMAGE), "height": 56, "width": 56}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("exits") / "target", seed=5, layers=LAYERS)


@pytest.fixture
def model(directory):
    model = load_model(ModelSettings(str(directory)))
    model.exits = ExitAdapters.untrained(model)
    return model


class Gate(torch.nn.Module):
    """A decoder layer that runs when it is let."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, *arguments, **named):
        self.reached.set()
        assert self.open.wait(120)
        return self.layer(*arguments, **named)


def test_early_outcomes_arrive_while_deeper_layers_have_yet_to_run(model):
    model.exits = ExitAdapters.untrained(model, [1, 2, 4])
    with VerifierEngine(model, EVERY_EXIT) as engine:
        robot = Robot(engine)
        assert robot.open(exits=True).exit_layers == [1, 2, 4]
        robot.observe(**PICTURE)
        robot.draft(1, 0, [1, 2, 3])
        first, _ = robot.final(1)
        gate = model._language.layers[2] = Gate(model._language.layers[2])
        robot.draft(2, first.accepted + 1, [1, 2, 3])
        early = robot.get()
        assert gate.reached.wait(60) and not gate.open.is_set()
        assert (early.is_final, early.round, early.layer) == (False, 2, 1)
        assert 0 < early.confidence <= 1 and early.compute_us > 0
        gate.open.set()
        final, _ = robot.final(2)
        assert final.layer == LAYERS and final.is_final
        assert robot.silent()


def test_a_session_closed_in_the_middle_of_a_pass_hurts_no_other(model):
    gate = model._language.layers[2] = Gate(model._language.layers[2])
    with VerifierEngine(model, EVERY_EXIT) as engine:
        robot, other = Robot(engine), Robot(engine)
        robot.open(exits=True)
        other.open(exits=True)
        gate.open.set()
        for each in (robot, other):
            each.observe(**PICTURE)
            each.draft(1, 0, [1])
        first, _ = robot.final(1)
        confirmed = other.final(1)[0].accepted + 1
        gate.open.clear()
        gate.reached.clear()
        robot.draft(2, first.accepted + 1, [1])
        assert gate.reached.wait(60)
        robot.send(SessionClose(robot.session))
        engine.disconnect(robot.peer)
        gate.open.set()
        other.draft(2, confirmed, [1])
        assert other.final(2)[0].is_final
        assert engine.sessions == 1


@pytest.mark.parametrize(
    ("asked", "settings", "speak"),
    [
        ({}, EVERY_EXIT, []),
        ({"exits": False, "exit_layers": [1]}, EVERY_EXIT, []),
        ({"exits": True}, EVERY_EXIT, [1, 2, 3, 4]),
        ({"exits": True, "exit_layers": [4, 2, 9]}, EVERY_EXIT, [2, 4]),
        ({"exits": True, "exit_layers": [9]}, EVERY_EXIT, []),
        ({"exits": True}, EngineSettings(exit_share=0.0), []),
    ],
)
def test_the_exits_that_speak_are_those_asked_for(model, asked, settings, speak):
    with VerifierEngine(model, settings) as engine:
        robot = Robot(engine)
        assert robot.open(**asked).exit_layers == speak
        robot.observe(**PICTURE)
        robot.draft(1, 0, [1, 2])
        _final, early = robot.final(1)
        assert {outcome.layer for outcome in early} <= set(speak)
        assert bool(early) == bool(speak)
        said = [(outcome.accepted, outcome.next_token) for outcome in early]
        assert len(said) == len(set(said))
        again = Robot(engine)
        engine.disconnect(robot.peer)
        assert again.open(resume=robot.ticket, **asked).exit_layers == speak


def test_exits_that_are_sure_and_wrong_change_no_token(model, tmp_path, monkeypatch):
    draft = load_model(ModelSettings(str(make_tiny_model(tmp_path / "draft", seed=6))))
    with VerifierEngine(model, EVERY_EXIT) as engine, LocalChannel(engine) as channel:

        def reply(mode: str):
            with EdgeSession(channel, draft, DecodeSettings(mode=mode, max_tokens=16)) as session:
                return session.decode(IMAGE, "find the bottle")

        wanted = reply("dsd").tokens
        other = next(token for token in range(10, 40) if token not in wanted)
        surely = torch.nn.functional.one_hot(torch.tensor(other), model.vocab_size) * 100.0
        monkeypatch.setattr(model.exits, "logits", lambda model, layer, hidden: surely.repeat(len(hidden), 1))
        fooled = [reply("fsd") for _ in range(10)]  # a final outcome may overtake all of a reply's early ones
        assert all(one.tokens == wanted for one in fooled) and any(one.exits for one in fooled)
        robot = Robot(engine)
        robot.open(exits=True)
        robot.observe(**PICTURE)
        robot.draft(1, 0, [1, 2])
        final, early = robot.final(1)
        assert early[0].next_token == other and early[0].confidence > 0.99
        assert final.next_token != other and final.layer == LAYERS


def test_an_empty_draft_is_forecast_unless_its_answer_is_known(model):
    with VerifierEngine(model, EVERY_EXIT) as engine:
        robot = Robot(engine)
        robot.open(exits=True)
        robot.observe(**PICTURE)
        robot.draft(1, 0)
        assert robot.final(1)[1] == []
        robot.draft(2, 1)
        _final, early = robot.final(2)
        assert early and all(outcome.accepted == 0 for outcome in early)


def test_an_answer_that_raises_in_the_pass_does_not_end_it(model, caplog):
    with VerifierEngine(model, EVERY_EXIT) as engine:
        robot = Robot(engine)
        robot.open(exits=True)
        robot.observe(**PICTURE)
        put = robot.inbox.put

        def odd(message):
            if isinstance(message, Outcome) and not message.is_final:
                raise RuntimeError("the link is odd")
            put(message)

        engine.submit(robot.request(resume=robot.ticket, exits=True), odd, robot.peer)
        assert robot.get().session == robot.session
        robot.draft(1, 0, [1])
        while not isinstance(final := robot.get(), Outcome):
            pass
        assert final.is_final and "the link is odd" in caplog.text


# ------------------------------------------------------------------------------- one pass by hand


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def listener(rows, said, clock=None, judge=None, cost=0.0, **rules):
    """Exit i says ``rows[i - 1]``: logits (rows, V) with the verdict (0, argmax) by default."""
    clock = clock or Clock()

    def logits(model, layer, hidden):
        clock.now += cost
        return rows[layer - 1]

    def first(row):
        return DraftVerdict(0, int(row[0].argmax()))

    layers = tuple(range(1, len(rows) + 1))
    model = SimpleNamespace(exits=SimpleNamespace(layers=layers, logits=logits), num_layers=len(rows) + 1)
    chosen = ExitRules(**({"layers": layers, "min_confidence": 0.0, "share": 1.0} | rules))
    return ExitListener(model, [RoundExits(chosen, judge or first, lambda *a: said.append(a))], clock)


def peaked(token: int, height: float) -> torch.Tensor:
    row = torch.zeros(1, 4)
    row[0, token] = height
    return row


def test_equal_verdicts_are_said_once_and_weak_ones_not_at_all():
    said = []
    rows = [peaked(1, 2.0), peaked(1, 9.0), peaked(2, 0.1), peaked(2, 5.0), peaked(1, 9.0)]
    hook = listener(rows, said, min_confidence=0.5)
    for index in range(6):
        hook(index, [torch.zeros(1, 8)])
    assert [(verdict.next_token, layer) for verdict, layer, _ in said] == [(1, 1), (2, 4)]
    assert said[0][2] == pytest.approx(float(torch.softmax(rows[0][0], 0).amax()))


@pytest.mark.parametrize(("share", "ran"), [(1.0, 20), (0.25, 14), (0.1, 5), (0.0, 1)])
def test_exits_take_no_more_than_their_share(share, ran):
    """A layer takes 2 and an exit 1; one may begin while those before took no more than the share."""
    said, clock = [], Clock()
    hook = listener([peaked(0, 1.0)] * 20, said, clock, cost=1.0, share=share)
    for index in range(20):
        clock.now += 2.0
        hook(index, [torch.zeros(1, 8)])
    assert hook._ran == ran
    assert hook._spent - 1.0 <= share * clock.now


def test_an_exit_that_fails_is_logged_once_and_the_others_keep_silent(caplog):
    def broken(row):
        raise FloatingPointError("odd logits")

    said = []
    hook = listener([peaked(0, 1.0)] * 4, said, judge=broken)
    for index in range(5):
        hook(index, [torch.zeros(1, 8)])
    hook.harvest()
    assert not said and caplog.text.count("failed; the round goes on") == 1


def test_exits_forecast_a_token_that_the_robot_draws(directory, tmp_path):
    """Sampled split: early outcomes name the token that the robot draws after a rejection, and change none."""
    model = load_model(ModelSettings(str(directory)))
    draft = load_model(ModelSettings(str(make_tiny_model(tmp_path / "draft", seed=6))))
    model.exits = ExitAdapters.untrained(model)
    values = {"temperature": 1.0, "top_k": 2, "max_tokens": 24, "draft_length": 2, "seed": 5}
    with VerifierEngine(model, EVERY_EXIT) as engine:

        def decoded(**more):
            settings = DecodeSettings(**values, **more)
            with LocalChannel(engine) as channel, EdgeSession(channel, draft, settings) as session:
                return [session.decode(IMAGE, "find the bottle") for _ in range(3)]

        wanted = decoded(mode="dssd")
        replies = decoded(mode="fsd", proof="split", predraft_source="exits", predraft_workers=2)
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in wanted]
    rounds = [record for reply in replies for record in reply.records]
    rejected = [record for record in rounds if record.accepted < record.depth]
    assert sum(record.exits for record in rejected) > 10
    assert any(record.first_exit < LAYERS for record in rejected)
