# SPDX-License-Identifier: Apache-2.0
"""tools/draw_pictures.py draws what was measured."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsd_lab.figures.runs import shipped
from dsd_ros.robot.sim.world import World

ROOT = Path(__file__).resolve().parents[2]
_FILE = ROOT / "tools" / "draw_pictures.py"
_SPEC = importlib.util.spec_from_file_location("draw_pictures", _FILE)
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tool)
draw_run = tool.draw_run


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
    with pytest.raises(ValueError, match="no steps"):
        draw_run(report | {"steps": []})


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
