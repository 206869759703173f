# SPDX-License-Identifier: Apache-2.0
"""Which processes restart, and how soon; in the process runner and as a rule."""

from __future__ import annotations

import signal
import sys
import threading
import time

import pytest

from dsd_ros.bringup.processes import ProcessGroup
from dsd_ros.bringup.systems import plan

SLEEP = "import os, time; print('up', os.getpid(), flush=True); time.sleep(600)"


def test_only_what_a_robot_at_rest_can_miss_is_started_again():
    everything = {"memory": "auto", "serve": "true", "record": "/bag", "rviz": "true"}
    plans = [
        plan("demo", everything),
        plan("demo", everything | {"transport": "websocket", "view": "true"}),
        plan("robot", everything),
        plan("verifier"),
    ]
    respawned = {start.name: start.respawn for starts in plans for start in starts}
    assert respawned == {
        "simulator_node": False, "go2_node": False, "supervisor_node": False,
        "navigation_node": True, "draft_node": True, "verifier_node": True, "bridge_node": True,
        "memory_node": True, "serve_node": True,
        "record_node": False, "visual_node": False, "view_node": False,
        "verifier": True, "rviz2": False,
    }  # fmt: skip


class Group(ProcessGroup):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        super().__init__(lambda name, line: self.lines.append((name, line)))

    def ups(self) -> int:
        return sum(line.startswith("up") for _, line in self.lines)

    def until(self, done, timeout: float = 60.0):
        deadline = time.monotonic() + timeout
        while not (value := done()):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)
        return value


def test_a_killed_child_is_started_again():
    with Group() as group:
        child = group.start("draft", [sys.executable, "-c", SLEEP], respawn=True)
        other = group.start("other", [sys.executable, "-c", SLEEP])
        child.respawn_delay_s = 0.01
        pids = {child.pid}
        for number in range(1, 4):
            group.until(lambda: child.running and group.ups() == number + 1)  # noqa: B023
            assert group.child("draft") is child and child.restarted == number - 1
            child.signal(signal.SIGKILL)
            group.until(lambda: group.ended() is None and child.pid not in pids)
            pids.add(child.pid)
        assert len(pids) == 4 and other.restarted == 0 and other.running
        with pytest.raises(KeyError):
            group.child("nobody")


@pytest.mark.parametrize("code", [0, 2])
def test_a_child_that_ended_on_request_or_cannot_start_is_not_started_again(code):
    with Group() as group:
        child = group.start("one", [sys.executable, "-c", f"raise SystemExit({code})"], respawn=True)
        assert group.until(group.ended) is child
        assert group.lines == [("one", f"ended with exit code {code}; not started again")]


def test_a_changed_command_holds_from_the_next_start_on():
    with Group() as group:
        child = group.start("one", [sys.executable, "-c", SLEEP], respawn=True)
        child.respawn_delay_s = 0.01
        child.command = [sys.executable, "-c", "print('another', flush=True)"]
        child.signal(signal.SIGKILL)
        group.until(lambda: group.ended() is child)  # the other one ends with 0: for good
        group.until(lambda: ("one", "another") in group.lines)


def test_the_end_of_what_is_optional_ends_nothing():
    with Group() as group:
        child = group.start("bag", [sys.executable, "-c", "raise SystemExit(2)"], optional=True)
        other = group.start("other", [sys.executable, "-c", SLEEP])
        group.until(lambda: not child.running)
        assert group.ended() is None and group.ended() is None
        assert [line for name, line in group.lines if name == "bag"] == ["ended with exit code 2; the others go on"]
        other.signal(signal.SIGKILL)
        assert group.until(group.ended) is other


def test_an_end_during_a_pause_is_at_once():
    with Group() as group:
        child = group.start("one", [sys.executable, "-c", SLEEP], respawn=True)
        child.respawn_delay_s = 500.0
        group.until(lambda: group.ups() == 1)
        child.signal(signal.SIGKILL)
        group.until(lambda: group.ended() is None and child.due is not None)
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        assert group.wait(stop, 60.0) is None
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    assert not child.running and group.children == []
