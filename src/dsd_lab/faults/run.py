# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench faults`: the whole demo, goal after goal, while its parts are killed, frozen, cut off or lied to.

An observer judges what the robot did (``judge``), and every action is compared with what the target alone says.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dsd_lab.faults.judge import (
    Announced,
    difference,
    first_cause,
    judge,
    late_motion,
    moving_at,
    stop_after,
    target_replies,
)
from dsd_lab.faults.plan import (
    NAVIGATION,
    SIMULATOR,
    SUPERVISOR,
    WENT_ON,
    Fault,
    FaultSettings,
    Kind,
    Moment,
    Trial,
    plan,
    rows_of,
)
from dsd_lab.faults.watch import WATCHER, WatchedRun, Watcher
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.links.proxy import Conditions, LinkProxy, Way
from dsd_lab.parts import parts
from dsd_lab.report import CODE, header
from dsd_ros.bringup.processes import ProcessGroup, use_own_ros_domain
from dsd_ros.bringup.systems import plan as demo_plan
from dsd_ros.wire.codec import encode
from dsd_ros.wire.messages import SessionClose, VerifiedTokens

_CODE = (*CODE, "dsd_ros/navigation", "dsd_ros/nodes", "dsd_ros/ros")
_MARK = "DSD_FAULTS_BENCH"  # in the environment of every process, to find what is left over
LOSS, JITTER_S = 0.05, 0.3

Undo = Callable[[], None]


class FaultBenchError(RuntimeError):
    """The bench cannot go on; one sentence."""


class SystemUnderTest:
    """The demo's processes over one transport, each by its name. Use it from the main thread."""

    def __init__(self, transport: str, overrides: dict[str, str], seed: int, log: TextIO | None = None) -> None:
        """Starts every process; the link's proxy first. ``log``: takes what the processes print."""
        self.lines: deque[str] = deque(maxlen=400)
        self.proxy: LinkProxy | None = None
        self._log = log
        self._mark = uuid.uuid4().hex
        self.group = ProcessGroup(self._hear)
        overrides = overrides | {"transport": transport, "verifier_port": "0"}
        if transport == "websocket":
            self.proxy = LinkProxy(("127.0.0.1", 9), seed=seed)  # its target is not known yet
            overrides["verifier"] = self.proxy.url
        for start in demo_plan("demo", overrides):
            if start.name == SUPERVISOR:  # who publishes nonsense must not stop the robot by that alone
                start.parameters["require.outcomes"] = f"verifier_node,bridge_node,{WATCHER}"
            on_line = self._look if start.name == "verifier" else None
            faulty = (sys.executable, "-m", "dsd_lab.robot", SIMULATOR) if start.name == SIMULATOR else ()
            self.group.start_planned(start, {_MARK: self._mark}, on_line, faulty)

    def _look(self, line: str) -> None:
        """Find the verifier's address in what it prints; after a restart it is another one."""
        found = re.search(r"wss?://([\w.-]+):(\d+)", line)
        if found is not None and self.proxy is not None:
            self.proxy.target = (found[1], int(found[2]))

    def _hear(self, name: str, line: str) -> None:
        self.lines.append(f"[{name}] {line}")
        if self._log is not None:
            self._log.write(f"{time.monotonic():.3f} [{name}] {line}\n")

    def close(self) -> list[str]:
        """End everything; the command lines of processes that are left over."""
        for child in self.group.children:  # a stopped process does not receive other signals
            child.signal(signal.SIGCONT)
        self.group.close()
        if self.proxy is not None:
            self.proxy.close()
        return _left_over(self._mark)

    # -- faults --------------------------------------------------------------------------------

    def provoke(self, fault: Fault, watcher: Watcher, source: random.Random) -> Undo:
        """Provoke a fault; the returned function undoes it, where the system does not do so itself."""
        kind, target = fault.kind, fault.target
        if kind is Kind.KILL:
            self.group.child(target).signal(signal.SIGKILL)
        elif kind is Kind.RESTART:
            self.group.restart(target)
        elif kind is Kind.PAUSE:
            child = self.group.child(target)
            child.signal(signal.SIGSTOP)
            return lambda: child.signal(signal.SIGCONT)
        elif kind in (Kind.FREEZE, Kind.REPEAT):
            watcher.tell_simulator(f"camera {'freeze' if kind is Kind.FREEZE else 'repeat'}")
            return lambda: watcher.tell_simulator("camera ok")
        elif self.proxy is None:
            watcher.talk_nonsense("up" if kind is Kind.GARBAGE_UP else "down", source)
        else:
            return self._harm(self.proxy, kind, source)
        return lambda: None

    def _harm(self, proxy: LinkProxy, kind: Kind, source: random.Random) -> Undo:
        match kind:
            case Kind.CUT:
                proxy.cut()
                return proxy.restore
            case Kind.SILENCE:
                proxy.silence()
                return proxy.restore
            case Kind.LOSS | Kind.JITTER:
                lossy = kind is Kind.LOSS
                proxy.set(Conditions(loss=LOSS) if lossy else Conditions(LinkProfile(jitter_s=JITTER_S)))
                return lambda: proxy.set(Conditions())
            case _:
                way = Way.UP if kind in (Kind.GARBAGE_UP, Kind.NOISE_UP) else Way.DOWN
                as_frame = kind in (Kind.GARBAGE_UP, Kind.GARBAGE_DOWN)
                proxy.inject(way, nonsense(way, source) if as_frame else source.randbytes(100), as_frame)
                return lambda: None


