"""Runs a system's nodes as separate processes, for machines without `ros2 launch`.

    python -m dsd_ros.ros.processes robot verifier:=wss://cloud.example:8765

Every child leads a process group of its own and dies with its parent; what it prints is passed on line by line
behind its name. A child that may be recovered is started again after a crash; any other one's end, and one crash too
many, ends them all.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dsd_ros.ros.bringup import PER_ROBOT, SYSTEMS, NodeStart, environment_of, plan, program_command, values_of
from dsd_ros.ros.respawn import Restarts, how_it_ended

INTERRUPT_S = 1.6  # what a child gets to end by itself before it is killed
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

Printer = Callable[[str, str], None]


@dataclass
class Child:
    """One process, and those that take its place when it is started again.

    ``command`` may be changed: it holds from the next start on.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    on_line: Callable[[str], None] | None
    restarts: Restarts | None  # None: its end is for good
    optional: bool = False  # its end ends nothing
    process: subprocess.Popen[str] = field(init=False)
    reader: threading.Thread = field(init=False)
    due: float | None = None  # when it is started again (monotonic), while it is down
    given_up: bool = False

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        return self.process.pid

    @property
    def restarted(self) -> int:
        """How many times it has been started again, or is about to be."""
        return self.restarts.count if self.restarts is not None else 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal, e.g. SIGKILL or SIGSTOP, to the process and what it has started itself."""
        _signal_group(self.process, number)


class ProcessGroup:
    """Children that are started and ended together. Use it as a context manager.

    The thread that calls :meth:`ended` or :meth:`wait` starts children again, too, so it must outlive them: the kernel
    ends a child with the thread that started it.
    """

    def __init__(self, printer: Printer | None = None) -> None:
        self._printer = printer or _print_prefixed
        self._children: list[Child] = []
        self._files: list[Path] = []

    @property
    def children(self) -> list[Child]:
        """All of them, in the order they were first started."""
        return list(self._children)

    def child(self, name: str) -> Child:
        """The child of that name. :raises KeyError: when there is none."""
        for child in self._children:
            if child.name == name:
                return child
        raise KeyError(name)

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
        restarts: Restarts | None = None,
        optional: bool = False,
    ) -> Child:
        """Start one child; with ``restarts`` it is started again after crashes, as they allow."""
        child = Child(name, list(command), dict(environment or {}), on_line, restarts, optional)
        self._launch(child)
        self._children.append(child)
        return child

    def start_node(self, start: NodeStart, environment: dict[str, str] | None = None) -> Child:
        """Start a node with its parameter file and the overrides behind it.

        The child is named after the executable, behind the namespace where there is one.
        """
        name = start.entry.executable
        path = self._merged_file(start) if start.parameters else start.entry.parameter_file
        command = [sys.executable, "-m", "dsd_ros.ros.entry", name, "--ros-args"]
        for file in (path, *(guest.parameter_file for guest in start.guests)):
            command += ["--params-file", str(file)]
        if start.namespace:
            name = f"{start.namespace.strip('/')}/{name}"
            command += ["-r", f"__ns:=/{start.namespace.strip('/')}"]
            for topic in PER_ROBOT:
                command += ["-r", f"{topic}:={topic[1:]}"]
        restarts = Restarts() if start.entry.respawn else None
        variables = {**start.environment, **(environment or {})}
        optional = start.entry.optional
        return self.start(name, command, variables, restarts=restarts, optional=optional)

    def restart(self, name: str) -> None:
        """End a child as its operator would, by SIGTERM, and start it again at once."""
        child = self.child(name)
        child.signal(signal.SIGTERM)
        try:
            child.process.wait(INTERRUPT_S)
        except subprocess.TimeoutExpired:
            self._printer(child.name, "did not end when asked; killed")
            child.signal(signal.SIGKILL)
            child.process.wait()
        child.due, child.given_up = None, False
        self._launch(child)

    def ended(self) -> Child | None:
        """A child that has ended for good. Call it often: it starts the others again when it is time."""
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
                self._printer(child.name, f"{how_it_ended(child.process.returncode)}; the others go on")
        return None

    def wait(self, stop: threading.Event, timeout: float | None = None) -> Child | None:
        """Wait until a child ends for good (returned), ``stop`` is set, or the time is over."""
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
            preexec_fn=_prepare_child,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **child.environment},
        )
        child.reader = threading.Thread(
            target=self._read, args=(child.name, child.process, child.on_line), name=f"log {child.name}", daemon=True
        )
        child.reader.start()

    def _recover(self, child: Child) -> bool:
        """Whether a child that has just ended will be started again; says so."""
        if child.restarts is None:
            return False
        code = child.process.returncode
        pause = child.restarts.after(code, time.monotonic())
        if pause is None:
            self._printer(child.name, child.restarts.sentence(code))
            return False
        child.signal(signal.SIGKILL)  # what it may have left behind
        self._printer(child.name, f"{how_it_ended(code)}; started again in {pause:.1f} s")
        child.due = time.monotonic() + pause
        return True

    def close(self, but: str = "") -> None:
        """End all children, or all but those of that name: SIGINT, and SIGKILL for those that do not heed it within a
        second or so."""
        kept = [child for child in self._children if child.name == but]
        ended = [child for child in self._children if child.name != but]
        for child in ended:
            if child.running:
                child.signal(signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_S
        for child in ended:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._printer(child.name, "did not end when asked; killed")
        for child in ended:
            if child.due is None:
                child.signal(signal.SIGKILL)  # what it may have left behind, too
            child.process.wait()
            child.reader.join(timeout=0.5)
        self._children = kept
        if kept:
            return
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, name: str, process: subprocess.Popen[str], on_line: Callable[[str], None] | None) -> None:
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
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ProcessGroup() as group:
            environment = environment_of(system, values)
            for program in system.programs:
                if program.wanted(values):
                    restarts = Restarts() if program.respawn else None
                    command = program_command(program, values)
                    if shutil.which(command[0]) is None:
                        print(f"{command[0]} is not installed here; going on without it", file=sys.stderr)
                        continue
                    group.start(program.name, command, environment, None, restarts, program.optional)
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
        print(f"usage: SYSTEM [ARGUMENT:=VALUE ...], SYSTEM one of {', '.join(SYSTEMS)}", file=sys.stderr)
        return 2
    try:
        return run_system(arguments[0], dict(a.split(":=", 1) for a in arguments[1:]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
