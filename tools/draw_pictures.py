# SPDX-License-Identifier: Apache-2.0
"""Pictures of the documentation that come from a run.

    python tools/draw_pictures.py film runs/one docs/images/demo.webp     (runs/one: from `dsd demo --record runs/one`)
    python tools/draw_pictures.py page test/bags/straight docs/images/live-page.png
    python tools/draw_pictures.py report test/bags/straight docs/images/report.png
    python tools/draw_pictures.py lanes test/bags/ball docs/images/swimlane.png
    python tools/draw_pictures.py overlay docs/images/overlay.png

"film": a recorded run as it stands in the live page, moving; "page": the whole page at the run's end; "report": what
`dsd inspect --html` writes; "lanes": the page's panel of the first reply; these need Chromium. "overlay": the shipped
pair's reply about the first picture of the demo, with the link and without it. Each picture names the models of its run
by their fingerprints.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dsd_lab.figures.runs import shipped
from dsd_ros.bringup.systems import DEMO_INSTRUCTION, DEMO_SEED
from dsd_ros.cloud.engine import in_process_channel
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.edge.session import EdgeSession
from dsd_ros.observe.bag.html_report import page as html_report
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

sys.path.append(str(Path(__file__).resolve().parents[1] / "test" / "support"))
from browser import Page, browser, find_browser  # the tests' own

STAMP = "models"  # key of a PNG's text with the fingerprints of the models that its run had
PAGE_SIZE, PHONE_SIZE = (1280, 1000), (390, 844)  # CSS pixels
FILM_SIZE = 880, 690  # CSS pixels
_FRAME_MS, _LAST_MS = 110, 2500
MOTION_S = 0.3  # of the run, from frame to frame while nothing is decoded
REPLY_FRAMES = 9  # at most: replies are shown slower than they were
# Of the live page, what a film shows: instruction, outcome, camera, map, and the reply with both streams.
_FILM_STYLE = """footer, #alarm, #steps, #figures, #run, #log, #map button, #facts { display: none !important }
main { grid-template: "view map" "reply reply" / 1fr 1fr !important }
#view { height: 384px } #tokens { height: 3.4em } #outcome { position: fixed; top: 0; left: 0; right: 0 }"""


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


@contextmanager
def recorded_page(bag: Path, ready: str) -> Iterator[tuple[Page, dict[str, str]]]:
    """A browser with a recorded run in the live page once ``ready`` holds there, and the run's models."""
    path = find_browser()
    if path is None:
        sys.exit("There is no Chromium: apt-get install chromium.")
    run = read_run(open_bag(bag))
    with WebServer(feed_of(run), "127.0.0.1", 0) as server, browser(path) as page:
        page.call("Page.setBypassCSP", enabled=True)  # for the film's style
        page.open(server.page(), *PAGE_SIZE)
        page.until(ready)
        yield page, {"target": run.verifiers[-1].target_fingerprint}


def draw_page(bag: Path, picture: Path) -> None:
    """The live page at a recorded run's end, on a desk and on a phone (whose name gets ``-phone``)."""
    with recorded_page(bag, "kinds.end?.length") as (page, models):
        _draw_sizes(page, picture, models)


def draw_report(bag: Path, picture: Path) -> None:
    """The report of a recorded run, on a desk and on a phone (whose name gets ``-phone``)."""
    with recorded_page(bag, "kinds.end?.length") as (page, models), tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        report.write_text(html_report(read_run(open_bag(bag))), encoding="utf-8")
        page.open(report.as_uri(), *PAGE_SIZE)
        _draw_sizes(page, picture, models)


def _draw_sizes(page: Page, picture: Path, models: dict[str, str]) -> None:
    for ending, size, phone in (("", PAGE_SIZE, False), ("-phone", PHONE_SIZE, True)):
        _resize(page, size, phone)
        save(Image.fromarray(_shown(page)).quantize(), picture.with_stem(picture.stem + ending), models)


