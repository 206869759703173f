"""Plots of a pair's figures: bars by situation, actions mistaken for others, paths, learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsd_ros.navigation.actions import all_actions, format_action

Figures = dict[str, Any]
_COLOURS = {"target": "#1f5fa8", "draft": "#c8553d"}
_TRUTHS = ("object", "colour", "side", "distance", "other", "all")
_UNPARSABLE = "unparsable"
_DPI = 90


def draw_situations(figures: Figures, path: Path) -> None:
    """Actions right, runs that reach the goal and collisions by situation, with 95 % intervals."""
    names = list(figures["situations"])
    parts = (
        ("actions_right", "actions right, %"),
        ("closed_loop", "runs that reach the goal, %"),
        ("collided", "runs with a collision, %"),
    )
    figure = _figure(11, 3.4)
    for axes, (key, title) in zip(figure.subplots(1, len(parts)), parts, strict=True):
        rows = {role: [figures[role]["situations"][name][key] for name in names] for role in _roles(figures)}
        _bars(axes, names, rows)
        axes.set_title(title, fontsize=10)
    _save(figure, path)


def draw_truth(figures: Figures, path: Path) -> None:
    """How much of what the replies say is true, with 95 % intervals."""
    figure = _figure(7.5, 3.2)
    axes = figure.subplots()
    labels = [*_TRUTHS[:-1], "all that is said"]
    rows = {role: [figures[role]["all"]["truth"][name] for name in _TRUTHS] for role in _roles(figures)}
    _bars(axes, labels, rows)
    axes.set_title("said truthfully, % of replies that have to say it", fontsize=10)
    _save(figure, path)


def draw_actions(figures: Figures, path: Path) -> None:
    """Which action was said where the expert's was which, a matrix per model, rows in percent."""
    roles = _roles(figures)
    labels = [format_action(action) for action in all_actions()]
    figure = _figure(5.6 * len(roles), 5.2)
    for axes, role in zip(figure.subplots(1, len(roles), squeeze=False)[0], roles, strict=True):
        confusion = figures[role]["all"]["confusion"]
        columns = [*labels, _UNPARSABLE]
        grid = []
        for wanted in labels:
            said = confusion.get(wanted, {})
            count = max(sum(said.values()), 1)
            grid.append([100 * said.get(name, 0) / count for name in columns])
        axes.imshow(grid, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                if value >= 0.5:
                    ink = "white" if value > 55 else "#333333"
                    axes.text(x, y, f"{value:.0f}", ha="center", va="center", size=7, color=ink)
        axes.set_xticks(range(len(columns)), map(_short, columns), rotation=60, ha="right", size=8)
        counts = [f"{_short(a)}  ({sum(confusion.get(a, {}).values())})" for a in labels]
        axes.set_yticks(range(len(labels)), counts, size=8)
        axes.set_xlabel("said")
        axes.set_ylabel("the expert's (scenes)")
        axes.set_title(f"{role}: actions, % of each row", fontsize=10)
    _save(figure, path)


def draw_paths(figures: Figures, path: Path) -> None:
    """Path lengths of runs that reached the goal, as multiples of the expert's."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(6, 3)
    axes = figure.subplots()
    rows = {role: figures[role]["all"]["path_ratios"] for role in _roles(figures)}
    edge = max(2.0, *(max(row, default=0.0) for row in rows.values()))
    bins = [0.5 + n * (edge - 0.5) / 30 for n in range(31)]
    for role, row in rows.items():
        clipped = [min(max(value, 0.5), edge) for value in row]
        label = f"{role}, {len(row)} runs"
        axes.hist(clipped, bins, alpha=0.6, color=_COLOURS[role], label=label)
    axes.axvline(1.3, color="#999999", linestyle=":", linewidth=1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("path length, times the expert's (dotted: 1.3)")
    axes.set_ylabel("runs")
    axes.legend(frameon=False, fontsize=8)
    _dress(axes)
    _save(figure, path)


def need_matplotlib() -> Any:
    """matplotlib's Figure; ModuleNotFoundError with the remedy where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib; pip install -r requirements/train.txt") from error
    return Figure


def _roles(figures: Figures) -> list[str]:
    return [role for role in _COLOURS if figures[role] is not None]


def _bars(axes: Any, labels: Sequence[str], rows: dict[str, list[Figures]]) -> None:
    """Groups of bars of shares with their intervals, in percent."""
    width = 0.8 / len(rows)
    for place, (role, shares) in enumerate(rows.items()):
        shown = [n for n, share in enumerate(shares) if share["value"] is not None]
        values = [100 * shares[n]["value"] for n in shown]
        reach = [[100 * abs(shares[n]["value"] - shares[n][end]) for n in shown] for end in ("low", "high")]
        xs = [n + (place - (len(rows) - 1) / 2) * width for n in shown]
        look = {"color": _COLOURS[role], "label": role, "ecolor": "#333333", "capsize": 2}
        axes.bar(xs, values, width, yerr=reach, error_kw={"linewidth": 0.8}, **look)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(0, 105)
    # Below: nearly all of the bars reach the top.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "ncols": len(rows)}
    axes.legend(frameon=False, fontsize=8, **place)
    _dress(axes)


def _dress(axes: Any) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _short(action: str) -> str:
    return action.replace(" degrees", "°").replace("turn ", "")


def _figure(width: float, height: float) -> Any:
    return need_matplotlib()(figsize=(width, height), layout="constrained", dpi=_DPI)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})
