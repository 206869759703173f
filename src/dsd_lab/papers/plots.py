"""The heat map of FSD's equation 9: how much pre-drafting gains over plain speculative decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dsd_lab.papers.theory import SETUPS, TheoryError, fsd_speedup

GAMMAS = (4, 7, 10)  # as in the paper's Figure 6
_CONTOURS = (1.1, 1.2, 1.5, 2.0, 5.0)
_BIG_MODELS = 0.3  # c the paper expects of 66B targets with a draft on a Jetson
_MOST = 1.0  # the largest c drawn


def speedups(gamma: int, steps: int = 201) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Miss rates (steps,), cost ratios c (steps,) and equation 9 over both, (steps of c, steps of r)."""
    r, c = np.linspace(0, 1, steps), np.linspace(0, _MOST, steps)
    grid = [[fsd_speedup(gamma=gamma, c=row, r=column) for column in r] for row in c]
    return r, c, np.array(grid)


def draw_speedups(path: Path, c: float | None = None, r: float | None = None) -> None:
    """Write the figure (PNG, or another kind by suffix), with a star at (``r``, ``c``) if given.

    Dots: the paper's own systems on a Jetson. Raises TheoryError for a suffix that cannot be drawn, and
    ModuleNotFoundError with the remedy where matplotlib is missing.
    """
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib; pip install -r requirements/train.txt") from error
    figure = Figure(figsize=(12, 4.9), layout="constrained")
    axes = figure.subplots(1, len(GAMMAS), sharex=True, sharey=True)
    norm = LogNorm(1, 1 + max(GAMMAS) * _MOST)
    meshes = []
    for ax, gamma in zip(axes, GAMMAS, strict=True):
        rates, ratios, grid = speedups(gamma)
        colours = {"norm": norm, "cmap": "viridis", "rasterized": True}
        meshes.append(ax.pcolormesh(100 * rates, ratios, grid, **colours))
        lines = ax.contour(100 * rates, ratios, grid, levels=_CONTOURS, colors="white")
        ax.clabel(lines, fmt=lambda level: f"{level:g}x", fontsize=9)
        if ax is not axes[0]:
            ax.axhline(_BIG_MODELS, color="gold", linestyle="--")
        ax.set_title(f"$\\gamma$ = {gamma}")
        ax.set_xlabel("miss rate r, %")
        if r is not None and c is not None and c <= _MOST:
            label = "the given setting" if ax is axes[0] else None
            ax.plot(100 * r, c, "*", color="red", markersize=18, label=label)
    jetsons = [setup for setup in SETUPS if setup.name.endswith(("Jetson", "Go2"))]
    for setup, marker in zip(jetsons, "os^D", strict=True):
        axes[0].plot(
            100 * setup.r,
            setup.draft_round / 4 / setup.t_q,
            marker,
            color="white",
            markeredgecolor="black",
            label=setup.name,
        )
    axes[0].axhline(_BIG_MODELS, color="gold", linestyle="--", label="66B on a Jetson, expected")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, facecolor="0.8")
    axes[0].set_ylabel("$c = T_p / T_q$")
    bar = figure.colorbar(meshes[0], ax=list(axes), label="speed-up of FSD over SD, equation 9")
    ticks = [1, 1.5, 2, 3, 5, 10]
    bar.set_ticks(ticks, labels=[f"{tick:g}x" for tick in ticks], minor=False)
    bar.ax.minorticks_off()
    kinds = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise TheoryError(f"a plot cannot be written as {path}; name it *.png, *.svg or *.pdf")
    figure.savefig(path, dpi=110)
