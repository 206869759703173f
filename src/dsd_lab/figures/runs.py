# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab figures`: measure every report that is not of the present weights and code, and write the pages.

Each report is a command of ``runs.toml``, run in a process of its own. It replaces the report before only when it ends
well, so a run that is killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from dsd_lab import tomllib
from dsd_lab.figures.pages import ROOT, Pages, report_path
from dsd_lab.report import BenchError, code_digest, other_weights, shipped
from dsd_lab.reproduce.page import write_page

CURRENT = "current"
COUNTED = "counted"  # the kind that may be measured beside others
_PROGRAM = [sys.executable, "-c", "from dsd_lab.cli.main import run; run()"]


@dataclass(frozen=True)
class Run:
    """How a report is measured."""

    name: str
    command: str
    minutes: float  # on two cores
    kind: str = "timed"  # at real speed; "held" to other machines' times; COUNTED, whatever the load
    plot: str = ""  # a picture of docs/images, without its ending

    @property
    def words(self) -> list[str]:
        """The arguments of dsd-lab."""
        return shlex.split(self.command)[1:]


def load_runs(path: Path | None = None) -> dict[str, Run]:
    """Every run of runs.toml by name, in order."""
    text = (path or Path(__file__).with_name("runs.toml")).read_text(encoding="utf-8")
    return {name: Run(name, **values) for name, values in tomllib.loads(text).items()}


def select(runs: dict[str, Run], names: Sequence[str]) -> list[Run]:
    """The runs of these names, or all; patterns such as modes-* name several. BenchError for an unknown one."""
    chosen: list[Run] = []
    for name in names or ["*"]:
        found = [run for run in runs.values() if fnmatchcase(run.name, name)]
        if not found:
            raise BenchError(f"there is no report {name!r}; name some of {', '.join(runs)}")
        chosen += [run for run in found if run not in chosen]
    return chosen


def state_of(run: Run, ships: dict[str, str], root: Path = ROOT) -> str:
    """CURRENT, or why the report has to be measured."""
    try:
        report = json.loads(report_path(run.name, root).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "is not there"
    except ValueError:
        return "is no JSON"
    if why := other_weights(report, ships):
        return why
    if report.get("command") != shlex.join(shlex.split(run.command)):
        return "was measured by another command"
    if report.get("code", {}).get("digest") != code_digest(report.get("code", {}).get("of", ())):
        return "is of earlier code"
    return CURRENT


def measure(run: Run, root: Path = ROOT) -> str:
    """Measure one report; "" or why it failed. Its output goes to this process's."""
    path = report_path(run.name, root)
    with tempfile.TemporaryDirectory(prefix="dsd-figures-") as folder:
        made = Path(folder) / path.name
        command = [*_PROGRAM, *run.words, "--json", str(made)]
        if run.plot:
            command += ["--plot", str(root / "docs" / "images" / f"{run.plot}.png")]
        began = time.monotonic()
        threads = {"OMP_NUM_THREADS": "1"} if run.kind == COUNTED else {}  # two share the cores
        code = subprocess.run(command, cwd=root, env=os.environ | threads, check=False).returncode
        if not made.is_file():
            return f"exit code {code}"
        report = json.loads(made.read_text(encoding="utf-8")) | {"took_s": round(time.monotonic() - began, 1)}
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return "" if code == 0 else f"measured, but its command ended with exit code {code}"


def make_figures(
    names: Sequence[str],
    again: bool = False,
    root: Path = ROOT,
    runs: dict[str, Run] | None = None,
    say: Callable[[str], None] = print,
    ask: Callable[[Run, Path], str] = measure,
) -> list[str]:
    """Measure the reports that need it, writing the pages after each; a sentence for each failure."""
    todo, lines = plan(select(runs or load_runs(), names), again, root)
    for line in lines:
        say(line)
    failures: list[str] = []

    def one(run: Run) -> str:
        say(f"\n[{todo.index(run) + 1}/{len(todo)}] {run.name}, about {run.minutes:g} min: {run.command}")
        began = time.monotonic()
        failed = ask(run, root)
        say(f"{run.name}: {failed or f'{(time.monotonic() - began) / 60:.1f} min'}")
        return f"{run.name}: {failed}" if failed else ""

    alone, together = ([run for run in todo if (run.kind == COUNTED) is counted] for counted in (False, True))
    with ThreadPoolExecutor(2) as pool:
        for work in (partial(map, one, alone), partial(pool.map, one, together)):
            for failed in work():
                failures += [failed] if failed else []
                failures += write_pages(root, say)
    return failures if todo else write_pages(root, say)


def minutes_of(runs: Iterable[Run]) -> float:
    """How long these take together."""
    return sum(run.minutes / (2 if run.kind == COUNTED else 1) for run in runs)


def plan(chosen: Iterable[Run], again: bool, root: Path = ROOT) -> tuple[list[Run], list[str]]:
    """The runs to measure; and lines that say which and why, which not, and how long it takes."""
    ships, todo, lines = shipped(root), list[Run](), list[str]()
    for run in chosen:
        state = state_of(run, ships, root)
        wanted = again or state != CURRENT
        todo += [run] if wanted else []
        lines.append(f"{run.name}: {state}" + ("" if wanted else ", skipped"))
    return todo, [
        *lines,
        f"{len(todo)} to measure, about {minutes_of(todo):.0f} minutes on two idle cores"
        if todo
        else "nothing to measure",
    ]


def write_pages(root: Path = ROOT, say: Callable[[str], None] = print) -> list[str]:
    """Fill in the blocks of every page; what could not be, as sentences."""
    pages, failures = Pages(root), []
    for path in pages.paths():
        try:
            text = pages.filled(path)
        except BenchError as error:
            failures.append(f"{path.name}: {error}")
            continue
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            say(f"wrote {path.relative_to(root)}")
    papers = root / "docs" / "papers.md"
    if papers.is_file() and (text := write_page(root)) != papers.read_text(encoding="utf-8"):
        papers.write_text(text, encoding="utf-8")
        say("wrote docs/papers.md")
    return failures
