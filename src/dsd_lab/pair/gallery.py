"""What went wrong, to look at: pictures with a wrong decision, and maps of runs that failed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dsd_lab.pair.runs import Run, action_of
from dsd_lab.pair.scenes import Scene, offscreen
from dsd_ros.robot.sim.simulator import Simulator

_COLUMNS = 3
_WIDTH, _HEIGHT = 336, 224  # of a view
_TEXT = 172  # under it
_MAP = (336, 280)
_MAP_TEXT = 66
_GAP = 8
_COLOURS = 160  # of a sheet's palette, which keeps it small
_INK, _PAPER, _WRONG, _RIGHT = (30, 30, 30), (255, 255, 255), (170, 20, 20), (20, 100, 40)
_LINE = 15  # pixels
_FONT_SIZE = 12
_WRAP = 54


def wrong_decisions(scenes: Sequence[Scene], texts: Sequence[str], near: Sequence[bool], most: int = 6) -> list[int]:
    """Which scenes to show: replies whose action is not the expert's, of each situation in turn, near misses last."""
    found: dict[bool, dict[str, list[int]]] = {False: {}, True: {}}
    for n, (scene, text) in enumerate(zip(scenes, texts, strict=True)):
        if action_of(text) != action_of(scene.reply):
            found[near[n]].setdefault(scene.situation, []).append(n)
    return [n for some in found.values() for n in _in_turn(list(some.values()), most)][:most]


def failed_runs(runs: Sequence[tuple[str, Run]], most: int = 6) -> list[int]:
    """Which runs to draw: those that did not reach the goal, of each situation in turn."""
    by_situation: dict[str, list[int]] = {}
    for n, (situation, run) in enumerate(runs):
        if not run.reached:
            by_situation.setdefault(situation, []).append(n)
    return _in_turn(list(by_situation.values()), most)


def draw_decisions(scenes: Sequence[Scene], texts: Sequence[str], path: Path) -> None:
    """A sheet of pictures with what was asked, what the model answered, and what the expert does."""
    tiles = []
    for scene, text in zip(scenes, texts, strict=True):
        tile = Image.new("RGB", (_WIDTH, _HEIGHT + _TEXT), _PAPER)
        tile.paste(Image.fromarray(scene.picture), (0, 0))
        parts = [
            (f"{scene.situation}: “{scene.instruction}”", _INK),
            (text or "(nothing)", _WRONG),
            (scene.reply, _RIGHT),
        ]
        _write(tile, _HEIGHT + 4, parts)
        tiles.append(tile)
    _sheet(tiles, path)


def draw_runs(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """A sheet of maps with the paths of runs: yellow where it began, a ring round the goal."""
    tiles = []
    with offscreen() as shared:
        for situation, run in runs:
            tile = Image.new("RGB", (_MAP[0], _MAP[1] + _MAP_TEXT), _PAPER)
            simulator = Simulator(run.world, offscreen=shared)
            simulator.pose = (*run.path[-1], run.poses[-1][2])
            view = Image.fromarray(simulator.render_overview(run.path, *_MAP))
            _mark(view, run)
            tile.paste(view, (0, 0))
            parts = [
                (
                    f"{situation}, seed {run.world.seed}: “{run.world.instruction}”, {run.steps} steps, "
                    f"{how_it_ended(run)}",
                    _INK,
                ),
                (run.replies[-1] or "(nothing)", _WRONG),
            ]
            _write(tile, _MAP[1] + 3, parts, lines=4)
            tiles.append(tile)
    _sheet(tiles, path)


def how_it_ended(run: Run) -> str:
    """The end of a run in words."""
    words = {
        "stopped": "stopped at the goal" if run.reached else "stopped elsewhere",
        "searched": "turned all round and saw none",
        "unparsable": "said what does not parse",
        "budget": "never stopped",
    }[run.ended]
    return words + (", ran into something" if run.collided else "")


def _mark(view: Image.Image, run: Run) -> None:
    """Start and goal on a map seen from 9 m above the room's middle at 42 degrees of height."""
    pen = ImageDraw.Draw(view)
    scale = view.height / 2 / (9.0 * math.tan(math.radians(21.0)))

    def at(x: float, y: float) -> tuple[float, float]:
        return view.width / 2 + scale * x, view.height / 2 - scale * y

    x, y = at(*run.path[0])
    pen.ellipse((x - 4, y - 4, x + 4, y + 4), fill=(255, 220, 0), outline=_INK)
    if run.world.target_index is not None:
        thing = run.world.target
        x, y = at(thing.x, thing.y)
        reach = scale * (thing.radius + 0.12)
        pen.ellipse((x - reach, y - reach, x + reach, y + reach), outline=(255, 0, 255), width=2)


def _in_turn(lists: list[list[int]], most: int) -> list[int]:
    """The first of each list, then the second of each, at most ``most``."""
    longest = max(map(len, lists), default=0)
    chosen = [some[n] for n in range(longest) for some in lists if n < len(some)]
    return chosen[:most]


def _write(tile: Image.Image, top: int, parts: Sequence[tuple[str, tuple[int, int, int]]], lines: int = 12) -> None:
    pen, font = ImageDraw.Draw(tile), ImageFont.load_default(size=_FONT_SIZE)
    each = max(1, lines // len(parts))
    row = 0
    for text, ink in parts:
        for line in textwrap.wrap(text, _WRAP, max_lines=each, placeholder=" ..."):
            pen.text((4, top + row * _LINE), line, ink, font)
            row += 1


def _sheet(tiles: Sequence[Image.Image], path: Path) -> None:
    columns = min(_COLUMNS, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    width, height = tiles[0].size
    sheet = Image.new("RGB", (columns * (width + _GAP) - _GAP, rows * (height + _GAP) - _GAP), _PAPER)
    for n, tile in enumerate(tiles):
        sheet.paste(tile, ((n % columns) * (width + _GAP), (n // columns) * (height + _GAP)))
    sheet.quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
