# SPDX-License-Identifier: Apache-2.0
"""Which faults `dsd-lab bench faults` provokes and when, reproducibly from a seed, and its table. Free of ROS."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dsd_lab.report import Row, cell, median, render_template, table
from dsd_ros.bringup.systems import DEMO_SEED
from dsd_ros.ros.settings import TRANSPORTS

WENT_ON = "went on"  # of a run that the fault did not end

SIMULATOR, SUPERVISOR, NAVIGATION = "simulator_node", "supervisor_node", "navigation_node"
DRAFT, BRIDGE = "draft_node", "bridge_node"
# What runs behind the link: a node over DDS, the program `dsd verifier` behind a websocket.
VERIFIER = {"dds": "verifier_node", "websocket": "verifier"}


class Kind(Enum):
    """What the bench does."""

    KILL = "kill -9"
    PAUSE = "SIGSTOP"
    RESTART = "restart"
    CUT = "link cut"
    SILENCE = "link silent"
    LOSS = "5 % loss"
    JITTER = "300 ms jitter"
    FREEZE = "camera silent"
    REPEAT = "camera frozen"  # the last picture again and again, with its stamp
    GARBAGE_UP = "garbage up"
    GARBAGE_DOWN = "garbage down"
    NOISE_UP = "noise in the stream up"
    NOISE_DOWN = "noise in the stream down"


class Moment(Enum):
    """When in the robot's cycle a fault comes."""

    MOVING = "moving"  # an action is being carried out
    DECIDING = "deciding"  # it stands, and the models decode


@dataclass(frozen=True)
class Fault:
    """One provocation. ``seconds``: how long it lasts. ``delay``: seconds after the beginning of its moment."""

    kind: Kind
    target: str = ""  # the process, for kill, pause and restart
    moment: Moment = Moment.MOVING
    seconds: float = 0.0
    delay: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind.value} {self.target}".strip()

    @property
    def stops_at_once(self) -> bool:
        """Whether the robot must stand within half a second of the fault itself, since what keeps it safe is gone.

        After other faults, those of the link, the action under way has been verified.
        """
        on_robot = self.target in (SIMULATOR, SUPERVISOR, NAVIGATION, DRAFT)
        camera = self.kind in (Kind.FREEZE, Kind.REPEAT)
        return camera or (self.kind in (Kind.KILL, Kind.PAUSE) and on_robot)

    @property
    def ends_the_system(self) -> bool:
        """Whether it kills a process without which nothing may go on: everything ends and is started by hand."""
        return self.kind is Kind.KILL and self.target in (SIMULATOR, SUPERVISOR)


def variants(transport: str) -> list[tuple[Kind, str]]:
    """Every fault that exists over a transport."""
    processes = [SIMULATOR, SUPERVISOR, NAVIGATION, DRAFT, VERIFIER[transport]]
    if transport == "websocket":
        processes.append(BRIDGE)
    found = [(kind, process) for kind in (Kind.KILL, Kind.PAUSE) for process in processes]
    found += [(Kind.RESTART, VERIFIER[transport]), (Kind.FREEZE, ""), (Kind.REPEAT, "")]
    found += [(Kind.GARBAGE_UP, ""), (Kind.GARBAGE_DOWN, "")]
    if transport == "websocket":
        link = (Kind.CUT, Kind.SILENCE, Kind.LOSS, Kind.JITTER, Kind.NOISE_UP, Kind.NOISE_DOWN)
        found += [(kind, "") for kind in link]
    return found


_SECONDS = {  # shortest and longest
    Kind.PAUSE: (1.0, 4.0),
    Kind.CUT: (0.5, 4.0),
    Kind.SILENCE: (0.5, 5.0),
    Kind.LOSS: (4.0, 8.0),
    Kind.JITTER: (4.0, 8.0),
    Kind.FREEZE: (1.0, 4.0),
    Kind.REPEAT: (1.0, 4.0),
}
_LATEST = {Moment.MOVING: 0.8, Moment.DECIDING: 0.3}  # delay, s


