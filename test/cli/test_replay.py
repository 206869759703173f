# SPDX-License-Identifier: Apache-2.0
"""The shipped bags are replayed through the real nodes: every reply, action and token as recorded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsd_ros.cli.main import main
from dsd_ros.decoding.modes import PRESETS
from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.run import read_run
from dsd_ros.paths import models_directory

BAGS = sorted(path for path in (Path(__file__).parents[1] / "bags").iterdir() if path.is_dir())


def replay(*arguments, report: Path | None = None) -> tuple[int, str, dict]:
    """`dsd replay`: exit code, what it printed, and its JSON."""
    command = [sys.executable, "-m", "dsd_ros.cli", "replay", *map(str, arguments)]
    if report is not None:
        command += ["--json", str(report)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    output = result.stdout + result.stderr
    assert "Traceback" not in output, output
    return result.returncode, output, json.loads(report.read_text()) if report else {}


def test_the_shipped_bags_are_what_they_are_said_to_be():
    runs = {path.name: read_run(open_bag(path)) for path in BAGS}
    assert len(runs) == 3
    assert sum(p.stat().st_size for path in BAGS for p in path.iterdir()) < 4_000_000
    for run in runs.values():
        assert not run.bag.notes
        assert len(run.steps) >= 3 and all(step.tokens for step in run.steps)
        assert run.steps[-1].action == run.steps[-1].executed == "stop"
        assert run.ends[-1][1].startswith("ARRIVED: ")
        assert run.parameters_of("draft_node") and run.versions["torch"]
    assert {(s.stats["mode"], s.stats["transport"]) for run in runs.values() for s in run.steps} == {
        ("stream", "dds"), ("stream", "websocket"), ("fsd", "websocket"),
    }  # fmt: skip
    faults = runs["faults"]  # the link broke in the middle of a reply
    assert any("LINK_LOST" in stop.causes for stop in faults.stops)
    assert max(step.stats["seconds"] for step in faults.steps) > 3.0


def test_the_shipped_bags_replay_in_another_mode(ros_domain, tmp_path):
    # One mode for all, so that they share the nodes: over DDS what came over websockets, and without faults.
    code, output, report = replay(*BAGS, "--mode", "coupled", "--transport", "dds", report=tmp_path / "report.json")
    assert code == 0, output
    replies = sum(len(read_run(open_bag(path)).steps) for path in BAGS)
    assert f"{replies} replies replayed" in output and "all as recorded" in output
    for bag in report["bags"]:
        assert bag["notes"] == []
        for step in bag["steps"]:
            assert step["recorded"]["tokens"] == step["replayed"]["tokens"] != []
            assert step["recorded"]["stamp"] == step["replayed"]["stamp"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/does/not/exist"], "There is no bag"),
        ([BAGS[0], "--rate", "-1"], "--rate must not be negative"),
        ([BAGS[0].parent], "is not a bag"),
    ],
)
def test_what_cannot_be_replayed_is_refused(capsys, arguments, sentence):
    assert main(["replay", *map(str, arguments)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_bags_replay_as_they_were_recorded(ros_domain, tmp_path):
    code, output, _ = replay(*BAGS, "--rate", "4")
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["dds", "websocket"])
@pytest.mark.parametrize("mode", PRESETS)
def test_the_shipped_bags_replay_in_every_mode(ros_domain, tmp_path, mode, transport):
    code, output, _ = replay(*BAGS, "--mode", mode, "--transport", transport)
    assert code == 0, output


@pytest.mark.slow
def test_another_target_is_reported(ros_domain, tmp_path):
    recorded = next(bag for bag in BAGS if bag.name == "straight")  # over DDS: it knows its target
    code, output, report = replay(
        recorded, "--target-model", models_directory() / "draft", report=tmp_path / "report.json"
    )
    assert code == 1, output
    assert "not the one it was recorded with" in output and "+ replayed, picture of" in output
    assert not report["same"] and any(step["changed"] for step in report["bags"][0]["steps"])


@pytest.mark.slow
def test_the_readable_part_of_a_cut_bag_is_replayed(ros_domain, tmp_path):
    shutil.copytree(BAGS[-1], tmp_path / "cut")
    (file,) = (tmp_path / "cut").glob("*.mcap")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * 0.6)])
    code, output, _ = replay(tmp_path / "cut")
    assert code == 1, output  # the rest of the recording is missing
    assert "was not closed" in output and "all as recorded, as far as" in output


@pytest.mark.slow
def test_nodes_that_fail_are_an_error_of_its_own(ros_domain, tmp_path):
    code, output, _ = replay(BAGS[0], "--draft-model", tmp_path / "nothing")
    assert code == 3 and "there is no model directory" in output
