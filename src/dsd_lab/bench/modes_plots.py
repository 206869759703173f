"""Plots of `dsd-lab bench modes`: speed-up and miss rate over a swept setting, or bars where no number was swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsd_lab.bench.modes_report import pictures
from dsd_lab.plotting import BLUE, GREEN, RED, YELLOW, new_figure, tidy
from dsd_lab.report import BenchError, Row

_COLOURS = (BLUE, RED, GREEN, "#8d5fa8", YELLOW, "#4a4a4a", "#17a2b8", "#d6336c")
_POLICIES = {"predraft_policy", "exit_policy"}
_FIGURES = {"speedup": "times as fast as the target alone (ar)", "miss_rate": "pre-draft miss rate, %"}
_NAMES = {
    "draft_length": "draft length γ",
    "predraft_workers": "pre-draft workers",
    "predraft_policy": "client queue",
    "exit_policy": "server queue",
    "predraft_source": "pre-draft source",
    "predraft_batch": "pre-drafts per forward",
    "predraft_budget": "pre-drafts per round at most",
    "pipeline_depth": "rounds in flight",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``modes_report`` into ``path``; BenchError, PlotError, OSError.

    One swept number gives lines over it; with a swept word as well (a policy), groups of bars; no sweep, a bar
    for each mode.
    """
    rows, sweep = report["rows"], report["sweep"]
    numbers = [name for name, values in sweep.items() if all(isinstance(value, (int, float)) for value in values)]
    figures = [f for f in _FIGURES if any(row[f] is not None for row in rows)]
    if not figures:
        raise BenchError("there is nothing to draw: measure mode ar too, or one that drafts ahead")
    canvas = new_figure(path, 4.5 * len(figures), 3.8)
    panels = list(zip(canvas.subplots(1, len(figures), squeeze=False)[0], figures, strict=True))
    if not numbers:
        for axes, figure in panels:
            _plain_bars(axes, rows, figure)
    else:
        groups = {figure: _groups(rows, figure, numbers[0]) for figure in figures}
        names = dict.fromkeys(label for found in groups.values() for label in found)
        colours = {label: _COLOURS[n % len(_COLOURS)] for n, label in enumerate(names)}
        look = _lines if len(numbers) == len(sweep) else _bars
        for axes, figure in panels:
            look(axes, groups[figure], figure, numbers[0], sweep[numbers[0]], colours)
            _dress(axes, figure, _NAMES.get(numbers[0], numbers[0]), sweep.keys() >= _POLICIES)
    canvas.suptitle(f"{report['profile']}, {pictures(report)}", fontsize=10)
    canvas.savefig(path)


def _dress(axes: Any, figure: str, swept: str, policies: bool) -> None:
    axes.set(xlabel=swept, ylabel=_FIGURES[figure])
    if figure == "speedup":
        axes.axhline(1.0, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0.0, top=1.25 * axes.get_ylim()[1])  # room for the legend
    tidy(axes, grid="y")
    handles, labels = axes.get_legend_handles_labels()
    title = "client / server queue" if policies else None
    columns = 3 if len(handles) > 3 else 1
    axes.legend(handles, labels, title=title, title_fontsize=7, frameon=False, fontsize=7, ncols=columns)


def _lines(
    axes: Any, groups: dict[str, list[Row]], figure: str, name: str, values: Sequence[Any], colours: dict[str, str]
) -> None:
    """A line for each mode (and each value of what else was swept) over the setting ``name``."""
    for label, points in groups.items():
        points.sort(key=lambda row: row["settings"][name])
        errors = [row["speedup_spread"] for row in points] if figure == "speedup" else None
        axes.errorbar(
            [row["settings"][name] for row in points], _heights(points, figure), errors, color=colours[label],
            label=label, marker="o", markersize=4, capsize=2, linewidth=1.4, elinewidth=0.7,
        )  # fmt: skip
    axes.set_xticks(values)


def _bars(
    axes: Any, groups: dict[str, list[Row]], figure: str, name: str, values: Sequence[Any], colours: dict[str, str]
) -> None:
    """Groups over the setting ``name``, and in each a bar for every combination of the others."""
    width = 0.8 / max(1, len(groups))
    for number, (label, points) in enumerate(groups.items()):
        offset = (number - (len(groups) - 1) / 2) * width
        places = [values.index(row["settings"][name]) + offset for row in points]
        axes.bar(places, _heights(points, figure), width * 0.92, color=colours[label], label=label)
    axes.set_xticks(range(len(values)), [str(value) for value in values])


def _plain_bars(axes: Any, rows: Sequence[Row], figure: str) -> None:
    """A horizontal bar for every mode, the first one on top: names of modes with settings are long."""
    shown = [row for row in rows if row[figure] is not None]
    spreads = [row["speedup_spread"] for row in shown] if figure == "speedup" else None
    axes.barh(range(len(shown)), _heights(shown, figure), 0.7, xerr=spreads, color=BLUE, capsize=3)
    axes.set_yticks(range(len(shown)), [row["label"].replace("+", "+\n") for row in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(_FIGURES[figure])
    if figure == "speedup":
        axes.axvline(1.0, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0.0)
    tidy(axes, grid="x")


def _groups(rows: Sequence[Row], figure: str, name: str) -> dict[str, list[Row]]:
    """Rows that were swept over ``name`` and have the figure, by what else sets them apart."""
    swept = [row for row in rows if name in row["own"] and row[figure] is not None]
    several = len({row["mode"] for row in swept}) > 1
    groups: dict[str, list[Row]] = {}
    for row in swept:
        own = {key: value for key, value in row["own"].items() if key != name}
        parts = [row["mode"]] if several or not own else []
        if own.keys() >= _POLICIES:  # named as in the paper's Table 7
            parts.append(f"{own.pop('predraft_policy')} / {own.pop('exit_policy')}")
        parts += [f"{_NAMES.get(key, key)} {value}" for key, value in own.items()]
        groups.setdefault(", ".join(parts), []).append(row)
    return groups


def _heights(rows: Sequence[Row], figure: str) -> list[float]:
    return [100.0 * row[figure] if figure == "miss_rate" else row[figure] for row in rows]
