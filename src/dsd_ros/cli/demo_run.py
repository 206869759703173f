"""What `dsd demo` runs: every node as a process of its own, one Navigate goal, ground truth, a report."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsd_ros.cli.arguments import STDOUT, output_file
from dsd_ros.cli.demo import SCENARIOS, DemoSettings
from dsd_ros.cli.shared import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_GOAL_MISSED,
    EXIT_INTERRUPTED,
    EXIT_LINK,
    CommandError,
    write_json,
)
from dsd_ros.decoding.modes import mode as decoding_mode
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.observe.view.web import MISSING as VIEW_MISSING
from dsd_ros.observe.view.web import available as view_available
from dsd_ros.robot.sim.world import World
from dsd_ros.ros.bringup import ROBOTS, TRANSPORTS, plan, values_of
from dsd_ros.ros.processes import Child, ProcessGroup

if TYPE_CHECKING:
    from dsd_ros.ros.demo_client import DemoClient

_READY_LIMIT_S = 180.0
_RECORDER_LIMIT_S = 15.0  # after that: the run does not depend on its recording
_VIEW = "view_node"
_OWN = {"namespace", "domain"}  # arguments that would separate the demo from its own nodes
_ADDRESS = re.compile(r"(wss?)://(\[[\w.:]+\]|[\w.\-]+):(\d+)")


class VerifierAddress(NamedTuple):
    """Where a verifier listens; ``host`` is without the brackets that a URL puts around an IPv6 address."""

    scheme: str
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def address_in(line: str) -> VerifierAddress | None:
    """The address in a line that `dsd verifier` printed, if there is one."""
    found = _ADDRESS.search(line)
    return found and VerifierAddress(found[1], found[2].strip("[]"), int(found[3]))


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


def run_demo(
    settings: DemoSettings, more: Mapping[str, str] | None = None, json: Path | None = None, time_limit: float = 180.0
) -> int:
    """Run the whole system once and return the exit code. Call it from the main thread.

    All processes it started have ended when it returns, within 2 s of an interruption. On a terminal it keeps serving
    the web view after the run until it is interrupted; that does not change the exit code.

    :param more: further arguments of the demo system. Over a websocket, ``verifier`` may name the address of a relay
        in front of the verifier that the demo starts on ``verifier_port``.
    :param json: where to write the report; STDOUT: print it.
    :param time_limit: of the run, s.
    :raises ValueError: for bad input, before anything starts.
    :raises CommandError: if the run cannot go on; the report is written all the same.
    """
    settings = settings.with_scenario()
    arguments = arguments_of(settings, more or {})
    _check(settings, arguments, json)
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
        instruction=settings.instruction or "",
        scenario=settings.scenario,
    )
    stopped: CommandError | None = None
    code = EXIT_DONE
    try:
        with ProcessGroup() as group:
            try:
                code = _run(settings, arguments, time_limit, group, interrupted, report)
            except CommandError as error:
                stopped = error
            else:
                code = _write(report, json, code)
                _serve_on(settings, group, interrupted)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped is not None:
        report.message = report.message or str(stopped)
        _write(report, json, stopped.exit_code)
        raise stopped
    return code


def _write(report: DemoReport, path: Path | None, code: int) -> int:
    """Write the JSON where it is wanted; return the exit code."""
    try:
        write_json(path, asdict(report))
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


def arguments_of(settings: DemoSettings, more: Mapping[str, str]) -> dict[str, str]:
    """The demo system's arguments, ``more`` among them; ValueError for one that the demo sets itsettings."""
    known = {
        "transport": settings.transport,
        "robot": settings.robot,
        "mode": settings.mode,
        "seed": str(settings.seed),
        "instruction": settings.goal,
        "temperature": str(settings.temperature),
        "draft_model": settings.draft,
        "target_model": settings.target,
        "target_tokenizer": settings.target_tokenizer,
    }
    own = sorted((known.keys() | _OWN) & more.keys())
    if own:
        raise ValueError(f"'{own[0]}:=' is set by the demo itself; see 'dsd demo --help' for an option.")
    if "verifier" in more and settings.transport != "websocket":
        raise ValueError(
            f"'verifier:=' is an address to dial, and over {settings.transport} none is dialled; use websocket."
        )
    view = "true" if not settings.headless and view_available() else "false"
    chosen = SCENARIOS[settings.scenario].arguments if settings.scenario else {}
    recorded = {"record": settings.record} if settings.record else {}
    return known | {"verifier_port": "0", "view": view, "view_open": view} | dict(chosen) | dict(more) | recorded


def _check(settings: DemoSettings, arguments: Mapping[str, str], json: Path | None) -> None:
    """Refuse bad input before anything starts; ValueError with one sentence."""
    decoding_mode(settings.mode)
    if settings.transport not in TRANSPORTS:
        raise ValueError(f"'{settings.transport}' is no transport; choose from {', '.join(TRANSPORTS)}.")
    if settings.robot not in ROBOTS:
        raise ValueError(f"'{settings.robot}' is no robot; choose from {', '.join(ROBOTS)}.")
    text = (settings.instruction or "").strip()
    if not text:
        raise ValueError("The instruction is empty: say what the robot should find.")
    if len(text) > MAX_INSTRUCTION_CHARS:
        raise ValueError(f"The instruction has {len(text)} characters; at most {MAX_INSTRUCTION_CHARS} are allowed.")
    World.from_seed(settings.seed or 0, settings.goal.strip())
    recorded = values_of("demo", dict(arguments))["record"]
    if recorded and Path(recorded).exists():
        raise ValueError(f"{recorded} exists already; name a folder for the bag that does not.")
    if json not in (None, STDOUT):
        output_file(str(json))


