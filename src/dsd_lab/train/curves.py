"""The picture of a training: each stage's loss and share right over its minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PICTURE = "training.png"  # beside the models' cards
_COLUMNS = 3


def stages_of(figures: dict[str, Any], model: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, figures) of the stages that a training tells of, in order: of "target", of "draft", or of both."""
    if model != "draft":
        for name in ("vision", "target", "joint"):
            if figures.get(name):
                yield name, figures[name]
        for number, each in enumerate(figures.get("dagger", [])):
            yield f"dagger, round {number}", each
    if model != "target":
        for name in ("draft", "draft_own"):
            if figures.get(name):
                yield name.replace("_", ", "), figures[name]
    if model != "draft" and figures.get("exits"):
        yield "exits", figures["exits"]


def draw_training(figures: dict[str, Any], path: Path, model: str | None = None) -> None:
    """Draw the stages' curves into a PNG; ModuleNotFoundError with the remedy without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing needs matplotlib; pip install -r requirements/train.txt") from error
    stages = [(name, stage) for name, stage in stages_of(figures, model) if "curve" in stage]
    rows = -(-len(stages) // _COLUMNS)
    columns = min(_COLUMNS, len(stages))
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.2 / columns, right=1 - 0.2 / columns, bottom=0.2 / rows, top=1 - 0.12 / rows,
        wspace=0.65, hspace=0.6,
    )  # fmt: skip
    for axes in grid.flat[len(stages) :]:
        axes.set_visible(False)
    for axes, (name, each) in zip(grid.flat, stages, strict=False):
        minutes, loss, right = zip(*each["curve"], strict=True) if each["curve"] else ((), (), ())
        axes.plot(minutes, loss, color="tab:red", marker="." if len(loss) < 2 else "")
        axes.set_yscale("log")
        axes.set_title(f"{name}: {each['steps']} steps", fontsize=9)
        axes.set_xlabel("minutes", fontsize=8)
        axes.set_ylabel("loss", color="tab:red", fontsize=8)
        share = axes.twinx()
        share.plot(minutes, right, color="tab:blue", marker="." if len(right) < 2 else "")
        share.set_ylim(0.0, 1.0)
        share.set_ylabel("share right", color="tab:blue", fontsize=8)
        for each_axes in (axes, share):
            each_axes.tick_params(labelsize=7)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=110, metadata={"Software": None})
    os.replace(part, path)