def plan(count: int, seed: int, transport: str) -> list[Fault]:
    """``count`` faults in random order, every variant once before any is repeated."""
    source = random.Random(f"faults/{transport}/{seed}")
    deck: list[tuple[Kind, str]] = []
    faults = []
    for _ in range(count):
        if not deck:
            deck = variants(transport)
            source.shuffle(deck)
        kind, target = deck.pop()
        # What must stop the robot is best tried while it moves.
        moment = source.choices((Moment.MOVING, Moment.DECIDING), (3, 1))[0]
        seconds = source.uniform(*_SECONDS.get(kind, (0.0, 0.0)))
        delay = source.uniform(0.0, _LATEST[moment])
        faults.append(Fault(kind, target, moment, round(seconds, 3), round(delay, 3)))
    return faults


@dataclass(frozen=True)
class FaultSettings:
    """What `dsd-lab bench faults` does."""

    count: int = 100
    seed: int = 0
    transport: str = "both"
    mode: str = "stream"
    world: int = DEMO_SEED
    instruction: str = "find the silver bottle"
    draft: str = ""
    target: str = ""  # directory; also the judge's

    def shares(self) -> dict[str, int]:
        """How many faults each transport gets; ValueError when the settings cannot be used."""
        if self.count < 1:
            raise ValueError(f"count is {self.count}; use 1 or more")
        if self.transport == "both":
            half = self.count // 2
            return {t: n for t, n in (("websocket", self.count - half), ("dds", half)) if n}
        if self.transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {self.transport!r}; choose from both, {', '.join(TRANSPORTS)}")
        return {self.transport: self.count}


@dataclass
class Trial:
    """One fault and what came of it. Seconds; None: there was nothing to measure."""

    number: int
    transport: str
    fault: str
    kind: str
    moment: str
    lasted_s: float = 0.0
    moving: bool = False  # motion was commanded when the fault came
    causes: list[str] = field(default_factory=list)  # the supervisor's first ones after it
    noticed_s: float | None = None  # from the fault to these
    zero_s: float | None = None  # from the cause to the end of commanded motion
    rest_s: float | None = None  # from the cause to standstill
    run: str = ""  # how the run ended, or that it went on
    recovered_s: float | None = None  # from the end of the fault to the next verified action
    problems: list[str] = field(default_factory=list)


def rows_of(trials: Sequence[Trial]) -> list[Row]:
    """The table: one row per fault and transport."""
    rows = []
    for transport, _, name in sorted({(trial.transport, trial.kind, trial.fault) for trial in trials}):
        of = [t for t in trials if (t.transport, t.fault) == (transport, name)]
        noticed, zero, rest, recovered = (
            [value for trial in of if (value := getattr(trial, figure)) is not None]
            for figure in ("noticed_s", "zero_s", "rest_s", "recovered_s")
        )
        rows.append(
            {
                "transport": transport,
                "fault": name,
                "n": len(of),
                "moving": sum(t.moving for t in of),
                "noticed_median_s": median(noticed),
                "zero_median_s": median(zero),
                "zero_worst_s": max(zero, default=None),
                "rest_worst_s": max(rest, default=None),
                "runs": dict(Counter(t.run for t in of)),
                "recovered": len(recovered),
                "recovered_median_s": median(recovered),
                "recovered_worst_s": max(recovered, default=None),
                "problems": sum(len(t.problems) for t in of),
            }
        )
    return rows


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    head = ["transport", "fault", "n", "moving", "noticed, s", "zero, s", "worst", "rest, worst"]
    rows = [[*head, "recovered", "s", "worst", "runs"]]
    for row in report["rows"]:
        figures = [cell(row[f"{name}_s"], ".3f") for name in ("noticed_median", "zero_median", "zero_worst")]
        figures += [cell(row["rest_worst_s"], ".3f"), f"{row['recovered']}/{row['n']}"]
        figures += [cell(row[f"recovered_{name}_s"], ".1f") for name in ("median", "worst")]
        rows.append([row["transport"], row["fault"], f"{row['n']}", f"{row['moving']}", *figures, _runs(row["runs"])])
    worst = max((r["zero_worst_s"] for r in report["rows"] if r["zero_worst_s"] is not None), default=0.0)
    values = {"table": "\n".join(table(rows, left=2)), "worst": worst, "runs": _runs}
    return render_template("faults/faults.txt", r=report, **values).rstrip("\n")


def _runs(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
