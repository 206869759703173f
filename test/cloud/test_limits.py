"""Limits that keep one robot from harming the others: what it names, holds and takes."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from by_hand import Robot
from table_model import TableModel

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.decoding.packing import PackingError, pack_kept, unpack_kept, unpack_rows
from dsd_ros.wire.messages import Refusal, RefusalCode


@pytest.fixture
def engine():
    with VerifierEngine(TableModel(1, ends=False)) as engine:
        yield engine


@pytest.mark.parametrize("size", [1100, 1 << 20, 1 << 28, (1 << 32) - 1])
@pytest.mark.parametrize("mode", ["tslt", "dsd", "dssd", "ar"])
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
