# SPDX-License-Identifier: Apache-2.0
"""Near misses, acceptance and bars: how figures are counted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from dsd_lab.pair.figures import acceptance_figures, accepted, answer_figures, bars, kept, near_miss, near_misses
from dsd_lab.pair.report import render
from dsd_lab.pair.scenes import Scene
from dsd_lab.worlds.expert import reply
from dsd_lab.worlds.guide import View
from dsd_ros.robot.sim.world import RADIUS, ROBOT_RADIUS, Thing, World

ROOT = Path(__file__).resolve().parents[3]
GOAL = "red chair"


def view_of(bearing: float, gap: float, pixels: int = 900, seed: int = 0) -> View:
    """A red chair alone in a large room, at a bearing in degrees and a gap in metres."""
    away = gap + RADIUS["chair"] + ROBOT_RADIUS
    angle = math.radians(bearing)
    chair = Thing("chair", "red", away * math.cos(angle), away * math.sin(angle), 0.0)
    world = World(seed, 9.0, 9.0, (chair,), (), 0, (0.0, 0.0, 0.0), "find the red chair")
    return View.showing(world, (0.0, 0.0, 0.0), {0: pixels})


def scene_of(situation: str, view: View) -> Scene:
    picture = np.zeros((224, 336, 3), np.uint8)
    return Scene(situation, picture, view, GOAL, "", reply(view, GOAL), True)


def test_what_the_expert_does_a_little_farther_on_is_a_near_miss() -> None:
    for view, action in [
        (view_of(0.0, 0.41), "stop"),
        (view_of(0.0, 0.39), "forward 25 cm"),
        (view_of(9.5, 1.9), "turn left 15 degrees"),
        (view_of(-10.5, 1.9), "forward 75 cm"),
        (view_of(0.0, 1.9, 62), "turn left 45 degrees"),  # as where it is out of view
    ]:
        assert f"Action: {action}" not in reply(view, GOAL)
        assert near_miss(view, GOAL, action)
    for view, action in [
        (view_of(0.0, 0.6), "stop"),
        (view_of(0.0, 0.2), "forward 25 cm"),
        (view_of(9.5, 1.9), "turn right 15 degrees"),
        (view_of(9.5, 1.9), "turn left 30 degrees"),
        (view_of(0.0, 0.41), ""),
    ]:
        assert not near_miss(view, GOAL, action)


def test_misjudging_the_expert_keeps_its_action_the_more_the_farther_the_edge_is() -> None:
    shares = [kept(view_of(0.0, gap), GOAL) for gap in (0.402, 0.42, 0.45, 0.55)]
    assert 0.4 < shares[0] < 0.7 and shares == sorted(shares) and shares[-1] == 1.0


def test_figures_count_near_misses_beside_what_is_right() -> None:
    edge, far = view_of(0.0, 0.41), view_of(0.0, 1.9)
    scenes = [scene_of("plain", edge), scene_of("plain", far), scene_of("search", far), scene_of("search", far)]
    stop = "The red chair is straight ahead, 0.4 m away; and I have arrived. Action: stop"
    texts = [stop, stop, scenes[2].reply, "nothing that parses"]
    near = near_misses(scenes, texts)
    assert near == [True, False, False, False]
    found = answer_figures(scenes, texts, near)
    assert found["actions_right"]["value"] == 0.25 and found["actions_right"]["of"] == 4
    assert found["actions_right_or_near"]["value"] == 0.5


def test_acceptance_counts_rounds_of_greedy_speculation() -> None:
    # Two agreed and one not, the target's own token, then two agreed to the end.
    assert accepted([[1, 2, 9, 4, 5]], [[1, 2, 3, 4, 5]], gamma=3) == [(4, 5, 5, 2)]
    assert accepted([[9, 9]], [[1, 2]], gamma=4) == [(0, 3, 2, 2)]
    figures = acceptance_figures([(4, 5, 5, 2), (0, 3, 2, 2)])
    assert figures["acceptance"]["value"] == 0.5 and figures["tokens_per_round"]["value"] == 7 / 4
    assert acceptance_figures([])["acceptance"]["value"] is None


def test_bars_are_met_and_missed_by_what_was_measured() -> None:
    def model(share: float) -> dict:
        ms = {name: {"cpu_ms": 3.0} for name in ("step", "verify", "prefill")}
        value = {"value": share, "low": 0.0, "high": 1.0}
        names = ("actions_right", "closed_loop", "collided", "path_ratio")
        return {"all": dict.fromkeys(names, value), "ms": ms, "weights_mb": 40.0}

    figures = {"target": model(0.99), "draft": model(0.86), "acceptance": {"value": 0.95}}
    met = {row["name"]: row["met"] for row in bars(figures)}
    assert met["target: actions right"] and met["draft: step"]
    assert met["target: runs with a collision"] is False
    assert met["draft: runs that reach the goal"] is False  # a draft this good leaves no work
    assert met["draft: acceptance, greedy"] is False and met["weights together"] is False
    assert met["exit at half depth agrees with the last layer"] is None


def test_an_interval_that_holds_the_bar_says_nothing() -> None:
    figures = json.loads((ROOT / "benchmarks" / "pair.json").read_text())
    said = dict.fromkeys(["missed", "met", "too few runs to say"], "")
    rows = {"missed": (0.90, 0.97), "met": (0.985, 0.999), "too few runs to say": (0.95, 0.99)}
    for verdict, (low, high) in rows.items():
        figures["bars"] = [
            {"name": "target", "at_least": 0.98, "at_most": None, "below": None, "unit": "", "value": high,
             "low": low, "high": high, "met": high >= 0.98},
        ]  # fmt: skip
        text = render(figures)
        said[verdict] = next(line for line in text.splitlines() if line.startswith("target  "))
        assert "nearly always agrees shows nothing of rejected tokens" in text
    assert all(line.rstrip().endswith(verdict) for verdict, line in said.items()), said
