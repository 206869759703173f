# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/papers.md, how they are compared and shown, and the reports that they take figures from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, StatisticsError
from typing import Any

from dsd_lab import read_data
from dsd_lab.report import CONFIDENCE, other_weights

Estimate = Mapping[str, Any]  # "value", and where known "low" and "high" (95 %), and "of": how many were measured
Value = float | Estimate | None
Values = Sequence[Value] | Value | str
# How a figure came about, by the column that it stands in.
PAPER, FORMULA, OURS, SIMULATED, TIMED, HELD, COUNTED = (
    "the paper", "its formula", "ours, computed", "simulated", "timed", "held", "counted, then computed"
)  # fmt: skip
COLUMNS = ("", PAPER, FORMULA, OURS, SIMULATED, TIMED, HELD, COUNTED, "agreement, or why not")
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
    simulated: Values | Measured = None
    timed: Measured | None = None
    held: Measured | None = None
    counted: Measured | None = None
    why: str = ""
    form: str = ".2f"
    compare: bool = True

    @property
    def columns(self) -> dict[str, Values | Measured]:
        """What stands under each of the columns between the name and the agreement."""
        values = (self.paper, self.formula, self.ours, self.simulated, self.timed, self.held, self.counted)
        return dict(zip(COLUMNS[1:-1], values, strict=True))

    @property
    def links(self) -> list[str]:
        """The reports that the row's figures are from."""
        return [one.link for one in self.columns.values() if isinstance(one, Measured) and one.link]

    def cells(self) -> list[str]:
        """The row's cells, as Markdown."""
        shown = [
            one.text or _shown(one.values, self.form) if isinstance(one, Measured) else _shown(one, self.form)
            for one in self.columns.values()
        ]
        return [self.name, *shown, "; ".join(filter(None, (self.verdict(), self.why)))]

    def verdict(self) -> str:
        """How what is computed, simulated and measured compares with the paper, in words that are computed."""
        if not self.compare:
            return ""
        others = list(self.columns.items())[1:]
        said = [
            _compared(_short(name), self.paper, one.values if isinstance(one, Measured) else one, self.form)
            for name, one in others
        ]
        return ", ".join(filter(None, said))


@dataclass(frozen=True)
class Table:
    """A table or figure of a paper. ``text``: what is to know before its rows, where it is not in printed.toml.

    ``cells``: what the cells apart by slashes are, if the same in all rows.
    """

    title: str
    rows: Sequence[Row]
    text: str = ""
    cells: str = ""

    def render(self) -> str:
        """The section, as Markdown; the reports that its figures are from stand below its text."""
        cells = [row.cells() for row in self.rows]
        used = [place == 0 or any(row[place] for row in cells) for place in range(len(COLUMNS))]
        reports = dict.fromkeys(link for row in self.rows for link in row.links)
        text = self.text or PRINTED["texts"].get(self.title, "")
        if reports:
            text += " Reports: " + ", ".join(f"[{Path(link).stem}]({link})" for link in reports) + "."
        lines = [f"### {self.title}", "", *([text.strip(), ""] if text else [])]
        if self.rows:
            lines += [_line([self.cells, *COLUMNS[1:]], used), _line(["---"] * len(COLUMNS), used)]
            lines += [_line(row, used) for row in cells]
        return "\n".join(lines).rstrip() + "\n"


def printed_table(title: str, *computed: dict[str, Any], text: str = "") -> Table:
    """A table with what printed.toml has of its rows, and of ``computed`` the columns beside that, row by row."""
    rows = [Row(**(printed | columns)) for printed, columns in zip(PRINTED["rows"][title], computed, strict=True)]
    return Table(title, rows, text)


def estimate(value: float, of: int | None, error: float | None = None) -> Estimate:
    """A value of so many replies, with its 95 % interval where its standard error is known."""
    bounds = {} if error is None else {"low": value - _Z * error, "high": value + _Z * error}
    return {"value": value, "of": of, **bounds}


_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


def _short(column: str) -> str:
    """A column's name within a sentence."""
    return column.partition(",")[0].removeprefix("its ")


def _line(cells: Iterable[str], used: Sequence[bool]) -> str:
    return "| " + " | ".join(cell for cell, shown in zip(cells, used, strict=True) if shown) + " |"


def _list(values: Values) -> list[Value]:
    if values is None or isinstance(values, str):
        return []
    return [values] if isinstance(values, int | float | Mapping) else list(values)


def _number(value: Value) -> float | None:
    return value["value"] if isinstance(value, Mapping) else value


def _shown(values: Values, form: str) -> str:
    """``2.14 [2.04, 2.24], n 8``: values with their intervals, and how many were measured."""
    if isinstance(values, str):
        return values
    listed = _list(values)
    counts = dict.fromkeys(str(one["of"]) for one in listed if isinstance(one, Mapping) and one.get("of"))
    return " / ".join(_with_interval(value, form) for value in listed) + (f", n {' / '.join(counts)}" if counts else "")


def _with_interval(value: Value, form: str) -> str:
    number = _number(value)
    if number is None:
        return "-"
    if not isinstance(value, Mapping) or value.get("low") is None or value.get("of") == 1:
        return format(number, form)
    high = "no bound" if value["high"] is None else format(value["high"], form)
    return f"{format(number, form)} [{format(value['low'], form)}, {high}]"


def _compared(name: str, paper: Values, other: Values, form: str) -> str:
    numbers = ([_number(value) for value in _list(values)] for values in (paper, other))
    pairs = [(a, b) for a, b in zip(*numbers, strict=False) if a is not None and b is not None]
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

    def __init__(self, folder: Path, shipped: dict[str, str]) -> None:
        """``shipped``: the fingerprints of the models that ship, by name."""
        self._folder, self._shipped = folder, shipped
        self._read: dict[str, Any] = {}

    @property
    def used(self) -> set[str]:
        """The names of all that were asked for, measured or not."""
        return set(self._read)

    def figures(self, name: str, pick: Callable[[Any], Values]) -> Measured:
        """What ``pick`` takes from report ``name``; a report that lacks it counts as not measured."""
        report, link = self._report(name), f"../benchmarks/{name}.json"
        if report is None:
            return Measured(text=NOT_YET)
        if other_weights(report, self._shipped):
            return Measured(text="not measured with the present weights", link=link)
        try:
            values = pick(report)
        except (LookupError, StopIteration, TypeError, ArithmeticError, StatisticsError):
            values = None
        return Measured(text=NOT_YET) if values is None else Measured(values, link)

    def _report(self, name: str) -> Any:
        if name not in self._read:
            path = self._folder / f"{name}.json"
            self._read[name] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return self._read[name]


def labelled(report: Any, label: str) -> Any:
    """The row of a report with that label; StopIteration."""
    return next(row for row in report["rows"] if row["label"] == label)
