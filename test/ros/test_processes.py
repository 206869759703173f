# SPDX-License-Identifier: Apache-2.0
"""The process runner ends what it started: on a signal, on the failure of one, and when it dies itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from dsd_ros.bringup import processes
from dsd_ros.bringup.processes import ProcessGroup, domain_is_free, main, use_own_ros_domain
from dsd_ros.bringup.systems import plan

CHILD = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(done, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_mistyped_address_ends_all(capfd, ros_domain):
    assert main(["robot", "verifier:=ws://robot:hunter2@h:1", "token_file:=/dev/null", "driver:=none"]) == 2
    out, err = capfd.readouterr()
    assert (
        "'ws://***@h:1' is not a verifier address" in out and "ending the others" in err and "hunter2" not in out + err
    )


def test_lines_carry_names_and_children_end():
    lines = []
    group = ProcessGroup(lambda name, line: lines.append((name, line)))
    with group:
        one = group.start("one", [sys.executable, "-c", CHILD])
        two = group.start("two", [sys.executable, "-c", STUBBORN])
        until(lambda: len(lines) == 2)
        assert sorted(lines) == [("one", "up"), ("two", "up")]
        assert group.ended() is None
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    assert one.process.returncode == -signal.SIGINT
    assert two.process.returncode == -signal.SIGKILL
    assert ("two", "did not end when asked; killed") in lines


def test_grandchildren_end_too():
    pids = []
    with ProcessGroup(lambda *_: None) as group:
        group.start("parent", [sys.executable, "-c", PARENT], on_line=pids.append)
        until(lambda: pids)
    until(lambda: not alive(int(pids[0])))


def test_a_child_that_ends_is_noticed():
    with ProcessGroup(lambda *_: None) as group:
        group.start("long", [sys.executable, "-c", CHILD])
        short = group.start("short", [sys.executable, "-c", "raise SystemExit(7)"])
        until(lambda: group.ended() is not None)
        assert group.ended() is short and short.process.returncode == 7


RUN = """
import sys
from dsd_ros.bringup.processes import run_system
sys.exit(run_system("demo", dict(a.split("=", 1) for a in sys.argv[1:])))
"""

NODES = len(plan("demo"))


class SystemRun:
    """`run_system` in a process of its own, started as a shell's background job starts it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", RUN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Background jobs ignore SIGINT unless something sets it back.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # noqa: PLW1509  # one call
        )

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def close(self) -> None:
        """Whatever became of the test: nothing of it goes on running."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start(tiny_pair, ros_domain):
    """Starts the system with the tiny pair and further arguments."""
    target, draft = tiny_pair
    runs = []

    def start(*arguments: str) -> SystemRun:
        runs.append(SystemRun(f"target_model={target}", f"draft_model={draft}", *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_the_whole_system(start, number):
    run = start()
    lines = []
    for line in run.process.stdout:
        lines.append(line)
        if "session open, mode " in line:
            break
    children = run.children()
    assert len(children) == NODES
    began = time.monotonic()
    run.process.send_signal(number)
    rest = run.process.stdout.read()
    assert run.process.wait(10.0) == 0, rest
    assert time.monotonic() - began < 5.0
    assert not any(alive(pid) for pid in children)
    assert "Traceback" not in "".join(lines) + rest
    assert any(line.startswith("[simulator_node] ") for line in lines)


def test_the_failure_of_one_ends_all(start):
    run = start("device=abacus")
    output = run.process.stdout.read()
    assert run.process.wait(10.0) == 2, output
    assert "draft_node ended with exit code 2; ending the others" in output
    assert "unknown device 'abacus'" in output and "Traceback" not in output


def test_no_orphans_when_the_runner_is_killed(start):
    run = start()
    run.process.stdout.readline()
    until(lambda: len(run.children()) == NODES)
    children = run.children()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    until(lambda: not any(alive(pid) for pid in children), 10.0)


def test_a_child_whose_runner_died_before_it_could_be_told_ends():
    command = [sys.executable, "-c", "print('up')"]
    for parent, code, printed in ((os.getpid(), 0, b"up\n"), (-1, 1, b"")):
        child = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=partial(processes._prepare_child, parent))
        assert (child.returncode, child.stdout) == (code, printed)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "demo, robot, verifier"),
        (["attic"], "demo, robot, verifier"),
        (["robot", "speed=1"], "ARGUMENT:=VALUE"),
        (["robot", "bogus:=1"], "no argument 'bogus'"),
    ],
)
def test_a_system_or_argument_that_is_none_is_named(capsys, arguments, named):
    assert processes.main(arguments) == 2
    assert named in capsys.readouterr().err


def test_a_domain_in_use_is_not_chosen(monkeypatch):
    monkeypatch.delenv("ROS_DOMAIN_ID", raising=False)
    monkeypatch.delenv("ROS_AUTOMATIC_DISCOVERY_RANGE", raising=False)
    use_own_ros_domain()
    chosen = int(os.environ.pop("ROS_DOMAIN_ID"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as participant:
        participant.bind(("", 7410 + 250 * chosen))
        assert not domain_is_free(chosen)
        use_own_ros_domain()
    assert int(os.environ["ROS_DOMAIN_ID"]) not in (0, chosen)
