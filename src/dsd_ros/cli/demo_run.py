"""What `dsd demo` runs: every node as a process of its own, one Navigate goal, ground truth, a report.

Exit codes: 0 the target was reached; 1 it was not; 2 bad input; 3 the link or the verifier failed; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_lab.links.proxy import LinkProxy
from dsd_ros.cli.demo_scenarios import scenario
from dsd_ros.cli.verifier_address import VerifierAddress, address_in
from dsd_ros.decoding.modes import mode as decoding_mode
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.observe.view.web import MISSING as VIEW_MISSING
from dsd_ros.observe.view.web import available as view_available
from dsd_ros.robot.sim.world import World
from dsd_ros.ros.bringup import DEMO, DEMO_SEED, RECORD, ROBOTS, RVIZ, TRANSPORTS, plan, program_command, values_of
from dsd_ros.ros.processes import Child, ProcessGroup
from dsd_ros.ros.respawn import Restarts

if TYPE_CHECKING:
    from dsd_ros.ros.demo_client import DemoClient

EXIT_REACHED, EXIT_MISSED, EXIT_BAD_INPUT, EXIT_LINK, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
DEMO_INSTRUCTION = "find the silver bottle"
_READY_LIMIT_S = 180.0
_RECORDER_LIMIT_S = 15.0  # behind that: the run does not depend on its recording
_VIEW = "view_node"
_OWN = {"namespace", "domain", "verifier"}  # arguments that would part the demo from its own nodes


@dataclass(frozen=True)
class DemoSettings:
    """One demo run; ValueError for a scenario that is none."""

    instruction: str = ""  # empty: the scenario's
    mode: str = "dsd"
    transport: str = "dds"
    robot: str = "simulated"
    seed: int | None = None  # None: the scenario's
    scenario: str = ""  # a name of demo_scenarios; empty: the plain one
    temperature: float = 0.0
    draft_model: str = ""  # empty: the shipped one
    target_model: str = ""
    target_tokenizer: str = ""  # empty: the draft's own
    headless: bool = False  # no window, no line that is rewritten in place: plain output
    json_path: str | None = None  # "-": to stdout, beside the text unless the caller leaves that out
    time_limit: float = 180.0  # of the run, s
    arguments: dict[str, str] = field(default_factory=dict)  # more of the demo system's, by name
    relay: LinkProxy | None = None  # is pointed at the verifier, over a websocket; the caller's

    def with_scenario(self) -> DemoSettings:
        """The same with what was left to the scenario; ValueError for one that is none."""
        if not self.scenario:
            seed = DEMO_SEED if self.seed is None else self.seed
            return replace(self, instruction=self.instruction or DEMO_INSTRUCTION, seed=seed)
        chosen = scenario(self.scenario)
        return replace(
            self,
            instruction=self.instruction or chosen.instruction,
            seed=chosen.seed if self.seed is None else self.seed,
            arguments={**chosen.arguments, **self.arguments},
        )

    @property
    def target(self) -> str:
        """What names the world's target."""
        return scenario(self.scenario).target if self.scenario else self.instruction


@dataclass
class DemoReport:
    """What a run came to; the JSON is this, field by field."""

    reached: bool = False
    distance_m: float | None = None
    collisions: int = 0
    mode: str = ""
    transport: str = ""
    robot: str = ""
    seed: int = 0
    seconds: float = 0.0
    instruction: str = ""
    scenario: str = ""
    answer: str = ""  # what memory said to the instruction; empty: it was not asked, or said nothing
    resolved_instruction: str = ""  # what was carried out; empty: nothing was
    outcome: str = "UNKNOWN"
    message: str = ""
    startup_seconds: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    path: list[list[float]] = field(default_factory=list)  # x, y (m), yaw (rad), every few cm


