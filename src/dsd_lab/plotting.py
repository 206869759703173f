# SPDX-License-Identifier: Apache-2.0
"""What every plot of the laboratory shares: the check of its file's name, and the look of its axes."""

from __future__ import annotations

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
