# SPDX-License-Identifier: Apache-2.0
"""Runs a system's nodes as separate processes, for machines without `ros2 launch`.

    python -m dsd_ros.bringup.processes robot verifier:=wss://cloud.example:8765

Every child leads its own process group and dies with its parent; each line that it prints is passed on after its name.
A child marked ``respawn`` is started again after a crash. The end of any other child ends all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dsd_ros.bringup.systems import END_S, RESPAWN_DELAY_S, SYSTEMS, Start, plan, ros_arguments
from dsd_ros.environment import EXIT_BAD_START, check_environment
from dsd_ros.shown import LINES, shown

if TYPE_CHECKING:
    from typing_extensions import Self

DOMAINS = range(1, 101)  # ROS domains whose ports all lie below the ephemeral range
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Printer = Callable[[str, str], None]
NO_CRASH = (0, EXIT_BAD_START)  # exit codes; 0: it was asked to end


def domain_is_free(domain: int) -> bool:
    """Whether no process of this machine takes part in a ROS domain: the UDP port of its first participant is free."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind(("", 7410 + 250 * domain))
        except OSError:
            return False
    return True


def use_own_ros_domain() -> None:
    """Keep this process and its children in a free ROS domain and on this machine, unless the environment chooses."""
    first = os.getpid()  # so that two that start at once differ
    turns = (DOMAINS[(first + turn) % len(DOMAINS)] for turn in range(len(DOMAINS)))
    os.environ.setdefault("ROS_DOMAIN_ID", str(next(filter(domain_is_free, turns), DOMAINS[0])))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")


def how_it_ended(returncode: int) -> str:
    """As part of a sentence."""
    return f"ended by signal {-returncode}" if returncode < 0 else f"ended with exit code {returncode}"


