# SPDX-License-Identifier: Apache-2.0
"""FSD's Sender in front of DDS topics: early outcomes wait while robots have not acknowledged those before them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dsd_ros.ros.dds_channel import VerifierTopics
from dsd_ros.wire.messages import Outcome, SessionReply, SessionRequest

ROBOT = Path(__file__).parents[1] / "support" / "hearing_robot.py"
FIRST = 30  # early outcomes that fill what the middleware may hold, and some that are overtaken


def early(session: int, number: int, token: int, confidence: float) -> Outcome:
    return Outcome(session, 1, number, 1, 0, token, confidence, False)


class Robot:
    """A robot's process, which may be frozen: its middleware acknowledges nothing then."""

    def __init__(self, request: int) -> None:
        self.heard: list[tuple[int, int]] = []  # round and token of each outcome
        self.open = threading.Event()
        self._process = subprocess.Popen([sys.executable, str(ROBOT), str(request)], stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "open":
                self.open.set()
            else:
                number, token = line.split()
                self.heard.append((int(number), int(token)))


@pytest.fixture
def verifier(rig):
    """The verifier's end, which opens sessions: the number of the request is the session's."""

    def answer(message) -> None:
        if isinstance(message, SessionRequest):
            topics.publish(SessionReply(message.request, message.request, "", "", "", 8))

    topics = VerifierTopics(rig.node, answer)
    topics.start()
    rig.at_end(topics.close)
    return topics


@pytest.fixture
def robots(rig):
    """Starts robots that listen."""
    started: list[Robot] = []

    def start(count: int) -> list[Robot]:
        started.extend(Robot(number) for number in range(1, count + 1))
        for robot in started:
            rig.until(robot.open.is_set, what="an open session")
        rig.until(lambda: rig.node.count_subscribers("dsd/outcome") >= count, what="robots that listen")
        return started

    yield start
    for robot in started:
        robot.end()


def test_a_busy_link_carries_the_final_outcome_first_then_early_ones_by_confidence(rig, robots, verifier):
    (robot,) = robots(1)
    robot.freeze()
    try:
        for token in range(FIRST):
            verifier.publish(early(1, 1, token, 0.5))
        for token, confidence in enumerate((0.2, 0.9, 0.4)):
            verifier.publish(early(1, 2, token, confidence))
        verifier.publish(Outcome(1, 1, 1, 3, 0, 99, 1.0, True))
    finally:
        robot.thaw()
    rig.until(lambda: len([1 for number, _ in robot.heard if number == 2]) == 3, what="the early outcomes of round 2")
    final = robot.heard.index((1, 99))
    before = robot.heard[:final]
    assert before == [(1, token) for token in range(len(before))] and 3 < len(before) <= FIRST / 2
    assert robot.heard[final + 1 :] == [(2, 1), (2, 2), (2, 0)]


def test_a_frozen_robot_stops_no_early_outcomes_of_another(rig, robots, verifier):
    frozen, other = robots(2)
    frozen.freeze()
    try:
        began = time.monotonic()
        for token in range(FIRST):
            verifier.publish(early(2, 1, token, 0.5))
        rig.until(lambda: len(other.heard) == FIRST, what="all early outcomes")
        # In several parts, one for each time that the verifier has lost its patience.
        assert time.monotonic() - began > 2 * VerifierTopics._PATIENCE_S
    finally:
        frozen.thaw()


def test_closing_ends_the_thread_while_early_outcomes_wait(rig, robots, verifier):
    (robot,) = robots(1)
    robot.freeze()
    try:
        threads = threading.active_count()
        for token in range(FIRST):
            verifier.publish(early(1, 1, token, 0.5))
        verifier.close()
        assert threading.active_count() <= threads - 2  # the one for early outcomes, and that of the topics
        verifier.publish(early(1, 1, 0, 0.5))  # the engine may still send; it is dropped
    finally:
        robot.thaw()
