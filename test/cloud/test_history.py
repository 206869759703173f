# SPDX-License-Identifier: Apache-2.0
"""Observations with earlier pictures: what the verifier keeps, requests and answers."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import IMAGE, Robot
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.wire.messages import Outcome, Past, RefusalCode
from dsd_ros.wire.pictures import encode_picture, picture_digest


@pytest.fixture
def model():
    return TableModel(1, ends=False)


@pytest.fixture
def robot(model):
    with VerifierEngine(model) as engine:
        robot = Robot(engine)
        robot.open()
        yield robot


def past(value: int, action: str, sent: bool = True) -> Past:
    image = np.full((2, 2, 3), value, np.uint8)
    data = encode_picture(image) if sent else b""
    return Past(action, "png", 2, 2, data, picture_digest(image))


def first_tokens(model, *history: tuple[int, str]) -> int:
    steps = [(np.full((2, 2, 3), value, np.uint8), action) for value, action in history]
    return int(model.prefill(IMAGE, "go", steps).next_logits().argmax())


def test_a_picture_of_the_reply_before_need_not_be_sent_again(robot, model):
    robot.observe(1)
    robot.draft()
    robot.get()
    robot.observe(2, history=[past(1, "turn", sent=False)])
    robot.draft(reply=2)
    assert robot.get().next_token == first_tokens(model, (1, "turn"))


def test_an_unknown_picture_is_asked_for_once_and_the_same_reply_goes_on(robot, model):
    lean = [past(4, "turn", sent=False)]
    robot.observe(1, history=lean)
    robot.draft()
    refusal = robot.get()
    assert (refusal.code, refusal.reply, refusal.round) == (RefusalCode.UNKNOWN_PICTURE, 1, 0)
    assert "send all of them" in refusal.sentence
    assert robot.silent()  # the draft after it needs no answer of its own
    robot.observe(1, history=[past(4, "turn")])
    robot.draft()
    outcome = robot.get()
    assert isinstance(outcome, Outcome) and outcome.next_token == first_tokens(model, (4, "turn"))
    robot.observe(1, history=lean)  # a late double
    robot.observe(2, history=lean)
    robot.draft(reply=2)
    assert robot.get().reply == 2


def test_what_is_older_than_an_observation_that_lacks_a_picture_stays_old(robot):
    robot.observe(5, history=[past(4, "turn", sent=False)])
    assert robot.get().code == RefusalCode.UNKNOWN_PICTURE
    robot.observe(4)
    robot.draft(reply=4)
    assert robot.get().code == RefusalCode.NO_OBSERVATION
    robot.observe(5)
    robot.draft(reply=5)
    assert isinstance(robot.get(), Outcome)


def test_pictures_are_one_sessions_own_and_outlive_its_link(robot, model):
    robot.observe(1)
    robot.draft()
    robot.get()
    other = Robot(robot.engine)
    other.open()
    other.observe(1, history=[past(1, "turn", sent=False)])
    assert other.get().code == RefusalCode.UNKNOWN_PICTURE
    robot.engine.disconnect(robot.peer)
    back = Robot(robot.engine)
    assert back.open(resume=robot.ticket).session == robot.session
    back.observe(2, history=[past(1, "turn", sent=False)])
    back.draft(reply=2)
    assert isinstance(back.get(), Outcome)


def test_a_history_that_cannot_be_used_is_a_bad_observation(robot):
    robot.observe(1, history=[Past("turn", "png", 2, 2, b"garbage", bytes(8))])
    refusal = robot.get()
    assert refusal.code == RefusalCode.BAD_OBSERVATION and "damaged, or in another container" in refusal.sentence
