"""Plots of `dsd-lab bench modes`: speed-up and miss rate over a swept setting, or bars where no number was swept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsd_lab.bench.modes_report import pictures
from dsd_lab.bench.sweeps import BenchError

Row = dict[str, Any]
FORMATS = (".png", ".svg", ".pdf")
_COLOURS = ("#1f5fa8", "#c8553d", "#3b8f5a", "#8d5fa8", "#b58900", "#4a4a4a", "#17a2b8", "#d6336c")
_POLICIES = {"predraft_policy", "exit_policy"}
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


def check_plot(path: Path) -> None:
    """BenchError when no plot can be written to ``path``: before the run, not after it."""
    if path.suffix.lower() not in FORMATS:
        raise BenchError(f"{path.name} is no picture file; end it in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise BenchError(f"there is no directory {path.parent} for the plot; make it first")
    _figure_class()


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report of ``evaluation.modes_report`` into ``path``; BenchError, OSError.

    One swept number makes lines over it; with a swept word as well (a policy), groups of bars; no sweep, a bar
    for each mode.
    """
    check_plot(path)
    rows, sweep = report["rows"], report["sweep"]
    numbers = [name for name, values in sweep.items() if all(map(_is_number, values))]
    figures = [f for f in ("speedup", "miss_rate") if any(row[f] is not None for row in rows)]
    if not figures:
        raise BenchError("there is nothing to draw: measure mode ar too, or one that drafts ahead")
    names = {figure: list(_groups(rows, figure, numbers[0])) if numbers else [] for figure in figures}
    together = dict.fromkeys(label for labels in names.values() for label in labels)
    colours = {label: _COLOURS[n % len(_COLOURS)] for n, label in enumerate(together)}
    canvas = _figure_class()(figsize=(4.5 * len(figures), 3.8), layout="constrained", dpi=150)
    for axes, figure in zip(canvas.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        if not numbers:
            _plain_bars(axes, rows, figure)
            continue
        if len(numbers) < len(sweep):
            _bars(axes, rows, figure, numbers[0], sweep[numbers[0]], colours)
        else:
            _lines(axes, rows, figure, numbers[0], sweep[numbers[0]], colours)
        _dress(axes, figure, "client / server queue" if sweep.keys() >= _POLICIES else None)
    canvas.suptitle(f"{report['profile']}, {pictures(report)}", fontsize=10)
    canvas.savefig(path)


def _dress(axes: Any, figure: str, title: str | None) -> None:
    if figure == "speedup":
        axes.set_ylabel("times as fast as the target alone (ar)")
        axes.axhline(1.0, color="#999999", linewidth=0.8, linestyle=":")
    else:
        axes.set_ylabel("pre-draft miss rate, %")
    axes.set_ylim(bottom=0.0, top=1.25 * axes.get_ylim()[1])  # room for the legend
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 3 if len(handles) > 3 else 1
        axes.legend(handles, labels, title=title, title_fontsize=7, frameon=False, fontsize=7, ncols=columns)


def _lines(
    axes: Any, rows: Sequence[Row], figure: str, name: str, values: Sequence[Any], colours: dict[str, str]
) -> None:
    """A line for each mode (and each value of what else was swept) over the setting ``name``."""
    for label, points in _groups(rows, figure, name).items():
        look = {"color": colours[label], "label": label, "marker": "o"}
        points.sort(key=lambda row: row["settings"][name])
        xs = [row["settings"][name] for row in points]
        ys = _scaled([row[figure] for row in points], figure)
        errors = [row["speedup_spread"] for row in points] if figure == "speedup" else None
        axes.errorbar(xs, ys, errors, markersize=4, capsize=2, linewidth=1.4, elinewidth=0.7, **look)
    axes.set_xlabel(_NAMES.get(name, name))
    axes.set_xticks(values)


def _bars(
    axes: Any, rows: Sequence[Row], figure: str, name: str, values: Sequence[Any], colours: dict[str, str]
) -> None:
    """Groups over the setting ``name``, and in each a bar for every combination of the others."""
    groups = _groups(rows, figure, name)
    width = 0.8 / max(1, len(groups))
    for number, (label, points) in enumerate(groups.items()):
        offset = (number - (len(groups) - 1) / 2) * width
        places = [values.index(row["settings"][name]) + offset for row in points]
        heights = _scaled([row[figure] for row in points], figure)
        axes.bar(places, heights, width * 0.92, color=colours[label], label=label)
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set_xlabel(_NAMES.get(name, name))


def _plain_bars(axes: Any, rows: Sequence[Row], figure: str) -> None:
    """A bar lying down for every mode, the first one on top: names of modes with settings are long."""
    shown = [row for row in rows if row[figure] is not None]
    names = [row["label"].replace("+", "+\n") for row in shown]
    spreads = [row["speedup_spread"] for row in shown] if figure == "speedup" else None
    widths = _scaled([row[figure] for row in shown], figure)
    axes.barh(range(len(shown)), widths, 0.7, xerr=spreads, color=_COLOURS[0], capsize=3)
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.invert_yaxis()
    if figure == "speedup":
        axes.set_xlabel("times as fast as the target alone (ar)")
        axes.axvline(1.0, color="#999999", linewidth=0.8, linestyle=":")
    else:
        axes.set_xlabel("pre-draft miss rate, %")
    axes.set_xlim(left=0.0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _groups(rows: Sequence[Row], figure: str, name: str) -> dict[str, list[Row]]:
    """Rows that were swept over ``name`` and have the figure, by what else sets them apart."""
    swept = [row for row in rows if name in row["own"] and row[figure] is not None]
    several = len({row["mode"] for row in swept}) > 1
    groups: dict[str, list[Row]] = {}
    for row in swept:
        own = {key: value for key, value in row["own"].items() if key != name}
        parts = [row["mode"]] if several or not own else []
        if own.keys() >= _POLICIES:  # as the paper's Table 7 names them
            parts.append(f"{own.pop('predraft_policy')} / {own.pop('exit_policy')}")
        parts += [f"{_NAMES.get(key, key)} {value}" for key, value in own.items()]
        groups.setdefault(", ".join(parts), []).append(row)
    return groups


def _scaled(values: Sequence[float], figure: str) -> list[float]:
    return [100.0 * value if figure == "miss_rate" else value for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchError("plots need matplotlib, which is not installed; run `pip install matplotlib`") from None
    return Figure
