# SPDX-License-Identifier: Apache-2.0
"""Run the demo: start every node as a process, send one Navigate goal, collect ground truth, write a report."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsd_ros.bringup.processes import Child, ProcessGroup, how_it_ended, use_own_ros_domain
from dsd_ros.bringup.systems import plan, values_of
from dsd_ros.cli.arguments import STDOUT, output_file
from dsd_ros.cli.demo import SCENARIOS, DemoSettings
from dsd_ros.cli.shared import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_GOAL_MISSED,
    EXIT_INTERRUPTED,
    EXIT_LINK,
    CommandError,
    interruption,
    write_json,
)
from dsd_ros.cli.story import Story
from dsd_ros.decoding.modes import mode as decoding_mode
from dsd_ros.environment import check_environment
from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.paths import user_path
from dsd_ros.robot.sim.world import World

if TYPE_CHECKING:
    from dsd_ros.ros.demo_client import DemoClient

_READY_LIMIT_S = 180.0
_RECORDER_LIMIT_S = 15.0  # then the run starts without it
_VIEW = "view_node"
_OWN = {"namespace"}  # arguments that would separate the demo from its own nodes


@dataclass
class DemoReport:
    """The result of a run; these fields are its JSON."""

    reached: bool = False
    distance_m: float | None = None
    collisions: int = 0
    mode: str = ""
    transport: str = ""
    seed: int = 0
    seconds: float = 0.0
    instruction: str = ""
    scenario: str = ""
    answer: str = ""  # memory's answer to the instruction; empty: none
    sources: list[dict[str, str]] = field(default_factory=list)  # its sentences, each with side and document
    question: str = ""  # what the robot asks the person, because memory does not know; empty: nothing
    resolved_instruction: str = ""  # the instruction carried out; empty: none
    outcome: str = "UNKNOWN"
    message: str = ""
    startup_seconds: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    path: list[list[float]] = field(default_factory=list)  # x, y (m), yaw (rad), every few cm
    speedup_estimate: float | None = None  # of decoding, over the target alone


def run_demo(
    settings: DemoSettings, more: Mapping[str, str] | None = None, json: Path | None = None, time_limit: float = 180.0
) -> int:
    """Run the whole system once and return the exit code. Call it from the main thread.

    Its processes have ended when it returns, within 2 s of an interruption (10 s where a bag is closed). On a terminal
    the live page is served after the run until an interruption, which does not change the exit code.

    :param more: further arguments of the demo system. Over a websocket, ``verifier`` may be the address of a relay in
        front of the verifier, which the demo starts on ``verifier_port``.
    :param json: where to write the report; STDOUT: print it.
    :param time_limit: of the run, s.
    :raises ValueError: for bad input, before anything starts.
    :raises CommandError: when the run cannot go on; the report is written nevertheless.
    """
    settings = settings.with_scenario()
    arguments = arguments_of(settings, more or {})
    _check(settings, arguments, json)
    check_environment()
    use_own_ros_domain()
    report = DemoReport(
        mode=settings.mode,
        transport=settings.transport,
        seed=settings.seed or 0,
        instruction=settings.instruction or "",
        scenario=settings.scenario,
    )
    stopped: CommandError | None = None
    code = EXIT_DONE
    story = Story(settings.verbose)
    with interruption() as interrupted, ProcessGroup(story.hear, story.news) as group:
        try:
            code = _run(settings, arguments, time_limit, _Stage(group, interrupted, story), report)
        except CommandError as error:
            stopped = error
        else:
            code = _write(report, json, code)
            _serve_on(settings, group, interrupted)
    if stopped is not None:
        report.message = report.message or str(stopped)
        _write(report, json, stopped.exit_code)
        raise stopped
    return code


def _write(report: DemoReport, path: Path | None, code: int) -> int:
    """Write the JSON; returns the exit code."""
    try:
        write_json(path, asdict(report))
    except OSError as error:
        print(f"dsd demo: the report cannot be written: {error}", file=sys.stderr)
        return code or EXIT_BAD_INPUT
    return code


def _serve_on(settings: DemoSettings, group: ProcessGroup, stop: threading.Event) -> None:
    """On a terminal, keep serving the live page until an interruption; everything else has ended."""
    views = [child for child in group.children if child.name == _VIEW and child.running]
    if settings.headless or not views or not sys.stdout.isatty():
        return
    group.close(but=_VIEW)
    print("the live page stays open; Ctrl-C ends", flush=True)
    while not stop.wait(0.1) and group.ended() is None and not views[0].given_up:
        pass


def arguments_of(settings: DemoSettings, more: Mapping[str, str]) -> dict[str, str]:
    """The demo system's arguments, with ``more``; raises ValueError for one that the demo sets itself."""
    known = {
        "transport": settings.transport,
        "mode": settings.mode,
        "seed": str(settings.seed),
        "instruction": settings.goal,
        "temperature": str(settings.temperature),
        "draft_model": settings.draft,
        "draft_engine": settings.draft_engine,
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
    if settings.transport == "websocket":
        port = more.get("verifier_port") or str(_free_port())
        known |= {"verifier_port": port, "verifier": f"ws://127.0.0.1:{port}"}
    view = "false" if settings.headless else "true"
    chosen = SCENARIOS[settings.scenario].arguments if settings.scenario else {}
    recorded = {"record": settings.record} if settings.record else {}
    return known | {"view": view, "view_open": view} | dict(chosen) | dict(more) | recorded


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _check(settings: DemoSettings, arguments: Mapping[str, str], json: Path | None) -> None:
    """Raise ValueError for bad input, before anything starts."""
    decoding_mode(settings.mode)
    recorded = values_of("demo", dict(arguments))["record"]
    text = (settings.instruction or "").strip()
    if not text:
        raise ValueError("The instruction is empty: say what the robot should find.")
    if len(text) > MAX_INSTRUCTION_CHARS:
        raise ValueError(f"The instruction has {len(text)} characters; at most {MAX_INSTRUCTION_CHARS} are allowed.")
    World.from_seed(settings.seed or 0, settings.goal.strip())
    if recorded and user_path(recorded).exists():
        raise ValueError(f"{recorded} exists already; name a folder for the bag that does not.")
    if json not in (None, STDOUT):
        output_file(str(json))


@dataclass(frozen=True)
class _Stage:
    """What a run happens on: its processes, what interrupts it, and who tells of it."""

    group: ProcessGroup
    stop: threading.Event
    story: Story

    def wait(self, done: Callable[[], Any], limit: float, sentence: str) -> None:
        """Poll ``done``.

        :raises CommandError: on an interruption, when a process ends for good, or after ``limit`` seconds.
        """
        deadline = time.monotonic() + limit
        while not done():
            if self.stop.is_set():
                raise CommandError("interrupted; everything is being ended", EXIT_INTERRUPTED)
            child: Child | None = self.group.ended()
            if child is not None:
                raise self._ended(child)
            if time.monotonic() > deadline:
                raise CommandError(f"{sentence} within {limit:.0f} s; see the log {self.story.log}", EXIT_LINK)
            time.sleep(0.02)

    def _ended(self, child: Child) -> CommandError:
        child.reader.join(timeout=0.5)
        code, last = child.process.returncode, self.story.last_words(child.name)
        return CommandError(
            f"{child.name} {how_it_ended(code)}{f' ({last})' if last else ''}; see the log {self.story.log}",
            EXIT_BAD_INPUT if code == EXIT_BAD_INPUT else EXIT_LINK,
        )


def _run(
    settings: DemoSettings, arguments: dict[str, str], time_limit: float, stage: _Stage, report: DemoReport
) -> int:
    story, began = stage.story, time.monotonic()
    _start_processes(arguments, stage)
    # Imported late: the children are already starting while this process loads ROS.
    from dsd_ros.ros.demo_client import DemoClient

    values = values_of("demo", arguments)
    memory, bag = values["memory"] != "never", values["record"]
    client = DemoClient(story.progress, story.step, story.memory, memory, recorded=bool(bag))
    try:
        stage.wait(lambda: not story.wait_for(client.awaited()), _READY_LIMIT_S, "The nodes did not become ready")
        if bag:
            _await_recorder(client, stage)
        report.startup_seconds = round(time.monotonic() - began, 3)
        story.begin(
            f"ready after {report.startup_seconds:.1f} s: seed {settings.seed}, mode {settings.mode} over "
            f"{settings.transport}: {settings.instruction}",
            settings.mode,
        )
        started = time.monotonic()
        client.send_goal(report.instruction, time_limit)
        navigation = stage.group.child("navigation_node")
        stage.wait(
            lambda: client.finished() or navigation.restarted > 0, time_limit + 30.0, "The run did not end in time"
        )
        if not client.finished():
            raise CommandError("navigation_node crashed, and the run was lost with it", EXIT_GOAL_MISSED)
        report.seconds = round(time.monotonic() - started, 3)
        client.settle(1.2 if bag else 0.3)  # the bag needs the end, too
    finally:
        client.fill(report)
        client.close()
    speedup = story.speedup()
    report.speedup_estimate = None if speedup is None else round(speedup, 3)
    loss = _close_bag(bag, stage) if bag else ""
    story.end(report, bag, loss)
    if report.reached:
        return EXIT_GOAL_MISSED if loss else EXIT_DONE
    return EXIT_LINK if report.outcome in client.LINK_OUTCOMES else EXIT_GOAL_MISSED


def _close_bag(bag: str, stage: _Stage) -> str:
    """End the recorder; returns what its bag lacks, as a sentence."""
    recorder = stage.group.child("record_node")
    stage.story.closing(bag)
    stage.group.end([recorder])
    code = recorder.process.returncode
    return (stage.story.last_words(recorder.name) or f"record_node {how_it_ended(code)}") if code else ""


def _await_recorder(client: DemoClient, stage: _Stage) -> None:
    """Wait within a limit until the recorder hears all topics."""
    deadline, recorder = time.monotonic() + _RECORDER_LIMIT_S, stage.group.child("record_node")
    late = "The recorder was not ready"
    stage.wait(
        lambda: not client.unheard() or recorder.given_up or time.monotonic() > deadline, _READY_LIMIT_S, late
    )  # fmt: skip
    if recorder.given_up:
        print("dsd demo: nothing is recorded: record_node has ended", file=sys.stderr)
    elif unheard := sorted(client.unheard()):
        print(f"dsd demo: record_node does not hear {', '.join(unheard)}; the bag may lack it", file=sys.stderr)


def _start_processes(arguments: dict[str, str], stage: _Stage) -> None:
    starts = plan("demo", arguments)
    stage.story.start(f"starting {len(starts)} processes")
    for start in starts:
        if start.available:
            stage.group.start_planned(start)
