# SPDX-License-Identifier: Apache-2.0
"""The shipped bags are decoded again: every reply, action and token as recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dsd_ros.cli.main import main
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run
from dsd_ros.paths import models_directory

BAGS = sorted(path for path in (Path(__file__).parents[1] / "bags").iterdir() if path.is_dir())


def test_the_shipped_bags_are_what_they_are_said_to_be():
    runs = {path.name: read_run(open_bag(path)) for path in BAGS}
    assert len(runs) == 3
    assert sum(p.stat().st_size for path in BAGS for p in path.iterdir()) < 4_000_000
    for run in runs.values():
        assert not run.bag.notes
        assert len(run.steps) >= 3 and all(step.stats["tokens"] for step in run.steps)
        assert run.steps[-1].action == run.steps[-1].executed == "stop"
        assert run.ends[-1][1].startswith("ARRIVED: ")
        assert run.parameters_of("draft_node") and run.versions["torch"]
    assert {(s.stats["mode"], s.stats["transport"]) for run in runs.values() for s in run.steps} == {
        ("stream", "dds"), ("stream", "websocket"), ("fsd", "websocket"),
    }  # fmt: skip
    faults = runs["faults"]  # the link broke in the middle of a reply
    assert any("LINK_LOST" in stop.causes for stop in faults.stops)
    assert max(step.stats["seconds"] for step in faults.steps) > 3.0


def test_the_shipped_bags_replay_as_recorded(tmp_path, capsys):
    assert main(["replay", *map(str, BAGS), "--json", str(tmp_path / "report.json")]) == 0
    told = capsys.readouterr()
    replies = sum(len(read_run(open_bag(path)).steps) for path in BAGS)
    assert f"{replies} replies replayed" in told.out and "all as recorded" in told.out and not told.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["same"] and {bag["mode"] for bag in report["bags"]} == {"stream", "fsd"}
    for bag in report["bags"]:
        assert bag["notes"] == []
        for step in bag["steps"]:  # of rounds, a bag names no tokens
            recorded = step["recorded"]["tokens"]
            assert step["replayed"]["tokens"] and recorded in (step["replayed"]["tokens"], None)
            assert (recorded is None) == (bag["mode"] == "fsd")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "coupled" else [pytest.mark.slow]) for mode in PRESETS]
)
def test_the_shipped_bags_replay_in_every_mode(capsys, mode):
    assert main(["replay", *map(str, BAGS), "--mode", mode]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/does/not/exist"], "There is no bag"),
        ([BAGS[0].parent], "is not a bag"),
        ([BAGS[0], "--draft-model", "/does/not/exist"], "there is no model directory"),
    ],
)
def test_what_cannot_be_replayed_is_refused(capsys, arguments, sentence):
    assert main(["replay", *map(str, arguments)]) == 2
    assert sentence in capsys.readouterr().err


def test_another_target_is_reported(capsys, tmp_path):
    bag = next(bag for bag in BAGS if bag.name == "straight")
    report = tmp_path / "report.json"
    assert main(["replay", str(bag), "--target-model", str(models_directory() / "draft"), "--json", str(report)]) == 1
    told = capsys.readouterr().out
    assert "not the one it was recorded with" in told and "+ replayed: " in told and "of them differ" in told
    found = json.loads(report.read_text())
    assert not found["same"] and any(step["changed"] for step in found["bags"][0]["steps"])


def test_the_readable_part_of_a_cut_bag_is_replayed(capsys, tmp_path):
    shutil.copytree(BAGS[-1], tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.mcap")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.6)])
    assert main(["replay", str(tmp_path / "cut")]) == 1  # the rest of the recording is missing
    told = capsys.readouterr()
    assert "was not closed" in told.err and "all as recorded, as far as" in told.out
