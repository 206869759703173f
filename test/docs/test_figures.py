# SPDX-License-Identifier: Apache-2.0
"""Every measured figure that a page shows comes from a report, and every report is of the weights that ship."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

from every import every
from pages import PAGES, ROOT, text_of

from dsd_lab.cli.main import LAB
from dsd_lab.figures.pages import BLOCKS, Pages
from dsd_lab.figures.runs import load_runs
from dsd_lab.report import other_weights, shipped
from dsd_lab.reproduce.page import PAPERS
from dsd_lab.reproduce.table import Reports
from dsd_ros.cli.main import parse
from dsd_ros.decoding.modes import PRESETS

REPORTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.json") if path.stem != "history")


def test_every_block_is_what_its_reports_give() -> None:
    different = [str(path.relative_to(ROOT)) for path in Pages(ROOT).different()]
    assert not different, f"run `make figures ARGS=--pages`: it would change {', '.join(different)}"


def test_every_template_fills_a_block() -> None:
    assert {name for _, name in Pages(ROOT).blocks()} == {path.stem for path in BLOCKS.glob("*.md")}


def test_nothing_is_measured_that_no_page_shows() -> None:
    """A report is read by a block of a page, the list of all reports apart, or by docs/papers.md."""
    pages = Pages(ROOT)
    for name in {name for _, name in pages.blocks()} - {"reports"}:
        pages.rendered(name)
    shown = set().union(*(reports for name, reports in pages.used.items() if name != "reports"))
    reports = Reports(ROOT / "benchmarks", {})
    for _, _, tables in PAPERS:
        list(tables(reports))
    shown |= reports.used
    assert {*REPORTS} | set(load_runs()) == shown


@every(REPORTS)
def test_a_report_is_of_the_models_that_ship(name: str) -> None:
    report = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    why = other_weights(report, shipped(ROOT))
    assert not why, f"benchmarks/{name}.json {why}; run `make figures ARGS={name}`"


@every((ROOT / "benchmarks").glob("*.json"))
def test_a_report_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert platform.node() not in text or len(platform.node()) < 4
    assert not re.search(r'[" ]/(home|root|tmp|work|Users|mnt)/', text)


def test_every_run_is_a_command_that_parses() -> None:
    runs = load_runs()
    for run in runs.values():
        parse([*run.words, "--json", "x.json", *(["--plot", "x.png"] if run.plot else [])], LAB)
        assert run.minutes > 0
    assert len({run.command for run in runs.values()}) == len(runs)


@every(PAGES)
def test_every_report_that_a_page_names_is_there(page: Path) -> None:
    for name in re.findall(r"benchmarks/([\w-]+\.json)", text_of(page)):
        assert (ROOT / "benchmarks" / name).is_file(), f"{page.name} names {name}"


def test_the_page_names_every_mode() -> None:
    page = text_of(ROOT / "docs" / "modes.md")
    assert {name for name in PRESETS if f"`{name}`" in page} == set(PRESETS)


# Pages with the deadlines and limits of settings are left out: those are no measurements.
LIMITS = {
    "go2.md",
    "navigation.md",
    "observe.md",
    "papers.md",
    "parameters.md",
    "protocol.md",
    "safety.md",
    "theory.md",
    "topics.md",
}


WITHOUT_LIMITS = [page for page in (ROOT / "docs").glob("*.md") if page.name not in LIMITS]


@every([ROOT / "README.md", ROOT / "benchmarks" / "README.md", *WITHOUT_LIMITS])
def test_measured_times_stand_in_blocks_alone(page: Path) -> None:
    prose = re.sub(r"<!-- figures: .*?<!-- /figures -->|```.*?```", "", text_of(page), flags=re.DOTALL)
    typed = set(re.findall(r"\d*\.\d+ ?(?:x|times|ms|s|seconds|tokens a second)\b", prose))
    typed -= {"83.5 ms"}  # FSD Table 5, which a report is held to
    assert not typed, f"{page.name} has {', '.join(sorted(typed))} outside a block"
