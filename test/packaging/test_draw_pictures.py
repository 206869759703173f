# SPDX-License-Identifier: Apache-2.0
"""tools/draw_pictures.py draws what was measured, with one scale for the lanes of all replies."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsd_lab.figures.runs import shipped
from dsd_ros.edge.results import DecodedReply, RoundRecord
from dsd_ros.observe.view.overlay import AHEAD, OWN
from dsd_ros.observe.view.timeline import HIT, VERIFY, spans_of
from dsd_ros.robot.sim.world import World

ROOT = Path(__file__).resolve().parents[2]
_FILE = ROOT / "tools" / "draw_pictures.py"
_SPEC = importlib.util.spec_from_file_location("draw_pictures", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)
WIDTH, draw_rounds, draw_run, reply_of = tool.WIDTH, tool.draw_rounds, tool.draw_run, tool.reply_of
EXITS = {"exits": 1, "exit_layers": (2,), "exit_seconds": (0.5,), "first_exit": 2}


def decoded(rounds: int) -> DecodedReply:
    records = [
        RoundRecord(
            drafted=4, accepted=3, draft_seconds=0.0 if n else 0.2, wait_seconds=1.0, verify_seconds=0.6,
            bytes_up=40, bytes_down=20, model_seconds=0.2, source="exit" if n else "", ready=bool(n),
            began_seconds=1.2 * n, gained=(1, 2, 3, 9), rejected=(4,), **EXITS,
        )
        for n in range(rounds)
    ]  # fmt: skip
    return DecodedReply([1, 2, 3, 9] * rounds, "a b c d", "fsd", True, 2.4, 0.0, 80, 40, records)


def test_seconds_of_a_slower_clock_are_divided_by_it() -> None:
    plain, slow = reply_of(decoded(2), str), reply_of(decoded(2), str, time_scale=2.0)
    assert len(plain.rounds) == len(slow.rounds) == 2 and plain.rounds[0].gained == ("1", "2", "3", "9")
    assert [span.what for span in spans_of(plain)].count(HIT) == 1
    for one, other in zip(spans_of(plain), spans_of(slow), strict=True):
        assert (one.start, one.end) == pytest.approx((2 * other.start, 2 * other.end))
    assert plain.rounds[0].exits == ((2, 0.5),) and slow.rounds[0].exits == ((2, 0.25),)


def spread(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    """How far right a colour goes in the lanes, pixels."""
    return int(np.nonzero((picture == np.array(colour)).all(axis=-1).any(axis=0))[0].max())


def test_a_reply_of_half_the_time_takes_half_the_width() -> None:
    long, short = reply_of(decoded(4), str), reply_of(decoded(2), str)
    picture = draw_rounds([("long", long), ("short", short)])
    assert picture.dtype == np.uint8 and picture.shape[1] == WIDTH
    half = picture.shape[0] // 2
    ends = [max(span.end for span in spans_of(reply) if span.what == VERIFY) for reply in (long, short)]
    left = 62
    far, near = spread(picture[:half], OWN) - left, spread(picture[half:], OWN) - left
    assert near / far == pytest.approx(ends[1] / ends[0], abs=0.02)
    assert (picture == np.array(AHEAD)).all(axis=-1).sum() > 50


def test_a_run_is_drawn_with_its_views_and_its_path():
    world = World.from_seed(0, "find the silver bottle")
    x, y, yaw = world.start
    step = {"reasoning": "The way is clear.", "action": "forward 50 cm", "tokens": 9, "rounds": 3}
    report = {
        "seed": 0,
        "instruction": "find the silver bottle",
        "steps": [step | {"pose": [x, y, yaw]}, step | {"pose": [x, y, yaw + 1.0]}],
        "path": [[x, y, yaw], [x + 0.4, y, yaw], [x + 0.4, y + 0.4, yaw]],
    }
    walked = np.asarray(draw_run(report)).astype(int)
    standing = np.asarray(draw_run(report | {"path": report["path"][-1:]})).astype(int)
    assert walked.shape == standing.shape
    assert walked.std() > 20  # something is drawn
    difference = np.abs(walked - standing).max(axis=-1) > 60
    redder = walked[difference][:, 0] - walked[difference][:, 1]
    assert (redder > 60).sum() > 30  # the path, in red


def test_a_run_without_steps_cannot_be_drawn():
    with pytest.raises(ValueError, match="no steps"):
        draw_run({"seed": 0, "instruction": "find the silver bottle", "steps": [], "path": []})


def test_the_pictures_of_the_readme_are_of_the_models_that_ship():
    named = re.findall(r"!\[[^]]+\]\((docs/images/[\w.-]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(named) >= 3
    made = {name: json.loads(getattr(Image.open(ROOT / name), "text", {}).get(tool.STAMP, "{}")) for name in named}
    other = [name for name, models in made.items() if not models or not models.items() <= shipped().items()]
    assert not other, f"draw them again: python tools/draw_pictures.py ({', '.join(other)})"


def test_a_picture_names_the_models_of_its_run(tmp_path):
    drawn = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    tool.save(drawn, tmp_path / "one.png")
    again = Image.open(tmp_path / "one.png")
    assert json.loads(again.text[tool.STAMP]) == shipped() and np.array_equal(np.asarray(again), np.asarray(drawn))
    tool.save(drawn, tmp_path / "two.png", {"target": "other"})
    assert json.loads(Image.open(tmp_path / "two.png").text[tool.STAMP]) == {"target": "other"}