def draw_lanes(bag: Path, picture: Path) -> None:
    """The live page's panel of a recorded run's first reply."""
    with recorded_page(bag, "kinds.end?.length") as (page, models):
        page.value("goTo(kinds.stats[0].t + 0.01)")
        drawn = _shown(page)
        box = page.value("(({x, y, width, height}) => [x, y, width, height])($('reply').getBoundingClientRect())")
    x, y, width, height = map(round, box)
    save(Image.fromarray(drawn[y : y + height, x : x + width]), picture, models)


def draw_film(bag: Path, film: Path) -> None:
    """A recorded run in the live page, as an animated WebP: each reply pass by pass, slower than it was."""
    with recorded_page(bag, "kinds.end?.length") as (page, models):
        _resize(page, FILM_SIZE)
        page.value(f"document.head.append(make('style', {json.dumps(_FILM_STYLE)}))")
        frames = []
        for at in film_times(page.value("kinds.reply.map(({t}) => t)"), page.value("goals[0]"), page.value("lastTime")):
            page.value(f"goTo({at})")
            frames.append(Image.fromarray(_shown(page)))
    durations = [_FRAME_MS] * (len(frames) - 1) + [_LAST_MS]
    stamp = json.dumps(models).encode()
    frames[0].save(
        film, save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=70, method=6, xmp=stamp
    )


def film_times(replies: Sequence[float], begin: float, end: float) -> list[float]:
    """Which moments of a run a film shows. ``replies``: when tokens came; all in s since the recording began."""
    times: list[float] = []
    passes: list[float] = []  # of the reply under way
    for at in [*(at for at in replies if at >= begin), float("inf")]:
        if passes and at - passes[-1] > MOTION_S:
            times += [passes[round(i)] for i in np.linspace(0, len(passes) - 1, min(len(passes), REPLY_FRAMES))]
            times += np.arange(passes[-1] + MOTION_S, min(at, end), MOTION_S).tolist()
            passes = []
        passes.append(at)
    return [*times, end]


def _resize(page: Page, size: tuple[int, int], phone: bool = False) -> None:
    scale = 2 if phone else 1
    page.call(
        "Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=scale, mobile=phone
    )


def _shown(page: Page) -> np.ndarray:
    """What the page shows once it has drawn the newest moment."""
    page.value("new Promise(done => setTimeout(done, 200))")
    return page.screenshot()


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
        EdgeSession(channel, draft, DecodeSettings()) as session,
    ):
        session.decode(view, DEMO_INSTRUCTION)  # the first reply also warms up
        decoded = session.decode(view, DEMO_INSTRUCTION)
        reply = reply_of(decoded, lambda token: session.text([token]))
    shown = Overlay(
        replace(reply, instruction=DEMO_INSTRUCTION), link="session open", link_ok=True,
        newest=ReplyFigures(decoded.mode, seconds=decoded.seconds, observation_age=decoded.seconds),
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


def models_of(picture: str | Path) -> dict[str, str]:
    """The fingerprints that :func:`save` or :func:`draw_film` left in a picture; none in any other."""
    with Image.open(picture) as drawn:
        stamp = drawn.info.get(STAMP) or drawn.info.get("xmp") or "{}"
    return dict(json.loads(stamp))


def main() -> None:
    """Command line: which picture, and its files."""
    match sys.argv[1:]:
        case ["film", bag, film]:
            draw_film(Path(bag), Path(film))
        case ["lanes", bag, picture]:
            draw_lanes(Path(bag), Path(picture))
        case ["overlay", picture]:
            save(draw_overlay(), picture)
        case ["page", bag, picture]:
            draw_page(Path(bag), Path(picture))
        case ["report", bag, picture]:
            draw_report(Path(bag), Path(picture))
        case _:
            sys.exit("usage: python tools/draw_pictures.py (film | page | report | lanes) BAG FILE, or overlay FILE")


if __name__ == "__main__":
    main()
