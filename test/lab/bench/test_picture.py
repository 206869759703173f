from __future__ import annotations

import numpy as np
import pytest

from dsd_lab.bench.picture import draw_run
from dsd_ros.robot.sim.world import World


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
