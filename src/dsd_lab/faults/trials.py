"""Settings of `dsd-lab bench faults`, what came of each fault, and the table of it. Free of ROS."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsd_ros.ros.bringup import DEMO_SEED, TRANSPORTS

WENT_ON = "went on"  # of a run that the fault did not end


@dataclass
class Trial:
    """One fault and what came of it. Seconds; None: there was nothing to measure."""

    number: int
    transport: str
    fault: str
    kind: str
    moment: str
    lasted_s: float = 0.0
    moving: bool = False  # motion was commanded when it came
    causes: list[str] = field(default_factory=list)  # the supervisor's first, afterwards
    noticed_s: float | None = None  # from the fault to the first of them
    zero_s: float | None = None  # from the cause to the end of commanded motion
    rest_s: float | None = None  # from the cause to standstill
    run: str = ""  # how the run ended, or that it went on
    recovered_s: float | None = None  # from the end of the fault to the next verified action
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FaultSettings:
    """What `dsd-lab bench faults` does."""

    count: int = 100
    seed: int = 0
    transport: str = "both"
    mode: str = "dsd"
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


def rows_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The table: one row a fault and transport."""
    rows = []
    names = sorted({(trial.transport, trial.kind, trial.fault) for trial in trials})
    for transport, _, name in names:
        of = [t for t in trials if (t.transport, t.fault) == (transport, name)]
        zero = [t.zero_s for t in of if t.zero_s is not None]
        rest = [t.rest_s for t in of if t.rest_s is not None]
        recovered = [t.recovered_s for t in of if t.recovered_s is not None]
        noticed = [t.noticed_s for t in of if t.noticed_s is not None]
        rows.append(
            {
                "transport": transport,
                "fault": name,
                "n": len(of),
                "moving": sum(t.moving for t in of),
                "noticed_median_s": _median(noticed),
                "zero_median_s": _median(zero),
                "zero_worst_s": max(zero, default=None),
                "rest_worst_s": max(rest, default=None),
                "runs": dict(Counter(t.run for t in of)),
                "recovered": len(recovered),
                "recovered_median_s": _median(recovered),
                "recovered_worst_s": max(recovered, default=None),
                "problems": sum(len(t.problems) for t in of),
            }
        )
    return rows


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def render(report: dict[str, Any]) -> str:
    """A report of the bench for people."""
    lines = [
        f"{'transport':9}  {'fault':29} {'n':>3} {'moving':>6} {'noticed':>8} {'to zero, s':>15} {'at rest':>8} "
        f"{'recovered':>20}  runs",
        f"{'':9}  {'':29} {'':>3} {'':>6} {'median':>8} {'median':>7} {'worst':>7} {'worst':>8} "
        f"{'':>6} {'median':>6} {'worst':>6}",
    ]
    for row in report["rows"]:
        runs = ", ".join(f"{count} {name}" for name, count in sorted(row["runs"].items()))
        lines.append(
            f"{row['transport']:9}  {row['fault']:29} {row['n']:3} {row['moving']:6} "
            f"{_figure(row['noticed_median_s'], 8)} {_figure(row['zero_median_s'], 7)} "
            f"{_figure(row['zero_worst_s'], 7)} {_figure(row['rest_worst_s'], 8)} "
            f"{row['recovered']:>3}/{row['n']:<2} {_figure(row['recovered_median_s'], 6, 1)} "
            f"{_figure(row['recovered_worst_s'], 6, 1)}  {runs}"
        )
    for part in report["transports"]:
        runs = ", ".join(f"{count} {name}" for name, count in sorted(part["runs"].items()))
        lines.append(
            f"{part['transport']}: {part['faults']} faults over {sum(part['runs'].values())} runs ({runs}); "
            f"{part['actions']} actions, {part['equal_to_target']} equal to the target's own, "
            f"{part['pictures_not_seen']} whose picture the observer did not hear"
        )
    worst = max((r["zero_worst_s"] for r in report["rows"] if r["zero_worst_s"] is not None), default=0.0)
    lines.append(f"worst time from cause to zero commanded velocity: {worst:.3f} s")
    lines += [f"PROBLEM: {problem}" for problem in report["problems"]]
    lines.append(f"{len(report['problems'])} problems, {report['seconds']:.0f} s; {report.get('machine', '')}")
    return "\n".join(lines)


def _figure(value: float | None, width: int, digits: int = 3) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
