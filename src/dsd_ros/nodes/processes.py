"""Runs a system's nodes as separate processes, for machines without `ros2 launch`.

    python -m dsd_ros.nodes.processes robot verifier:=wss://cloud.example:8765

Every child leads a process group of its own and dies with its parent; what it prints is passed on line by line
behind its name. One failing child ends them all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dsd_ros.nodes.bringup import SYSTEMS, NodeStart, plan, program_command, values_of

INTERRUPT_S = 1.6  # what a child gets to end by itself before it is killed
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Printer = Callable[[str, str], None]


@dataclass
class Child:
    """One running process."""

    name: str
    process: subprocess.Popen[str]
    reader: threading.Thread


class ProcessGroup:
    """Children that are started and ended together. Use it as a context manager."""

    def __init__(self, printer: Printer | None = None) -> None:
        self._printer = printer or _print_prefixed
        self._children: list[Child] = []
        self._files: list[Path] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Child:
        """Start one child. Call it from a thread that outlives the child: the kernel ends it with that thread."""
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            start_new_session=True,
            preexec_fn=_prepare_child,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        reader = threading.Thread(
            target=self._read, args=(name, process, on_line), name=f"log {name}", daemon=True
        )
        child = Child(name, process, reader)
        self._children.append(child)
        reader.start()
        return child

    def start_node(self, start: NodeStart, environment: dict[str, str] | None = None) -> Child:
        """Start a node with its parameter file and the overrides behind it."""
        command = [
            sys.executable,
            "-m",
            "dsd_ros.nodes.entry",
            start.entry.executable,
            "--ros-args",
        ]
        path = self._merged_file(start) if start.parameters else start.entry.parameter_file
        command += ["--params-file", str(path)]
        return self.start(start.entry.executable, command, environment)

    def ended(self) -> Child | None:
        """A child that is no longer running."""
        for child in self._children:
            if child.process.poll() is not None:
                return child
        return None

    def wait(self, stop: threading.Event, timeout: float | None = None) -> Child | None:
        """Wait until a child ends (returned), ``stop`` is set, or the time is over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not stop.wait(0.05):
            child = self.ended()
            if child is not None:
                return child
            if deadline is not None and time.monotonic() > deadline:
                return None
        return None

    def close(self) -> None:
        """End all children: SIGINT, and SIGKILL for those that do not heed it within a second or so."""
        for child in self._children:
            _signal_group(child.process, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_S
        for child in self._children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._printer(child.name, "did not end when asked; killed")
        for child in self._children:
            _signal_group(child.process, signal.SIGKILL)  # what it may have left behind, too
            child.process.wait()
            child.reader.join(timeout=0.5)
        self._children.clear()
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(
        self,
        name: str,
        process: subprocess.Popen[str],
        on_line: Callable[[str], None] | None,
    ) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                text = line.rstrip("\n")
                if on_line is not None:
                    on_line(text)
                self._printer(name, text)

    def _merged_file(self, start: NodeStart) -> Path:
        """The node's parameter file with the arguments written over it.

        One file, because of two rcl keeps the first's value where the second's is of another type.
        """
        content = yaml.safe_load(start.entry.parameter_file.read_text())
        parameters = content[f"/**/{start.entry.executable}"]["ros__parameters"]
        for name, value in start.parameters.items():
            *groups, last = name.split(".")
            place = parameters
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = _typed(place.get(last), value)
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"{start.entry.executable}_", suffix=".yaml", delete=False
        ) as file:
            yaml.safe_dump(content, file)
        self._files.append(Path(file.name))
        return self._files[-1]


def run_system(name: str, overrides: dict[str, str] | None = None) -> int:
    """Run a system until SIGINT, SIGTERM or the end of one of its nodes; the exit code of the first to fail.

    Call it from the main thread.
    """
    starts = plan(name, overrides)
    system = SYSTEMS[name]
    values = values_of(system, overrides)
    stop = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with ProcessGroup() as group:
            for program in system.programs:
                if program.wanted(values):
                    group.start(program.name, program_command(program, values))
            for start in starts:
                group.start_node(start)
            child = group.wait(stop)
            if child is None:
                return 0
            code = child.process.returncode
            print(f"{child.name} ended with exit code {code}; ending the others", file=sys.stderr)
            return code if code > 0 else 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _typed(known: object, value: str) -> object:
    """The value as the type that the parameter file gives this parameter; text stays text."""
    if isinstance(known, bool):
        return value.lower() in ("1", "true", "yes", "on")
    try:
        if isinstance(known, int):
            return int(value)
        if isinstance(known, float):
            return float(value)
    except ValueError:
        return value  # the node refuses it, with a sentence that names the parameter
    return value


def _prepare_child() -> None:
    # Children of a shell's background job inherit an ignored SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
        print(f"[{name}] {line}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the system named first, with the ``argument:=value`` pairs behind it, as `ros2 launch` would."""
    if not arguments or arguments[0] not in SYSTEMS or not all(":=" in a for a in arguments[1:]):
        print(
            f"usage: SYSTEM [ARGUMENT:=VALUE ...], SYSTEM one of {', '.join(SYSTEMS)}",
            file=sys.stderr,
        )
        return 2
    try:
        return run_system(arguments[0], dict(a.split(":=", 1) for a in arguments[1:]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