def _choose_domain() -> None:
    """A domain and discovery range of our own, unless the user has chosen."""
    os.environ.setdefault("ROS_DOMAIN_ID", str(1 + os.getpid() % 100))
    os.environ.setdefault("ROS_AUTOMATIC_DISCOVERY_RANGE", "LOCALHOST")


def _run(
    settings: DemoSettings,
    arguments: dict[str, str],
    time_limit: float,
    group: ProcessGroup,
    stop: threading.Event,
    report: DemoReport,
) -> int:
    began = time.monotonic()
    _start_processes(settings, arguments, group, stop)
    # Imported late: the children are already starting while this process loads ROS.
    from dsd_ros.ros.demo_client import DemoClient

    driver = "go2_node" if settings.robot == "go2-standin" else ""
    values = values_of("demo", arguments)
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
        client.send_goal(report.instruction, time_limit)
        navigation = group.child("navigation_node")
        _wait(
            lambda: client.finished() or navigation.restarted > 0,
            group, stop, time_limit + 30.0, "The run did not end in time",
        )  # fmt: skip
        if not client.finished():
            raise CommandError("navigation_node crashed, and the run was lost with it", EXIT_GOAL_MISSED)
        report.seconds = round(time.monotonic() - started, 3)
        client.settle(1.2 if recorded else 0.3)  # the bag needs the end, too
    finally:
        client.fill(report)
        client.close()
    _print_result(report)
    if report.reached:
        return EXIT_DONE
    return EXIT_LINK if report.outcome in client.LINK_OUTCOMES else EXIT_GOAL_MISSED


def _print_result(report: DemoReport) -> None:
    if report.answer:
        print(f"memory: {report.answer}", flush=True)
    where = "" if report.distance_m is None else f", {report.distance_m:.2f} m from the target"
    print(
        f"{'REACHED' if report.reached else 'not reached'} after {report.seconds:.1f} s and "
        f"{len(report.steps)} actions{where}, {report.collisions} collisions. {report.outcome}: "
        f"{report.message}",
        flush=True,
    )


def _await_recorder(client: DemoClient, group: ProcessGroup, stop: threading.Event) -> None:
    """Wait until the recorder hears everything; say what it does not hear, if that is not soon, and go on."""
    deadline = time.monotonic() + _RECORDER_LIMIT_S
    recorder = group.child("record_node")
    _wait(
        lambda: not client.unheard() or recorder.given_up or time.monotonic() > deadline,
        group, stop, _READY_LIMIT_S, "The recorder was not ready",
    )  # fmt: skip
    unheard = sorted(client.unheard())
    if recorder.given_up:
        print("dsd demo: nothing is recorded: record_node has ended", file=sys.stderr)
    elif unheard:
        topics = f"{', '.join(unheard)} after {_RECORDER_LIMIT_S:.0f} s"
        print(f"dsd demo: record_node does not hear {topics}; the bag may lack some of it", file=sys.stderr)


def _start_processes(
    settings: DemoSettings, arguments: dict[str, str], group: ProcessGroup, stop: threading.Event
) -> None:
    if not settings.headless and not view_available():
        print(f"dsd demo: {VIEW_MISSING}", file=sys.stderr)
    named: list[VerifierAddress] = []

    def look(line: str) -> None:
        found = address_in(line)
        if found is not None:
            named.append(found)

    starts = {start.name: start for start in plan("demo", arguments)}
    verifier = starts.pop("verifier", None)
    child = None if verifier is None else group.start_planned(verifier, on_line=look)
    # Only the bridge needs the address, so the other nodes do not wait for the verifier's model.
    for start in starts.values():
        if start.name != "bridge_node" and start.available:
            group.start_planned(start)
    if child is None:
        return
    _wait(lambda: named, group, stop, _READY_LIMIT_S, "The verifier named no address")
    address = named[0]
    known = plan("demo", {"verifier": address.url} | arguments | {"verifier_port": str(address.port)})
    starts = {start.name: start for start in known}
    child.command = list(starts["verifier"].command)  # started again, it has to be where the bridge looks for it
    group.start_planned(starts["bridge_node"])


def _wait(done: Callable[[], Any], group: ProcessGroup, stop: threading.Event, limit: float, sentence: str) -> None:
    """Poll ``done``; CommandError on an interruption, the end of a process that is not restarted, or after ``limit``
    seconds."""
    deadline = time.monotonic() + limit
    while not done():
        if stop.is_set():
            raise CommandError("interrupted; everything is being ended", EXIT_INTERRUPTED)
        child: Child | None = group.ended()
        if child is not None:
            code = child.process.returncode
            raise CommandError(
                f"{child.name} ended with exit code {code}; see its last lines above",
                EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else EXIT_LINK,
            )
        if time.monotonic() > deadline:
            raise CommandError(f"{sentence} within {limit:.0f} s.", EXIT_LINK)
        time.sleep(0.02)