class _Stop(Exception):
    """The demo ends here; carries the exit code and a sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def run_demo(settings: DemoSettings) -> int:
    """Run the whole system once and return the exit code. Call it from the main thread.

    All processes it started have ended when it returns, within 2 s of an interruption. On a terminal it keeps serving
    the web view behind the run until it is interrupted; that changes nothing about the exit code.
    """
    try:
        settings = settings.with_scenario()
        _check(settings)
    except (ValueError, FileNotFoundError) as error:
        print(f"dsd demo: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    _choose_domain()
    interrupted = threading.Event()
    previous = {
        number: signal.signal(number, lambda *_: interrupted.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    report = DemoReport(
        mode=settings.mode,
        transport=settings.transport,
        robot=settings.robot,
        seed=settings.seed or 0,
        instruction=settings.instruction,
        scenario=settings.scenario,
    )
    stopped: _Stop | None = None
    try:
        with ProcessGroup() as group:
            try:
                code = _run(settings, group, interrupted, report)
            except _Stop as stop:
                stopped = stop
            else:
                code = _write(report, settings, code)
                _serve_on(settings, group, interrupted)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped is not None:
        report.message = report.message or str(stopped)
        print(f"dsd demo: {stopped}", file=sys.stderr)
        code = _write(report, settings, stopped.code)
    return code


def _write(report: DemoReport, settings: DemoSettings, code: int) -> int:
    """Write the JSON where it is wanted; the exit code."""
    if settings.json_path is None:
        return code
    text = json.dumps(report.__dict__, indent=2) + "\n"
    try:
        if settings.json_path == "-":
            answers = getattr(sys.stdout, "answers", sys.stdout)  # beside the text that is left out
            answers.write(text)
            answers.flush()
        else:
            Path(settings.json_path).write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"dsd demo: the report cannot be written: {error}", file=sys.stderr)
        return code or EXIT_BAD_INPUT
    return code


def _serve_on(settings: DemoSettings, group: ProcessGroup, stop: threading.Event) -> None:
    """On a terminal, keep the web view for as long as somebody may look at it; all else has ended."""
    views = [child for child in group.children if child.name == _VIEW and child.running]
    if settings.headless or not views or not sys.stdout.isatty():
        return
    group.close(but=_VIEW)
    print("the web view stays open; Ctrl-C ends", flush=True)
    while not stop.wait(0.1) and group.ended() is None and not views[0].given_up:
        pass


def _check(settings: DemoSettings) -> None:
    """Refuse bad input before anything is started; ValueError with one sentence."""
    decoding_mode(settings.mode)
    if settings.transport not in TRANSPORTS:
        raise ValueError(f"'{settings.transport}' is no transport; choose from {', '.join(TRANSPORTS)}.")
    if settings.relay is not None and settings.transport != "websocket":
        raise ValueError(f"Over {settings.transport} nothing goes through a relay: use websocket.")
    if settings.robot not in ROBOTS:
        raise ValueError(f"'{settings.robot}' is no robot; choose from {', '.join(ROBOTS)}.")
    text = settings.instruction.strip()
    if not text:
        raise ValueError("The instruction is empty: say what the robot should find.")
    if len(text) > MAX_INSTRUCTION_CHARS:
        raise ValueError(f"The instruction has {len(text)} characters; at most {MAX_INSTRUCTION_CHARS} are allowed.")
    World.from_seed(settings.seed or 0, settings.target.strip())
    recorded = values_of(DEMO, _arguments(settings))["record"]
    if recorded and Path(recorded).exists():
        raise ValueError(f"{recorded} is there already; name a folder for the bag that is not.")
    if settings.json_path not in (None, "-"):
        folder = Path(str(settings.json_path)).resolve().parent
        if not folder.is_dir():
            raise ValueError(f"The directory of the report, {folder}, does not exist.")


def _choose_domain() -> None:
    """A domain and discovery range of our own, unless the user has chosen."""
    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")


def _run(settings: DemoSettings, group: ProcessGroup, stop: threading.Event, report: DemoReport) -> int:
    began = time.monotonic()
    _start_processes(settings, group, stop)
    # Imported late: the children are already starting while this process loads ROS.
    from dsd_ros.ros.demo_client import DemoClient

    driver = "go2_node" if settings.robot == "go2-standin" else ""
    values = values_of(DEMO, _arguments(settings))
    memory, recorded = values["memory"] != "never", bool(values["record"])
    client = DemoClient(live=not settings.headless, driver=driver, memory=memory, recorded=recorded)
    try:
        _wait(client.ready, group, stop, _READY_LIMIT_S, "The nodes did not become ready")
        if recorded:
            _await_recorder(client, group, stop)
        report.startup_seconds = round(time.monotonic() - began, 3)
        print(
            f"ready after {report.startup_seconds:.1f} s: seed {settings.seed}, mode {settings.mode} over "
            f"{settings.transport}: {settings.instruction}",
            flush=True,
        )
        started = time.monotonic()
        client.send_goal(settings.instruction, settings.time_limit)
        limit = settings.time_limit + 30.0
        navigation = group.child("navigation_node")
        _wait(
            lambda: client.finished() or navigation.restarted > 0,
            group, stop, limit, "The run did not end in time",
        )  # fmt: skip
        if not client.finished():
            raise _Stop(EXIT_MISSED, "navigation_node crashed, and the run was lost with it")
        report.seconds = round(time.monotonic() - started, 3)
        client.settle(1.2 if recorded else 0.3)  # the bag wants the end, too
    finally:
        client.fill(report)
        client.close()
    if report.answer:
        print(f"memory: {report.answer}", flush=True)
    where = "" if report.distance_m is None else f", {report.distance_m:.2f} m from the target"
    print(
        f"{'REACHED' if report.reached else 'not reached'} after {report.seconds:.1f} s and "
        f"{len(report.steps)} actions{where}, {report.collisions} collisions. {report.outcome}: "
        f"{report.message}",
        flush=True,
    )
    if report.reached:
        return EXIT_REACHED
    return EXIT_LINK if report.outcome in client.LINK_OUTCOMES else EXIT_MISSED


def _await_recorder(client: DemoClient, group: ProcessGroup, stop: threading.Event) -> None:
    """Wait until the recorder hears everything; say what it does not hear, if that is not soon, and go on."""
    deadline = time.monotonic() + _RECORDER_LIMIT_S
    recorder = group.child(RECORD.executable)
    _wait(
        lambda: not client.unheard() or recorder.given_up or time.monotonic() > deadline,
        group, stop, _READY_LIMIT_S, "The recorder was not ready",
    )  # fmt: skip
    unheard = sorted(client.unheard())
    if recorder.given_up:
        print("dsd demo: nothing is recorded: record_node has ended", file=sys.stderr)
    elif unheard:
        told = f"{', '.join(unheard)} after {_RECORDER_LIMIT_S:.0f} s; the bag may lack some of it"
        print(f"dsd demo: record_node does not hear {told}", file=sys.stderr)


def _arguments(settings: DemoSettings) -> dict[str, str]:
    """The demo system's arguments; ValueError for one that is the demo's own to set."""
    known = {
        "transport": settings.transport,
        "robot": settings.robot,
        "mode": settings.mode,
        "seed": str(settings.seed),
        "instruction": settings.target,
        "temperature": str(settings.temperature),
        "draft_model": settings.draft_model,
        "target_model": settings.target_model,
        "target_tokenizer": settings.target_tokenizer,
        "verifier_port": "0",
    }
    own = sorted((known.keys() | _OWN) & settings.arguments.keys())
    if own:
        raise ValueError(f"'{own[0]}:=' is for the demo itself to set; see 'dsd demo --help' for an option.")
    view = "true" if not settings.headless and view_available() else "false"
    return known | {"view": view, "view_open": view} | settings.arguments


def _start_processes(settings: DemoSettings, group: ProcessGroup, stop: threading.Event) -> None:
    overrides = _arguments(settings)
    values = values_of(DEMO, overrides)
    if not settings.headless and not view_available():
        print(f"dsd demo: {VIEW_MISSING}", file=sys.stderr)
    named: list[VerifierAddress] = []

    def look(line: str) -> None:
        found = address_in(line)
        if found is not None:
            named.append(found)

    for program in reversed(DEMO.programs):  # RViz first: the verifier's branch starts the rest and returns
        if program is RVIZ:
            if program.wanted(values) and shutil.which(program.name):
                group.start(program.name, program_command(program, values), optional=True)
        elif program.wanted(values):
            verifier = group.start(
                program.name,
                program_command(program, values),
                on_line=look,
                restarts=Restarts() if program.respawn else None,
            )
            # The other nodes need not wait for the verifier's model: only the bridge needs the address.
            starts = [s for s in plan("demo", overrides) if s.entry.executable != "bridge_node"]
            for start in starts:
                group.start_node(start)
            _wait(lambda: named, group, stop, _READY_LIMIT_S, "The verifier named no address")
            address, relay = named[0], settings.relay
            if relay is not None:
                relay.target = (address.host, address.port)
            overrides["verifier"] = address.url if relay is None else relay.url
            # Started again, it has to be where the bridge looks for it.
            port = {"verifier_port": str(address.port)}
            verifier.command = program_command(program, values | port)
            for start in plan("demo", overrides):
                if start.entry.executable == "bridge_node":
                    group.start_node(start)
            return
    for start in plan("demo", overrides):
        group.start_node(start)


def _wait(done: Any, group: ProcessGroup, stop: threading.Event, limit: float, sentence: str) -> None:
    """Poll ``done``; _Stop on an interruption, the end of a process that is not started again, or after
    ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while not done():
        if stop.is_set():
            raise _Stop(EXIT_INTERRUPTED, "interrupted; everything is being ended")
        child: Child | None = group.ended()
        if child is not None:
            code = child.process.returncode
            raise _Stop(
                EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else EXIT_LINK,
                f"{child.name} ended with exit code {code}; see its last lines above",
            )
        if time.monotonic() > deadline:
            raise _Stop(EXIT_LINK, f"{sentence} within {limit:.0f} s.")
        time.sleep(0.02)
