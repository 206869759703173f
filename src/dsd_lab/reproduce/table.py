# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/papers.md, how they are compared and shown, and the reports that they take figures from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import StatisticsError
from typing import Any

from dsd_lab import read_data

Values = Sequence[float | None] | float | str | None
COLUMNS = ("", "the paper", "its formula", "ours", "measured here", "agreement, or why not")
NOT_YET = "not measured yet"
PRINTED = read_data("reproduce/printed.toml")  # what the papers print


@dataclass(frozen=True)
class Measured:
    """Figures of a report, or in ``text`` why there are none. ``link``: where they are from."""

    values: Values = None
    link: str = ""
    text: str = ""


@dataclass(frozen=True)
class Row:
    """One row: several values stand for the cells of a row of the paper's table. None: there is nothing to show.

    ``form`` shows all values. Compared are those that the paper has; ``compare`` False where a formula or measurement
    is about something else.
    """

    name: str
    paper: Values = None
    formula: Values = None
    ours: Values = None
    measured: Measured = field(default_factory=Measured)
    why: str = ""
    form: str = ".2f"
    compare: bool = True

    def cells(self) -> list[str]:
        """The row's cells, as Markdown."""
        measured = self.measured.text or _shown(self.measured.values, self.form)
        if self.measured.link:
            measured += f" ([{Path(self.measured.link).stem}]({self.measured.link}))"
        shown = [_shown(values, self.form) for values in (self.paper, self.formula, self.ours)]
        return [self.name, *shown, measured, "; ".join(filter(None, (self.verdict(), self.why)))]

    def verdict(self) -> str:
        """How formula, ours and measurement compare with the paper, in words that are computed."""
        if not self.compare:
            return ""
        said = [
            _compared(name, self.paper, values, self.form)
            for name, values in (("formula", self.formula), ("ours", self.ours), ("measured", self.measured.values))
        ]
        return ", ".join(filter(None, said))


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper. ``text``: what is to know before its rows, where it is not in printed.toml."""

    title: str
    rows: Sequence[Row]
    text: str = ""

    def render(self) -> str:
        """The section, as Markdown."""
        used = [any(row.cells()[place] for row in self.rows) or place in (0, 1) for place in range(len(COLUMNS))]
        text = self.text or PRINTED["texts"].get(self.title, "")
        lines = [f"### {self.title}", "", *([text, ""] if text else [])]
        if self.rows:
            lines += [_line(COLUMNS, used), _line(["---"] * len(COLUMNS), used)]
            lines += [_line(row.cells(), used) for row in self.rows]
        return "\n".join(lines).rstrip() + "\n"


def printed_table(title: str, *computed: dict[str, Any], text: str = "") -> Table:
    """A table with what printed.toml has of its rows, and of ``computed`` the columns beside that, row by row."""
    rows = [Row(**(printed | columns)) for printed, columns in zip(PRINTED["rows"][title], computed, strict=True)]
    return Table(title, rows, text)


def _line(cells: Iterable[str], used: Sequence[bool]) -> str:
    return "| " + " | ".join(cell for cell, shown in zip(cells, used, strict=True) if shown) + " |"


def _numbers(values: Values) -> list[float | None]:
    if values is None or isinstance(values, str):
        return []
    return [values] if isinstance(values, int | float) else list(values)


def _shown(values: Values, form: str) -> str:
    if isinstance(values, str):
        return values
    return " / ".join("-" if value is None else format(value, form) for value in _numbers(values))


def _compared(name: str, paper: Values, other: Values, form: str) -> str:
    pairs = [(a, b) for a, b in zip(_numbers(paper), _numbers(other), strict=False) if a is not None and b is not None]
    if not pairs:
        return ""
    if all(format(a, form) == format(b, form) for a, b in pairs):
        return f"{name} equal"
    changes = sorted(round(100 * (b / a - 1)) for a, b in pairs if a)
    if not changes:
        return ""
    low, high = (
        f"{change:+d}" if change < 300 else f"{1 + change / 100:.0f}-fold" for change in (changes[0], changes[-1])
    )
    ends = low if low == high else f"{low} to {high}"
    return f"{name} {ends}" + ("" if ends.endswith("fold") else " %")


class Reports:
    """The reports of a folder, and whether each is of the weights that ship."""

    def __init__(self, folder: Path, shipped: dict[str, str], evaluated: dict[str, Any]) -> None:
        """``shipped``: the fingerprints of the models that ship, by role; ``evaluated``: models/figures.json."""
        self._folder, self._shipped, self._evaluated = folder, shipped, evaluated
        self._read: dict[str, Any] = {}

    def figures(self, name: str, pick: Callable[[Any], Values], models: bool = True) -> Measured:
        """What ``pick`` takes from report ``name``; ``models``: it must be of the shipped weights, or of no pair's.

        A report that lacks what is picked counts as not measured.
        """
        report, link = self._report(name), f"../benchmarks/{name}.json"
        if report is None:
            return Measured(text=NOT_YET)
        if models and not self._current(report):
            return Measured(text="not measured with the present weights", link=link)
        try:
            values = pick(report)
        except (LookupError, StopIteration, TypeError, ArithmeticError, StatisticsError):
            values = None
        return Measured(text=NOT_YET) if values is None else Measured(values, link)

    def shipped_demo(self) -> Measured:
        """The share of simulated runs in which the shipped target reached its goal."""
        value = self._evaluated["training"]["dagger"][-1]["met"]["reached"]
        return Measured(value, "../models/figures.json")

    def _report(self, name: str) -> Any:
        if name not in self._read:
            path = self._folder / f"{name}.json"
            self._read[name] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return self._read[name]

    def _current(self, report: Any) -> bool:
        """Whether the report names its models, and they are those that ship; a text model ships with no release."""
        if not isinstance(report, dict):
            return False
        if report.get("model") == "text" or "models" not in report:
            return report.get("model") == "text"
        marks = {role: model["fingerprint"] for role, model in report["models"].items()}
        return all(self._shipped.get(role, mark) == mark for role, mark in marks.items())


def labelled(report: Any, label: str) -> Any:
    """The row of a report with that label; StopIteration."""
    return next(row for row in report["rows"] if row["label"] == label)
