# SPDX-License-Identifier: Apache-2.0
"""Pictures are read beside the rounds: who waits for them, and in which order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from by_hand import Robot
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.wire.messages import Outcome, Refusal, RefusalCode
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.turns import RobotLink

SLOW = np.full((4, 4, 3), 9, np.uint8)
SLOW_PNG = {"height": 4, "width": 4, "image": encode_picture(SLOW)}


class SlowPictures(TableModel):
    """Sees pictures of 4 x 4 pixels only when it may; remembers what it began to see."""

    def __init__(self) -> None:
        super().__init__(1, ends=False)
        self.may, self.began = threading.Event(), threading.Semaphore(0)
        self.seen: list[tuple[str, int]] = []

    def open(self, image, instruction, history=()):
        self.seen.append((instruction, image.shape[0]))
        if image.shape[0] == 4:
            self.began.release()
            assert self.may.wait(30)
        return super().open(image, instruction, history)


@pytest.fixture
def model():
    return SlowPictures()


@pytest.fixture
def engine(model):
    with VerifierEngine(model) as engine:
        yield engine
        model.may.set()


def robot_of(engine, peer=None) -> Robot:
    robot = Robot(engine, peer)
    assert robot.open().error == ""
    return robot


def test_other_robots_rounds_do_not_wait_for_a_picture(engine, model):
    greedy, other = robot_of(engine), robot_of(engine)
    greedy.observe(**SLOW_PNG)
    greedy.draft()  # waits for its picture
    assert model.began.acquire(timeout=10)
    other.observe()
    for number in range(1, 51):  # all of them during the one picture
        other.draft(number, number - 1)
        assert other.get().round == number
    assert greedy.silent(0.0)
    model.may.set()
    outcome = greedy.get()
    assert isinstance(outcome, Outcome) and outcome.round == 1


def test_the_next_picture_of_a_session_waits_until_the_one_before_was_taken(engine, model):
    robot = robot_of(engine)
    robot.observe(reply=1, **SLOW_PNG)
    robot.observe(reply=2)
    robot.draft(reply=2)
    assert model.began.acquire(timeout=10) and len(model.seen) == 1
    model.may.set()
    assert robot.get().reply == 2


def test_a_broken_picture_is_answered_and_holds_nobody_up(engine):
    robot, other = robot_of(engine), robot_of(engine)
    robot.observe(image=b"no png")
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == RefusalCode.BAD_OBSERVATION
    for each, reply in ((other, 1), (robot, 2)):
        each.observe(reply=reply)
        each.draft(reply=reply)
        assert isinstance(each.get(), Outcome)


def test_a_picture_of_a_robot_that_has_left_is_not_read(engine, model):
    link, first = RobotLink("go2-01", 8), RobotLink("go2-02", 8)
    blocking = robot_of(engine, first), robot_of(engine, object())
    for robot in blocking:  # one for each thread
        robot.observe(**SLOW_PNG)
        assert model.began.acquire(timeout=10)
    robot = robot_of(engine, link)
    robot.observe(instruction="gone")
    engine.disconnect(link)
    model.may.set()
    for each in blocking:
        each.draft()
        assert isinstance(each.get(), Outcome)
    again = robot_of(engine, link)
    again.observe(instruction="there")
    again.draft()
    assert isinstance(again.get(), Outcome)
    assert [instruction for instruction, height in model.seen if height == 2] == ["there"]


def test_a_closed_engine_holds_no_picture(model):
    engine = VerifierEngine(model)
    robot = robot_of(engine)
    for reply in (1, 2, 3):
        robot.observe(reply=reply, **SLOW_PNG)
    assert model.began.acquire(timeout=10)
    assert not engine.close(0.05)  # the picture in progress
    assert engine.queue() == (1, 0)
    model.may.set()
    assert engine.close(10.0) and len(model.seen) == 1 and engine.sessions == 0
