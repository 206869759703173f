# SPDX-License-Identifier: Apache-2.0
"""Nodes that end on request leave nothing of Fast DDS in shared memory."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from rclpy.utilities import get_rmw_implementation_identifier

from dsd_ros.bringup.processes import ProcessGroup
from dsd_ros.bringup.systems import plan
from dsd_ros.ros.running import NOT_CLOSED

# Of a participant; ports belong to whoever came first.
SEGMENT = re.compile(r"/dev/shm/fastrtps_[0-9a-f]{16}\b")
RUNNING = {
    "simulator_node": "running", "navigation_node": "idle", "supervisor_node": "ready",
    "verifier_node": "session opened", "draft_node": "session open",
}  # fmt: skip

_TRIALS = 4  # of which one must be of nodes that all had time to close


def mapped(pid: int) -> set[str]:
    """The segments that a process has mapped."""
    return set(SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text()))


@pytest.mark.skipif("fastrtps" not in get_rmw_implementation_identifier(), reason="Fast DDS' matter alone")
def test_nodes_that_are_asked_to_end_leave_nothing_in_shared_memory(ros_domain, tiny_pair, monkeypatch):
    monkeypatch.delenv("FASTDDS_BUILTIN_TRANSPORTS", raising=False)
    models = {"target_model": str(tiny_pair[0]), "draft_model": str(tiny_pair[1])}
    for _ in range(_TRIALS):
        segments, lines = start_and_end(models)
        assert len(segments) >= len(RUNNING)
        assert not [name for name, said in lines.items() if "killed" in said], lines
        # A node that gets no processor for a second is ended as it is, and leaves its own segment.
        hurried = [name for name, said in lines.items() if NOT_CLOSED in said]
        assert len([segment for segment in segments if Path(segment).exists()]) <= len(hurried), lines
        if not hurried:
            break
    assert not hurried, lines


def start_and_end(models: dict[str, str]) -> tuple[set[str], dict[str, str]]:
    """The segments of a system that has run and been asked to end, and what its nodes printed."""
    lines: dict[str, str] = dict.fromkeys(RUNNING, "")
    # What is there already is not theirs, though they map what they discover: processes of other
    # tests that were killed leave theirs.
    before = {str(path) for path in Path("/dev/shm").glob("fastrtps_*")}

    def listen(name: str, line: str) -> None:
        lines[name] += line + "\n"

    with ProcessGroup(listen) as group:
        children = [group.start_planned(start) for start in plan("demo", models)]
        assert {child.name for child in children} == set(RUNNING)
        deadline = time.monotonic() + 180.0
        while not all(words in lines[name] for name, words in RUNNING.items()):
            assert time.monotonic() < deadline and group.ended() is None, lines
            time.sleep(0.05)
        return set().union(*(mapped(child.pid) for child in children)) - before, lines
