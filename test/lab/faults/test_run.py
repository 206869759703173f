# SPDX-License-Identifier: Apache-2.0
"""A small fault bench: the whole demo with the shipped pair, a few faults, and no process left over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsd_lab.faults.run import _left_over


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["websocket", "dds"])
def test_a_few_faults_leave_the_robot_safe_and_exact(ros_domain, tmp_path, transport):
    path = tmp_path / "faults.json"
    command = ["bench", "faults", "--count", "4", "--transport", transport, "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "dsd_lab.cli", *command],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["problems"] == []
    assert [trial["number"] for trial in report["trials"]] == [1, 2, 3, 4]
    assert all(trial["recovered_s"] is not None for trial in report["trials"])
    [part] = report["transports"]
    assert part["equal_to_target"] + part["pictures_not_seen"] == part["actions"] > 0
    assert part["equal_to_target"] > 0
    assert "4/4" in done.stderr and "0 problems" in done.stdout


def test_a_process_that_is_left_over_is_found():
    """By its environment, which all of the bench's processes carry."""
    mark = Path(__file__).name + str(os.getpid())
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {"DSD_FAULTS_BENCH": mark}, start_new_session=True)
    try:
        deadline = time.monotonic() + 20.0
        while not (found := _left_over(mark)):  # its environment is there a moment after itself
            assert time.monotonic() < deadline
        assert found == ["sleep 60"]
    finally:
        process.kill()
        process.wait()
    assert _left_over(mark) == []
