# SPDX-License-Identifier: Apache-2.0
"""The laboratory's plot: panels of lines over numbers, or of bars, and the check of its file's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
BLUE, RED, GREEN, YELLOW, GREY = "#1f5fa8", "#c8553d", "#3b8f5a", "#b58900", "#888888"


class PlotError(ValueError):
    """A plot cannot be written where it was asked for; one sentence."""


def check_plot(path: Path) -> None:
    """PlotError when no plot can be written to ``path``. Call it before a long run."""
    if path.suffix.lower() not in FORMATS:
        raise PlotError(f"{path.name} is no picture file; name it *{', *'.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise PlotError(f"there is no directory {path.parent} for the plot; make it first")


def new_figure(path: Path, width: float, height: float) -> Figure:
    """An empty figure, its size in inches, for ``path``; PlotError."""
    check_plot(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=130)


def tidy(*panels: Any, grid: str = "both") -> None:
    """A light grid behind the data and no frame on the right and at the top."""
    for axes in panels:
        axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Curve:
    """A line of a panel, or its bars where ``xs`` are words. ``line``: matplotlib's."""

    label: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[float]
    line: str = "-"


@dataclass(frozen=True)
class Panel:
    """What is over what. ``level``: of a dotted horizontal line, such as the speed of the target alone."""

    x: str
    y: str
    curves: Sequence[Curve]
    log: str = ""  # the logarithmic axes: "", "x", "y" or "xy"
    level: float | None = None


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw a report's panels side by side, the curves of one label in one colour; PlotError, OSError."""
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    canvas = new_figure(path, 4.8 * len(panels), 4.2)
    for axes, panel in zip(canvas.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for curve in panel.curves:
            place = labels.index(curve.label)
            look = {"color": f"C{place % 10}", "marker": "os^D"[place // 10 % 4]}
            if isinstance(curve.xs[0], str):
                axes.barh(curve.xs, curve.ys, color=look["color"])
            else:
                axes.plot(curve.xs, curve.ys, linestyle=curve.line, markersize=4, label=curve.label, **look)
        words = isinstance(panel.curves[0].xs[0], str)
        axes.set(xlabel=panel.y if words else panel.x, ylabel=panel.x if words else panel.y)
        if words:
            axes.invert_yaxis()
        if "x" in panel.log:
            axes.set_xscale("log")
        if "y" in panel.log:
            axes.set_yscale("log")
        elif not words:
            axes.set_ylim(bottom=0.0)
        if panel.level is not None:
            (axes.axvline if words else axes.axhline)(panel.level, color=GREY, linewidth=0.8, linestyle=":")
        tidy(axes)
    shown = {line.get_label(): line for axes in canvas.axes for line in axes.get_lines() if line.get_label() in labels}
    if len(shown) > 1:
        canvas.legend(shown.values(), shown.keys(), loc="outside right center", frameon=False, fontsize=7)
    canvas.suptitle(title, fontsize=10)
    canvas.savefig(path)
