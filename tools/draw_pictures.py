# SPDX-License-Identifier: Apache-2.0
"""Pictures of the documentation that come from a run.

    python tools/draw_pictures.py run run.json docs/images/demo.png     (run.json: from `dsd demo --json run.json`)
    python tools/draw_pictures.py overlay docs/images/overlay.png
    python tools/draw_pictures.py page test/bags/straight docs/images/live-page.png     (needs Chromium)

"run": what the robot saw at some of its steps, and its path over the map. "overlay": the shipped pair's reply about the
first picture of the demo, with the link and without it. "page": the live page at the end of a recorded run. Each PNG
names the models of its run by their fingerprints.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from dsd_lab.figures.runs import shipped
from dsd_ros.bringup.systems import DEMO_INSTRUCTION, DEMO_SEED
from dsd_ros.cloud.engine import in_process_channel
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.edge.session import EdgeSession
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run
from dsd_ros.observe.bag.shown_run import feed_of
from dsd_ros.observe.view.figures import ReplyFigures
from dsd_ros.observe.view.overlay import OverlayPainter
from dsd_ros.observe.view.state import Overlay, Round, ShownReply
from dsd_ros.observe.view.web import WebServer
from dsd_ros.paths import models_directory
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import load_model
from dsd_ros.vlm.settings import ModelSettings

STAMP = "models"  # key of a PNG's text with the fingerprints of the models that its run had
VIEWS = 3
_VIEW_WIDTH = 400  # pixels
_CAPTION = 104  # height of the text below a view


def draw_run(report: dict[str, Any]) -> Image.Image:
    """The picture of a demo's report (the JSON of ``dsd demo``); ValueError when it has no steps."""
    if not report["steps"]:
        raise ValueError("the run has no steps to draw; run `dsd demo --json FILE` to its end")
    chosen = sorted({round(i) for i in np.linspace(0, len(report["steps"]) - 1, VIEWS)})
    simulator = Simulator(World.from_seed(report["seed"], report["instruction"]))
    try:
        views = []
        for index in chosen:
            step = report["steps"][index]
            simulator.pose = tuple(step["pose"])
            views.append(_captioned(simulator.render(), step, index + 1))
        simulator.pose = tuple(report["path"][-1])
        overview = Image.fromarray(simulator.render_overview([(x, y) for x, y, _ in report["path"]]))
    finally:
        simulator.close()
    height = max(view.height for view in views)
    overview = overview.resize((height * overview.width // overview.height, height))
    sheet = Image.new("RGB", (len(views) * (_VIEW_WIDTH + 8) + overview.width, height), "white")
    for place, view in enumerate([*views, overview]):
        sheet.paste(view, (place * (_VIEW_WIDTH + 8), 0))
    return sheet


def _captioned(view: np.ndarray, step: dict[str, Any], number: int) -> Image.Image:
    picture = Image.fromarray(view)
    picture = picture.resize((_VIEW_WIDTH, _VIEW_WIDTH * picture.height // picture.width))
    sheet = Image.new("RGB", (_VIEW_WIDTH, picture.height + _CAPTION), "white")
    sheet.paste(picture, (0, 0))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    lines = textwrap.wrap(f"{number}. {step['reasoning']}", 56)
    pen.multiline_text((4, picture.height + 6), "\n".join(lines[:4]), (30, 30, 30), font)
    words = f"{step['action']}   ({step['tokens']} tokens in {step['rounds']} rounds)"
    pen.text((4, picture.height + _CAPTION - 22), words, (160, 0, 0), font)
    return sheet


def reply_of(decoded: DecodedReply, text: Callable[[int], str]) -> ShownReply:
    """A decoded reply as the overlay shows it. ``text``: of one token."""
    rounds = tuple(_round_of(record, text) for record in decoded.records)
    return ShownReply(text=decoded.text, rounds=rounds, done=True, mode=decoded.mode)


def _round_of(record: RoundRecord, text: Callable[[int], str]) -> Round:
    return Round(
        drafted=record.drafted,
        accepted=record.accepted,
        gained=tuple(map(text, record.gained)),
        rejected=tuple(map(text, record.rejected)),
        source=record.source,
    )


def draw_page(bag: Path, picture: Path) -> None:
    """The live page with a recorded run, as a browser shows it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("There is no Chromium: apt-get install chromium.")
    run = read_run(open_bag(bag))
    with WebServer(feed_of(run), "127.0.0.1", 0) as server:
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1000", "--timeout=5000"]
        subprocess.run(
            [browser, *options, f"--screenshot={picture}", server.page()], check=True, stderr=subprocess.DEVNULL
        )
    drawn = Image.open(picture).convert("RGB").quantize(255, dither=Image.Dither.NONE)
    save(drawn, picture, {"target": run.verifiers[-1].target_fingerprint})


def draw_overlay() -> Image.Image:
    """The robot's view at the demo's start with the shipped pair's reply: as it comes, and after the link was lost."""
    simulator = Simulator(World.from_seed(DEMO_SEED, DEMO_INSTRUCTION))
    try:
        view = simulator.render()
    finally:
        simulator.close()
    models = models_directory()
    draft = load_model(ModelSettings(str(models / "draft")))
    with (
        in_process_channel(str(models / "target")) as channel,
        EdgeSession(channel, draft, DecodeSettings(mode="fsd")) as session,
    ):
        session.decode(view, DEMO_INSTRUCTION)  # the first reply also warms up
        decoded = session.decode(view, DEMO_INSTRUCTION)
        reply = reply_of(decoded, lambda token: session.text([token]))
    shown = Overlay(
        replace(reply, instruction=DEMO_INSTRUCTION), link="session open, mode fsd", link_ok=True,
        newest=ReplyFigures("fsd", tau=decoded.tau, seconds=decoded.seconds, observation_age=decoded.seconds),
    )  # fmt: skip
    lost = replace(
        shown, causes=("The link to the verifier is lost",), stopped=True, link="the link broke", link_ok=False
    )
    left, right = (OverlayPainter().frame(view, one) for one in (shown, lost))
    gap = np.full((left.shape[0], 12, 3), 255, np.uint8)
    return Image.fromarray(np.concatenate([left, gap, right], axis=1))


def save(drawn: Image.Image, picture: str | Path, models: dict[str, str] | None = None) -> None:
    """Write a PNG that holds the fingerprints of its run's models, by default those that ship."""
    text = PngInfo()
    text.add_text(STAMP, json.dumps(models or shipped()))
    drawn.save(picture, optimize=True, pnginfo=text)


def main() -> None:
    """Command line: which picture, and its files."""
    match sys.argv[1:]:
        case ["run", report, picture]:
            save(draw_run(json.loads(Path(report).read_text())), picture)
        case ["overlay", picture]:
            save(draw_overlay(), picture)
        case ["page", bag, picture]:
            draw_page(Path(bag), Path(picture))
        case _:
            sys.exit("usage: python tools/draw_pictures.py (run run.json | overlay | page BAG) picture.png")


if __name__ == "__main__":
    main()
