"""A picture of a demo run: what the robot saw at some of its steps, and its path over the map.

python -m dsd_lab.bench.picture run.json demo.png      # run.json: of `dsd demo --json run.json`
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World

VIEWS = 3
_WIDTH = 400  # of a view, pixels
_TEXT = 104  # height of the text under a view
_INK, _PAPER = (30, 30, 30), (255, 255, 255)


def draw_run(report: dict[str, Any]) -> Image.Image:
    """The picture of a demo's report (the JSON of ``dsd demo``); ValueError when it has no steps."""
    if not report["steps"]:
        raise ValueError("the run has no steps to draw; run `dsd demo --json FILE` to its end")
    poses: list[list[float]] = [step["pose"] for step in report["steps"]]
    chosen = sorted({round(i) for i in np.linspace(0, len(poses) - 1, VIEWS)})
    simulator = Simulator(World.from_seed(report["seed"], report["instruction"]))
    try:
        views = []
        for index in chosen:
            simulator.pose = tuple(poses[index])
            views.append(_captioned(simulator.render(), report["steps"][index], index + 1))
        simulator.pose = tuple(report["path"][-1])
        overview = Image.fromarray(simulator.render_overview([(x, y) for x, y, _ in report["path"]]))
    finally:
        simulator.close()
    height = max(view.height for view in views)
    overview = overview.resize((height * overview.width // overview.height, height))
    sheet = Image.new("RGB", (len(views) * (_WIDTH + 8) + overview.width, height), _PAPER)
    for place, view in enumerate(views):
        sheet.paste(view, (place * (_WIDTH + 8), 0))
    sheet.paste(overview, (len(views) * (_WIDTH + 8), 0))
    return sheet


def _captioned(view: np.ndarray, step: dict[str, Any], number: int) -> Image.Image:
    picture = Image.fromarray(view)
    picture = picture.resize((_WIDTH, _WIDTH * picture.height // picture.width))
    sheet = Image.new("RGB", (_WIDTH, picture.height + _TEXT), _PAPER)
    sheet.paste(picture, (0, 0))
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    lines = textwrap.wrap(f"{number}. {step['reasoning']}", 56)
    pen.multiline_text((4, picture.height + 6), "\n".join(lines[:4]), _INK, font)
    words = f"{step['action']}   ({step['tokens']} tokens in {step['rounds']} rounds)"
    pen.text((4, picture.height + _TEXT - 22), words, (160, 0, 0), font)
    return sheet


def main() -> None:
    """Command line: report, then picture."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m dsd_lab.bench.picture run.json picture.png")
    draw_run(json.loads(Path(sys.argv[1]).read_text())).save(sys.argv[2], optimize=True)


if __name__ == "__main__":
    main()
