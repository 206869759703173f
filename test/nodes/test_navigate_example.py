# SPDX-License-Identifier: Apache-2.0
"""examples/navigate.py against real nodes: it arrives, it cancels, it says when nobody is there."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from navigation_rig import FORWARD, HANG, STOP, NavigationRig
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup

from dsd_msgs.action import Navigate

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "navigate.py"
FAR = "It is far. Action: forward 75 cm"


def start() -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), "find the silver bottle"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_it_drives_to_the_end_and_cancels_at_ctrl_c(rig):
    nav = NavigationRig(rig)
    nav.script = [FORWARD, STOP]
    said, _ = start().communicate(timeout=120.0)
    lines = said.splitlines()
    assert lines[:2] == ["1. 0.25 m ahead", "2. stop"] and "goal is reached" in lines[-1], said
    nav.script = [FAR, HANG]  # on a busy machine the robot may arrive before the cancellation does
    program = start()
    rig.until(lambda: nav.odometry.velocity.vx > 0.1, what="the robot driving")
    program.send_signal(signal.SIGINT)
    said, _ = program.communicate(timeout=30.0)
    assert program.returncode == 1 and said.splitlines()[-1] == "Cancelled by the operator.", said
    nav.release.set()


def test_ctrl_c_before_the_goal_is_accepted_cancels_it_too(rig):
    asked, accept, cancelled = threading.Event(), threading.Event(), threading.Event()

    def on_goal(_):
        asked.set()
        assert accept.wait(60)
        return GoalResponse.ACCEPT

    def on_cancel(_):
        cancelled.set()
        return CancelResponse.ACCEPT

    def run(goal):
        while not goal.is_cancel_requested:
            time.sleep(0.01)
        goal.canceled()
        return Navigate.Result(message="stopped")

    server = ActionServer(
        rig.node, Navigate, "dsd/navigate", run, goal_callback=on_goal, cancel_callback=on_cancel,
        callback_group=ReentrantCallbackGroup(),
    )  # fmt: skip
    program = start()
    try:
        assert asked.wait(60)
        program.send_signal(signal.SIGINT)
        time.sleep(0.2)  # it is noted, and nothing follows from it yet
        assert program.poll() is None and not cancelled.is_set()
        accept.set()
        said, _ = program.communicate(timeout=60.0)
        assert cancelled.is_set() and program.returncode == 1 and said.splitlines() == ["stopped"], said
    finally:
        program.kill()
        accept.set()
        server.destroy()


def test_it_says_when_nobody_is_there(ros_domain):
    program = start()
    said, _ = program.communicate(timeout=60.0)
    assert program.returncode == 1 and "start the robot's nodes" in said
