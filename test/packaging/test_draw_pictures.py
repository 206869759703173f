# SPDX-License-Identifier: Apache-2.0
"""tools/draw_pictures.py draws what was measured."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from browser import find_browser
from PIL import Image, ImageSequence

from dsd_lab.figures.runs import shipped

ROOT = Path(__file__).resolve().parents[2]
_FILE = ROOT / "tools" / "draw_pictures.py"
_SPEC = importlib.util.spec_from_file_location("draw_pictures", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)


def test_a_film_shows_replies_pass_by_pass_and_what_lies_between():
    slow = [2.0 + 0.02 * n for n in range(40)]  # a reply of many passes
    quick = [5.0, 5.1]
    times = tool.film_times([0.5, *slow, *quick], begin=1.0, end=7.0)
    assert times == sorted(times) and times[0] == slow[0] and times[-1] == 7.0 and 0.5 not in times
    of_slow = [at for at in times if 2.0 <= at <= slow[-1]]
    assert len(of_slow) == tool.REPLY_FRAMES and {slow[0], slow[-1], *quick} <= set(times)
    between = np.diff([at for at in times if slow[-1] <= at <= 5.0])
    assert len(between) > 5 and max(between) < 2 * tool.MOTION_S


@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")
def test_a_film_of_a_recorded_run_moves_and_names_its_models(tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "film_times", lambda replies, begin, end: [begin, replies[len(replies) // 2], end])
    tool.draw_film(ROOT / "test" / "bags" / "straight", tmp_path / "film.webp")
    with Image.open(tmp_path / "film.webp") as film:
        frames = [np.asarray(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(film)]
    assert len(frames) == 3 and all(np.abs(a - b).mean() > 0.5 for a, b in pairwise(frames))
    assert tool.models_of(tmp_path / "film.webp").keys() == {"target"}


def test_the_pictures_of_the_readme_are_of_the_models_that_ship():
    named = re.findall(r"!\[[^]]+\]\((docs/images/[\w.-]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    named += [f"docs/images/{name}{on}.png" for name in ("live-page", "report") for on in ("", "-phone")]
    named.append("docs/images/overlay.png")
    made = {name: tool.models_of(ROOT / name) for name in named}
    other = [name for name, models in made.items() if not models or not models.items() <= shipped().items()]
    assert not other, f"draw them again: python tools/draw_pictures.py ({', '.join(other)})"
    (film,) = (ROOT / name for name in named if name.endswith(".webp"))
    assert film.stat().st_size < 3e6


def test_a_picture_names_the_models_of_its_run(tmp_path):
    drawn = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    tool.save(drawn, tmp_path / "one.png")
    again = Image.open(tmp_path / "one.png")
    assert tool.models_of(tmp_path / "one.png") == shipped() and np.array_equal(np.asarray(again), np.asarray(drawn))
    tool.save(drawn, tmp_path / "two.png", {"target": "other"})
    assert tool.models_of(tmp_path / "two.png") == {"target": "other"}
