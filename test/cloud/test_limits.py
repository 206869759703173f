# SPDX-License-Identifier: Apache-2.0
"""Limits that keep one robot from harming the others: what it names, holds and takes."""

from __future__ import annotations

import struct
import threading
import time
import tracemalloc

import numpy as np
import pytest
from by_hand import Robot
from prometheus_client import generate_latest
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.settings import EngineSettings
from dsd_ros.decoding.packing import PackingError, pack_kept, unpack_kept, unpack_rows
from dsd_ros.wire.messages import Refusal, RefusalCode
from dsd_ros.wire.pictures import encode_picture
from dsd_ros.wire.turns import RobotLink


@pytest.fixture
def engine():
    with VerifierEngine(TableModel(1, ends=False)) as engine:
        yield engine


@pytest.mark.parametrize(("size", "mode"), [(1100, "tslt"), ((1 << 32) - 1, "ar")])
def test_a_vocabulary_that_is_not_the_targets_is_refused(engine, size, mode):
    error = Robot(engine).open(mode=mode, temperature=1.0, vocab_size=size).error
    assert f"vocabulary of {size}" in error and "at most 1033" in error


def test_few_bytes_never_become_many_rows_of_a_large_vocabulary(engine):
    """64 rows of one kept token each: 500 bytes that stood for gigabytes."""
    robot = Robot(engine)
    assert robot.open(mode="tslt", temperature=1.0, vocab_size=1033).error == ""
    robot.observe()
    row = np.array([3]), np.array([1.0], np.float16)
    tracemalloc.start()
    robot.draft(tokens=[3] * 64, evidence=pack_kept([row] * 64, 1033))
    assert not (isinstance(answer := robot.get(), Refusal) and answer.code == RefusalCode.MODEL_ERROR)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(("rows", "size"), [(64, 1 << 20), (33, 1 << 20), (2, 1 << 28), (1, (1 << 32) - 1)])
def test_rows_times_vocabulary_is_bounded_before_memory_is_taken(rows, size):
    bits = (size - 1).bit_length()
    kept = bytes([2]) + (struct.pack("<H", 0) + bytes((bits + 7) // 8) + b"\0\x3c") * rows
    sparse = b"\x01" + struct.pack("<I", 1) + bytes((bits + 7) // 8) + struct.pack("<f", 1.0)
    tracemalloc.start()
    with pytest.raises(PackingError, match="draft fewer tokens"):
        unpack_kept(kept, rows, size)
    with pytest.raises(PackingError, match="draft fewer tokens"):
        unpack_rows((struct.pack("<I", len(sparse)) + sparse) * rows, rows, size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def link(robot: str = "go2-01", sessions: int = 4) -> RobotLink:
    return RobotLink(robot, sessions)


def test_one_robot_holds_its_share_of_the_sessions_over_all_its_links():
    with VerifierEngine(TableModel(1), EngineSettings(max_sessions=5)) as engine:
        first, second = link(sessions=3), link(sessions=3)
        robots = [Robot(engine, peer) for peer in (first, first, second, second)]
        errors = [robot.open().error for robot in robots]
        assert errors[:3] == ["", "", ""]
        assert "go2-01 already holds its 3 sessions" in errors[3] and "tokens file" in errors[3]
        assert Robot(engine, link("go2-02")).open().error == ""
        shown = generate_latest(engine.metrics.registry).decode()
        assert 'dsd_verifier_sessions_over_limit_total{reason="robot"} 1.0' in shown
        # Its own sessions without a link make room, and no one else's.
        engine.disconnect(first)
        assert robots[3].open().error == "" and engine.held_sessions() == (3, 1)


def test_a_greedy_robot_with_large_pictures_leaves_others_their_turns(engine):
    """Before: none of the honest robot's replies in 15 s."""
    stop, answered = threading.Event(), []
    picture = encode_picture(np.zeros((2000, 2000, 3), np.uint8))

    def greedy(peer: RobotLink) -> None:
        robot, reply = Robot(engine, peer), 0
        robot.open()
        while not stop.wait(0.005):
            reply += 1
            robot.observe(reply, height=2000, width=2000, image=picture)

    peer = link()
    threads = [threading.Thread(target=greedy, args=(peer,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    honest = Robot(engine, link("go2-02"))
    honest.open()
    began = time.monotonic()
    for reply in range(1, 6):
        honest.observe(reply)
        for number in range(1, 11):
            honest.draft(number, number - 1, reply=reply)
            answered.append(honest.get())
    took = time.monotonic() - began
    stop.set()
    for thread in threads:
        thread.join(10)
    assert [answer.next_token for answer in answered[:10]] == [answer.next_token for answer in answered[-10:]]
    assert took < 10
