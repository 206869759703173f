# SPDX-License-Identifier: Apache-2.0
"""Split verification, message by message: the verifier's state between a rejection and the robot's own draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_hand import Robot
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.packing import pack_chances, unpack_distribution
from dsd_ros.wire.messages import Outcome, Refusal

MODEL = TableModel(1, ends=False)


@pytest.fixture
def engine():
    with VerifierEngine(MODEL) as made:
        yield made


def chances(*values: float) -> bytes:
    return pack_chances(np.array(values, np.float32))


def rejected(engine) -> tuple[Robot, Outcome]:
    """A robot whose first round was rejected at the first token: p of token 7 is 0."""
    robot = Robot(engine)
    robot.open(mode="dssd", temperature=1.0)
    robot.observe()
    robot.draft(tokens=[7, 1], evidence=chances(0.5, 0.5))
    return robot, robot.get()


def sequence_of(engine, robot: Robot) -> list[int]:
    return engine._sessions._sessions[robot.session].reply.sequence.tokens


def test_a_rejection_brings_the_targets_own_distribution(engine):
    robot, outcome = rejected(engine)
    assert (outcome.accepted, outcome.next_token) == (0, 0)
    p = unpack_distribution(outcome.distribution, MODEL.vocab_size)
    wanted = torch.softmax(MODEL.prefill(np.full((2, 2, 3), 1, np.uint8), "go").next_logits(), -1)
    assert p.tolist() == wanted.tolist()
    assert sequence_of(engine, robot) == []


def test_rounds_continue_after_the_token_the_robot_drew(engine):
    robot, first = rejected(engine)
    # Asked again, the verifier says the same.
    robot.draft(tokens=[7, 1], evidence=chances(0.5, 0.5))
    assert robot.get() == first
    answers = []
    for _ in range(2):  # nor has it an effect to say the next twice
        robot.draft(2, 1, tokens=[2], evidence=chances(1e-6), resampled=[3])
        answers.append(robot.get())
    second = answers[0]
    assert second.accepted == 1 and not second.distribution  # 1e-6 is surely accepted
    assert answers[1] == second
    robot.draft(tokens=[7, 1], evidence=chances(0.5, 0.5))
    assert robot.silent()
    assert sequence_of(engine, robot) == [3, 2, second.next_token]


@pytest.mark.parametrize(
    ("confirmed", "resampled", "code"),
    [
        (0, [], "out-of-step"),  # the token is missing
        (1, [], "out-of-step"),
        (0, [3], "out-of-step"),  # it counts
        (1, [8], "bad-distribution"),  # the target has no such token
    ],
)
def test_a_round_without_the_drawn_token_is_refused(engine, confirmed, resampled, code):
    robot, _ = rejected(engine)
    values = {"tokens": [2], "evidence": chances(0.5)}
    robot.draft(2, confirmed, resampled=resampled, **values)
    refusal = robot.get()
    assert isinstance(refusal, Refusal) and refusal.code == code
    assert sequence_of(engine, robot) == []
    robot.draft(2, 1, resampled=[3], **values)
    assert robot.get().round == 2


def test_an_unrequested_token_is_refused(engine):
    robot, _ = rejected(engine)
    robot.draft(2, 1, tokens=[], resampled=[3])
    after = robot.get()
    assert not after.distribution
    robot.draft(3, 3, tokens=[], resampled=[1])
    assert robot.get().code == "out-of-step"


@pytest.mark.parametrize(
    "brought", [b"", chances(0.5), chances(0.5, 0.5, 0.5), chances(0.5, np.nan), chances(0.5, 2.0)]
)
def test_probabilities_that_are_none_are_refused_and_change_nothing(engine, brought):
    robot, _ = rejected(engine)
    robot.draft(2, 1, tokens=[1, 2], evidence=brought, resampled=[3])
    message = robot.get()
    assert isinstance(message, Refusal) and message.code == "bad-distribution"
    assert sequence_of(engine, robot) == []
    robot.draft(2, 1, tokens=[1], evidence=chances(0.5), resampled=[3])
    assert robot.get().round == 2


def test_the_last_token_of_a_reply_is_reported_without_an_answer(engine):
    robot, _ = rejected(engine)
    for _ in range(2):
        robot.draft(1, 1, resampled=[3])
    assert robot.silent()
    assert sequence_of(engine, robot) == [3]
    # A late double of the round is not answered, and not taken for another.
    robot.draft(tokens=[7, 1], evidence=chances(0.5, 0.5))
    assert robot.silent()


def test_rounds_ahead_of_a_rejection_come_to_nothing(engine):
    robot, _ = rejected(engine)
    robot.draft(2, 1, tokens=[2], evidence=chances(0.5), resampled=[3], assumed=b"8 bytes.")
    assert robot.get().code == "assumption-failed"
    assert sequence_of(engine, robot) == []