def nonsense(way: Way, source: random.Random) -> bytes:
    """A frame that no correct peer sends: noise, or a message of this protocol about things that do not exist."""
    if source.random() < 0.5:
        return source.randbytes(source.randrange(1, 2000))
    session = source.getrandbits(31) | 1
    if way is Way.UP:
        return encode(SessionClose(session))
    return encode(VerifiedTokens(session, source.getrandbits(31), source.getrandbits(31), [8, 1, 7]))


def _left_over(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes()
                found.append(line.replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return [line for line in found if line]  # a zombie has none


RUN_LIMIT_S = 120.0  # given to a run
_HANG_S = RUN_LIMIT_S + 20.0  # by then a run must have ended by itself
_READY_LIMIT_S = 90.0
_MOMENT_LIMIT_S = 60.0  # without any action for so long, something hangs
_RECOVERY_LIMIT_S = 60.0
_WATCH_END_S = 6.0  # for the other nodes to end the run when the system has lost a part it cannot do without

Progress = Callable[[int, int, Trial], None]


class _Ended(Exception):
    """A process without which nothing may go on has ended; its name."""


def measure_faults(
    settings: FaultSettings, progress: Progress | None = None, log: TextIO | None = None
) -> dict[str, Any]:
    """Provoke the faults and report on them, from the main thread; FaultBenchError if the system does not start.

    ``log`` takes what the processes print and what is done to them.
    """
    shares = settings.shares()
    use_own_ros_domain()
    trials: list[Trial] = []
    reports: list[dict[str, Any]] = []
    began = time.monotonic()
    for transport, count in parts(shares.items()):
        bench = _TransportBench(settings, transport, len(trials), progress, log)
        try:
            bench.go(plan(count, settings.seed, transport))
        finally:
            bench.close()
        trials += bench.trials
        reports.append(bench.report())
    problems = [problem for report in reports for problem in report.pop("problems")]
    return {
        **header("faults", _CODE, draft=settings.draft, target=settings.target),
        "seed": settings.seed,
        "count": len(trials),
        "mode": settings.mode,
        "world": settings.world,
        "seconds": round(time.monotonic() - began, 1),
        "transports": reports,
        "problems": problems + [f"fault {t.number}, {t.fault}: {p}" for t in trials for p in t.problems],
        "rows": rows_of(trials),
        "trials": [asdict(trial) for trial in trials],
    }


class _TransportBench:
    """The faults of one transport."""

    def __init__(
        self, settings: FaultSettings, transport: str, offset: int, progress: Progress | None, log: TextIO | None
    ) -> None:
        self.trials: list[Trial] = []
        self._settings, self._transport = settings, transport
        self._offset, self._progress, self._log = offset, progress, log
        self._source = random.Random(f"bench/{transport}/{settings.seed}")
        self._watcher = Watcher(settings.instruction)
        self._system: SystemUnderTest | None = None
        self._runs: list[WatchedRun] = []
        self._problems: list[str] = []
        self._seen: list[tuple[Announced, np.ndarray | None]] = []  # the actions with their pictures

    def go(self, faults: Sequence[Fault]) -> None:
        self._start_system()
        for fault in parts(faults, begun=self._offset > 0):
            number = self._offset + len(self.trials) + 1
            trial = Trial(number, self._transport, fault.name, fault.kind.name, fault.moment.value)
            try:
                self._try(fault, trial)
            except _Ended as ended:
                trial.problems.append(f"{ended} ended by itself")
                self._end_run(f"SYSTEM_ENDED by {ended}")
                self._start_system()
            except TimeoutError as error:
                trial.problems.append(str(error))
                self._note(f"{error}; the watcher: {self._watcher.state()}")
                self._end_run("HANG")
                self._start_system()
            self.trials.append(trial)
            if self._progress is not None:
                self._progress(trial.number, self._settings.count, trial)
        run = self._watcher.run
        if run is not None and not run.outcome:
            try:
                self._until(lambda: run.outcome, _HANG_S, "the last run did not end")
            except (TimeoutError, _Ended) as error:
                self._problems.append(f"after the last fault: {error}")
                self._end_run("HANG")

    def close(self) -> None:
        self._end_run("INTERRUPTED")
        self._end_system()
        self._watcher.close()

    def report(self) -> dict[str, Any]:
        """Figures of the whole transport; call it after ``close``."""
        record = self._watcher.record
        problems = [f"{self._transport}: {sentence}" for sentence in self._problems + judge(record)]
        equal = replies = 0
        known = [(action, picture) for action, picture in self._seen if picture is not None]
        settings = self._settings
        answers = target_replies(settings.target, [(picture, settings.instruction) for _, picture in known])
        for (action, _), answer in zip(known, answers, strict=True):
            heard = self._watcher.reply(action.picture)
            if wrong := difference(action, heard, answer):
                problems.append(f"{self._transport}: {wrong}")
            else:
                equal += 1
                replies += heard is not None
        return {
            "transport": self._transport,
            "faults": len(self.trials),
            "runs": dict(Counter(run.outcome for run in self._runs)),
            "actions": len(record.actions),
            "equal_to_target": equal,
            "whole_replies_equal": replies,
            "pictures_not_seen": len(self._seen) - len(known),
            "problems": problems,
        }

    # -- a trial -------------------------------------------------------------------------------

    def _try(self, fault: Fault, trial: Trial) -> None:
        self._await_moment(fault)
        system, run = self._system, self._watcher.run
        assert system is not None and run is not None
        before = system.group.child(fault.target).pid if fault.target else 0
        began = time.monotonic()
        self._note(f"fault {trial.number}: {fault}")
        undo = system.provoke(fault, self._watcher, self._source)
        if fault.kind is not Kind.RESTART:  # a restart takes its time and returns when it is done
            began = time.monotonic()
        if fault.target == NAVIGATION and fault.kind is Kind.KILL:
            self._end_run("NAVIGATION_KILLED")  # no node is left to report how the run ended
        if fault.ends_the_system:
            # The others get time to notice, and nothing is started again.
            while time.monotonic() - began < _WATCH_END_S and not (run.outcome and time.monotonic() - began > 1.5):
                time.sleep(0.01)
        elif fault.kind in (Kind.KILL, Kind.RESTART):
            self._until(
                lambda: system.group.child(fault.target).pid != before, 30.0, f"{fault.target} was not started again"
            )
        else:
            try:
                self._wait(fault.seconds)
            finally:
                undo()
        ended = time.monotonic()
        self._note(f"fault {trial.number} is over")
        trial.lasted_s = round(ended - began, 3)
        if fault.ends_the_system:
            self._end_run(f"SYSTEM_ENDED after {run.outcome or 'nothing'}")
            self._start_system()
        self._await_recovery(trial, ended)
        trial.run = run.outcome or WENT_ON
        self._measure(fault, trial, began, ended)

    def _measure(self, fault: Fault, trial: Trial, began: float, ended: float) -> None:
        with self._watcher.lock:
            record = self._watcher.record.between(began - 2.0, time.monotonic())
        trial.moving = moving_at(record, began)
        noticed = first_cause(record, began, ended + 1.0)
        if noticed is not None:
            trial.noticed_s, trial.causes = round(noticed[0] - began, 3), list(noticed[1])
        if fault.stops_at_once:
            cause, until = began, ended
        elif noticed is not None:
            cause = noticed[0]
            clear = [v.at for v in record.verdicts if v.at > cause and not v.stopped]
            until = min(clear, default=time.monotonic())
        else:
            return
        stop = stop_after(record, cause, until)
        if stop.commanded_s is not None:
            trial.zero_s = round(stop.commanded_s, 3)
        if stop.rest_s is not None:
            trial.rest_s = round(stop.rest_s, 3)
        trial.problems += late_motion(record, cause, until)

    def _await_moment(self, fault: Fault) -> None:
        """Wait for the moment of a run that the fault is for, beginning runs as they are needed."""
        watcher = self._watcher
        deadline = time.monotonic() + _MOMENT_LIMIT_S
        while True:
            self._ensure_run()
            heard = len(watcher.record.actions)
            if fault.moment is Moment.MOVING:
                reached = self._reach(lambda n=heard: len(watcher.record.actions) > n and watcher.moving())
            else:
                reached = self._reach(watcher.moving) and self._reach(lambda: not watcher.moving())
            if reached:
                self._wait(fault.delay)
                run = watcher.run
                if run is not None and not run.outcome:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the robot came to no action within {_MOMENT_LIMIT_S:.0f} s")

    def _reach(self, done: Callable[[], Any]) -> bool:
        """Wait for something in the run under way; False when the run ends before."""
        run = self._watcher.run
        assert run is not None
        self._until(lambda: done() or run.outcome, _MOMENT_LIMIT_S, "nothing went on in a run")
        return not run.outcome

    def _await_recovery(self, trial: Trial, ended: float) -> None:
        deadline = time.monotonic() + _RECOVERY_LIMIT_S
        while True:
            run = self._watcher.run
            assert run is not None
            self._until(
                lambda run=run: self._acted_since(ended) or run.outcome,
                _RECOVERY_LIMIT_S,
                "the robot did not act again",
            )
            action = self._acted_since(ended)
            if action is not None:
                trial.recovered_s = round(action.at - ended, 3)
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the robot did not act again within {_RECOVERY_LIMIT_S:.0f} s")
            self._ensure_run()

    def _acted_since(self, at: float) -> Announced | None:
        """The first action announced after a time."""
        return next((action for action in list(self._watcher.record.actions) if action.at > at), None)

    # -- runs and the system -------------------------------------------------------------------

    def _ensure_run(self) -> None:
        """Begin a run where none is under way."""
        watcher = self._watcher
        run = watcher.run
        if run is not None and not run.outcome:
            if time.monotonic() - run.began > _HANG_S:
                raise TimeoutError(f"run {run.number} did not end within {_HANG_S:.0f} s")
            return
        self._until(watcher.ready, _READY_LIMIT_S, "the system did not get ready")
        watcher.carry_back()
        self._until(watcher.ready, _READY_LIMIT_S, "the system did not get ready")
        run = watcher.send_goal(RUN_LIMIT_S)
        self._note(f"run {run.number}")
        self._runs.append(run)

        def accepted() -> bool:
            watcher.send_again(run, RUN_LIMIT_S)
            return run.accepted or bool(run.outcome)

        self._until(accepted, _READY_LIMIT_S, "no goal was accepted")

    def _end_run(self, outcome: str) -> None:
        run = self._watcher.run
        if run is not None and (not run.outcome or outcome.startswith("SYSTEM_ENDED")):
            run.outcome = outcome

    def _start_system(self) -> None:
        self._end_system()
        settings = self._settings
        overrides = {
            "mode": settings.mode,
            "seed": str(settings.world),
            "instruction": settings.instruction,
            "draft_model": settings.draft,
            "target_model": settings.target,
        }
        self._watcher.note_reset()
        self._system = system = SystemUnderTest(self._transport, overrides, settings.seed, self._log)
        try:
            self._until(self._watcher.ready, _READY_LIMIT_S, "the system did not start")
        except (TimeoutError, _Ended) as error:
            tail = "\n".join(list(system.lines)[-20:])
            raise FaultBenchError(f"The system does not start: {error}\n{tail}") from None

    def _end_system(self) -> None:
        if self._system is not None:
            left = self._system.close()
            self._system = None
            self._problems += [f"a process was left over: {line}" for line in left]

    def _until(self, done: Callable[[], Any], limit: float, what: str) -> None:
        """Poll, and keep the system going meanwhile; TimeoutError with a sentence after ``limit`` s."""
        deadline = time.monotonic() + limit
        while not done():
            self._tend()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} within {limit:.0f} s")
            time.sleep(0.005)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend()
            time.sleep(min(0.005, max(0.0, until - time.monotonic())))

    def _tend(self) -> None:
        self._keep_pictures()
        # The group starts again what may be restarted.
        if self._system is not None and (ended := self._system.group.ended()) is not None:
            raise _Ended(ended.name)

    def _note(self, line: str) -> None:
        if self._log is not None:
            self._log.write(f"{time.monotonic():.3f} [bench] {line}\n")

    def _keep_pictures(self) -> None:
        """Keep every new action's picture, about which the target alone is asked in the end."""
        actions = self._watcher.record.actions
        while len(self._seen) < len(actions):
            action = actions[len(self._seen)]
            picture = self._watcher.picture(action.picture)
            if picture is None and time.monotonic() - action.at < 1.0:
                return  # it may still be on its way
            self._seen.append((action, picture))