@dataclass
class Child:
    """One process and those that replace it. A changed ``command`` applies from the next start."""

    name: str
    command: list[str]
    environment: dict[str, str]
    on_line: Callable[[str], None] | None
    respawn: bool = False  # after a crash; else its end is for good
    optional: bool = False  # its end ends nothing
    respawn_delay_s: float = RESPAWN_DELAY_S
    end_s: float = END_S  # from SIGINT until it is killed
    restarted: int = 0  # number of restarts, with one that is due
    process: subprocess.Popen[str] = field(init=False)
    reader: threading.Thread = field(init=False)
    due: float | None = None  # when it is started again (monotonic), while it is down
    given_up: bool = False

    @property
    def pid(self) -> int:
        """Of the present or the last process."""
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGKILL or SIGSTOP, to the process and its children."""
        _signal_group(self.process, number)


class ProcessGroup:
    """Children that are started and ended together; a context manager.

    The thread that calls :meth:`ended` or :meth:`wait` also restarts children and must outlive them: the kernel ends a
    child together with the thread that started it.
    """

    def __init__(self, printer: Printer | None = None, news: Printer | None = None) -> None:
        """:param printer: gets each line that a child prints.
        :param news: gets what happens to a child, such as a restart; default: the printer.
        """
        self._printer = printer or _print_prefixed
        self._news = news or self._printer
        self._children: list[Child] = []
        self._files: list[Path] = []

    @property
    def children(self) -> list[Child]:
        """All children, in the order of their first start."""
        return list(self._children)

    def child(self, name: str) -> Child:
        """The child of that name. :raises KeyError: when there is none."""
        return {child.name: child for child in reversed(self._children)}[name]

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        respawn: bool = False,
        optional: bool = False,
        end_s: float = END_S,
    ) -> Child:
        """Start one child; ``respawn``: it is started again after crashes."""
        child = Child(name, list(command), dict(environment or {}), on_line, respawn, optional, end_s=end_s)
        self._launch(child)
        self._children.append(child)
        return child

    def start_planned(
        self,
        start: Start,
        environment: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        program: Sequence[str] = (),
    ) -> Child:
        """Start a process of a plan; the child of a node in a namespace is called NAMESPACE/NAME.

        :param program: runs a node in place of this package's executable.
        """
        name, command = start.full_name.lstrip("/"), list(start.command)
        if command:
            name = start.name
        else:
            program = program or (sys.executable, "-m", "dsd_ros.ros.entry", start.name)
            command = [*program, *self.node_arguments(start)]
        return self.start(name, command, environment, on_line, start.respawn, start.optional, start.end_s)

    def node_arguments(self, start: Start) -> list[str]:
        """A planned node's arguments for rclpy, its parameters in files that last as long as this group."""
        words = ["--ros-args", *ros_arguments(start)]
        for path in (*start.parameter_files, *self._parameter_file(start)):
            words += ["--params-file", str(path)]
        return words

    def _parameter_file(self, start: Start) -> list[Path]:
        """A temporary file with what is set of a node over its files, as launch_ros writes it."""
        if not start.parameters:
            return []
        with tempfile.NamedTemporaryFile("w", prefix=f"{start.name}_", suffix=".yaml", delete=False) as made:
            yaml.safe_dump({start.full_name: {"ros__parameters": start.typed_parameters}}, made)
        self._files.append(Path(made.name))
        return [self._files[-1]]

    def restart(self, name: str) -> None:
        """End a child by SIGTERM, as an operator would, and start it again at once."""
        child = self.child(name)
        child.signal(signal.SIGTERM)
        try:
            child.process.wait(child.end_s)
        except subprocess.TimeoutExpired:
            self._news(child.name, "did not end when asked; killed")
            child.signal(signal.SIGKILL)
            child.process.wait()
        child.due, child.given_up = None, False
        self._launch(child)

    def ended(self) -> Child | None:
        """A child that has ended for good. Call it often: it also restarts the others when they are due."""
        for child in self._children:
            if child.given_up:
                if not child.optional:
                    return child
            elif child.due is not None:
                if time.monotonic() >= child.due:
                    child.due = None
                    self._launch(child)
            elif not child.running and not self._recover(child):
                child.given_up = True
                if not child.optional:
                    return child
                self._news(child.name, f"{how_it_ended(child.process.returncode)}; the others go on")
        return None

    def wait(self, stop: threading.Event, timeout: float | None = None) -> Child | None:
        """Wait until a child ends for good (it is returned), ``stop`` is set, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not stop.wait(0.05):
            child = self.ended()
            if child is not None:
                return child
            if deadline is not None and time.monotonic() > deadline:
                return None
        return None

    def _launch(self, child: Child) -> None:
        child.process = subprocess.Popen(
            child.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
            preexec_fn=partial(_prepare_child, os.getpid()),  # noqa: PLW1509  # it makes a few system calls
            env={**os.environ, "PYTHONUNBUFFERED": "1", **child.environment},
        )
        child.reader = threading.Thread(target=self._read, args=(child, child.process), daemon=True)
        child.reader.start()

    def _recover(self, child: Child) -> bool:
        """Whether a child that has just ended will be started again; prints that it ended."""
        code = child.process.returncode
        if not child.respawn:
            return False
        if code in NO_CRASH:
            self._news(child.name, f"{how_it_ended(code)}; not started again")
            return False
        child.signal(signal.SIGKILL)  # whatever it has left behind
        self._news(child.name, f"{how_it_ended(code)}; started again in {child.respawn_delay_s:.1f} s")
        child.due = time.monotonic() + child.respawn_delay_s
        child.restarted += 1
        return True

    def close(self, but: str = "") -> None:
        """End all children but those of that name."""
        kept = [child for child in self._children if child.name == but]
        self.end([child for child in self._children if child.name != but])
        self._children = kept
        if kept:
            return
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def end(self, ended: Sequence[Child]) -> None:
        """End these children: by SIGINT, and after each one's ``end_s`` by SIGKILL."""
        for child in ended:
            if child.running:
                child.signal(signal.SIGINT)
        began = time.monotonic()
        for child in ended:
            try:
                child.process.wait(max(0.0, began + child.end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._news(child.name, "did not end when asked; killed")
        for child in ended:
            if child.due is None:
                child.signal(signal.SIGKILL)  # and what it may have left behind
            child.process.wait()
            child.reader.join(timeout=0.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, child: Child, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.rstrip("\n")
                if child.on_line is not None:
                    child.on_line(text)
                self._printer(child.name, text)


def run_system(name: str, overrides: dict[str, str] | None = None) -> int:
    """Run a system until SIGINT, SIGTERM or the end of one of its nodes; returns the exit code of the first to fail.

    Call it from the main thread.
    """
    starts = plan(name, overrides)
    check_environment()
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ProcessGroup() as group:
            for start in starts:
                if not start.available:
                    print(f"{start.name} is not installed here; going on without it", file=sys.stderr)
                else:
                    group.start_planned(start)
            child = group.wait(stop)
            if child is None:
                return 0
            code = child.process.returncode
            print(f"{child.name} ended with exit code {code}; ending the others", file=sys.stderr)
            return code if code > 0 else 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _prepare_child(parent: int) -> None:
    # Children of a shell's background job inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before this call
            os._exit(1)


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    except PermissionError:  # macOS says so for a group of zombies
        return


_print_lock = threading.Lock()


def _print_prefixed(name: str, line: str) -> None:
    with _print_lock:
        print(f"[{name}] {shown(line, keep=LINES)}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the system named first with the ``argument:=value`` pairs that follow, as `ros2 launch` would."""
    if not arguments or arguments[0] not in SYSTEMS or not all(":=" in a for a in arguments[1:]):
        print(f"usage: SYSTEM [ARGUMENT:=VALUE ...], SYSTEM one of {', '.join(SYSTEMS)}", file=sys.stderr)
        return EXIT_BAD_START
    try:
        return run_system(arguments[0], dict(a.split(":=", 1) for a in arguments[1:]))
    except ValueError as error:
        print(shown(error), file=sys.stderr)
        return EXIT_BAD_START


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
