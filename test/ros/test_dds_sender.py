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

    def __init__(self, policy: str, request: int) -> None:
        self.heard: list[tuple[int, int]] = []  # round and token of each outcome
        self.open = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, str(ROBOT), policy, str(request)], stdout=subprocess.PIPE, text=True
        )
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
def robots(rig, without_shared_memory):
    """Starts robots that listen, each with its policy."""
    started: list[Robot] = []

    def start(*policies: str) -> list[Robot]:
        started.extend(Robot(policy, number) for number, policy in enumerate(policies, 1))
        for robot in started:
            rig.until(robot.open.is_set, what="an open session")
        rig.until(lambda: rig.node.count_subscribers("dsd/outcome") >= len(policies), what="robots that listen")
        return started

    yield start
    for robot in started:
        robot.end()


@pytest.mark.parametrize("policy", ["priority", "fifo"])
def test_a_busy_link_carries_the_final_outcome_first_then_early_ones_by_policy(rig, robots, verifier, policy):
    (robot,) = robots(policy)
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
    assert robot.heard[final + 1 :] == [(2, token) for token in ([1, 2, 0] if policy == "priority" else [0, 1, 2])]


def test_robots_on_the_same_topics_have_each_its_policy(rig, robots, verifier):
    both = robots("priority", "fifo")
    both[0].freeze()
    try:
        for token in range(FIRST):
            verifier.publish(early(2, 1, token, 0.5))
        verifier.publish(Outcome(2, 1, 1, 3, 0, 99, 1.0, True))
        for token, confidence in enumerate((0.2, 0.9, 0.4)):
            for session in (1, 2):
                verifier.publish(early(session, 2, token, confidence))
    finally:
        both[0].thaw()
    for robot, order in zip(both, ([1, 2, 0], [0, 1, 2]), strict=True):
        rig.until(lambda robot=robot: len([1 for number, _ in robot.heard if number == 2]) == 3)
        assert [token for number, token in robot.heard if number == 2] == order


def test_a_frozen_robot_stops_no_early_outcomes_of_another(rig, robots, verifier):
    frozen, other = robots("priority", "priority")
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
    (robot,) = robots("priority")
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
