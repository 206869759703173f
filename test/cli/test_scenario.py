# SPDX-License-Identifier: Apache-2.0
"""`dsd demo --scenario owner`: robot and cloud find out together what is meant, and a robot that does not know asks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsd_ros.cli.demo import SCENARIOS, DemoSettings
from dsd_ros.cli.demo_run import arguments_of
from dsd_ros.paths import SMALL_READER, models_directory
from dsd_ros.robot.sim.world import World

CHAIR, BOX = SCENARIOS["owner"].errands
# Facts that the small reader can join, as the documents that ship have them among others for a larger one.
READABLE = {
    "memory_documents": {
        "liked.md": "The chair that its owner likes is called Viola. The parcels come on Thursday.\n\n"
        "# Balls\n\nThe ball that my daughter hid is the Moro.\n"
    },
    "cloud_documents": {
        "chairs.md": "The Bruno chair is blue. The Viola chair is red.\n\n"
        "# Hours\n\nThe doors open at seven in the morning. They close at nine in the evening.\n"
    },
}


@pytest.fixture
def readable(tmp_path) -> dict[str, str]:
    """The arguments that give both sides documents that the small reader can read."""
    given = {"text_model": str(models_directory() / SMALL_READER)}
    for name, files in READABLE.items():
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(f"# Chairs\n\n{text}")
        given[name] = str(folder)
    return given


def run(tmp_path, arguments: dict[str, str], *options: str) -> tuple[int, dict, str]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsd_ros.cli", "demo", "--scenario", "owner", "--headless"]
    given = [f"{name}:={value}" for name, value in arguments.items()]
    done = subprocess.run(
        [*command, "--json", str(report), *options, *given], capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    return done.returncode, json.loads(report.read_text()), output


def test_the_chair_that_its_owner_likes_is_found_over_dds(ros_domain, tmp_path, readable):
    code, report, output = run(tmp_path, readable)
    assert code == 0, output
    assert report["reached"] and report["outcome"] == "ARRIVED"
    assert report["instruction"] == CHAIR.instruction and report["scenario"] == "owner"
    assert report["answer"].endswith(f"Go: {CHAIR.target}")
    assert report["resolved_instruction"] == CHAIR.target and report["question"] == ""
    sources = report["sources"]
    assert " ".join(source["sentence"] for source in sources) == report["answer"]
    assert {(s["side"], s["document"]) for s in sources} <= {("robot", "liked.md"), ("cloud", "chairs.md")}
    assert next(s for s in sources if "is red" in s["sentence"])["document"] == "chairs.md"
    assert f"memory: {sources[0]['sentence']}  <- {sources[0]['document']}" in output and report["steps"]


@pytest.mark.slow
def test_without_either_half_the_robot_stays_and_asks(ros_domain, tmp_path, readable):
    code, report, output = run(tmp_path, readable | {"cloud_documents": ""})
    assert code == 1, output
    assert report["outcome"] == "NOT_KNOWN" and not report["reached"]
    assert report["steps"] == [] and report["resolved_instruction"] == ""
    asked = "I do not know which chair you like. Say it by its colour, or add a document that tells it."
    assert report["question"] == asked and f"the robot asks: {asked}" in output
    assert len({tuple(pose) for pose in report["path"]}) <= 1  # it has not moved


@pytest.mark.parametrize("errand", [CHAIR, BOX])
def test_in_its_room_the_answer_decides_which_of_two_is_meant(errand):
    world = World.from_seed(errand.seed, errand.target)
    alike = {thing.colour for thing in world.things if thing.kind == world.target.kind}
    assert len(alike) == 2 and world.target.colour in alike
    assert not any(colour in errand.instruction for colour in alike)


def test_an_instruction_chooses_its_errand_and_what_is_given_comes_first():
    settings = DemoSettings(scenario="owner", seed=3).with_scenario()
    assert settings.seed == 3 and settings.instruction == CHAIR.instruction and settings.goal == CHAIR.target
    given = arguments_of(settings, {"cloud_documents": ""})
    assert given.items() >= {**SCENARIOS["owner"].arguments, "cloud_documents": ""}.items()
    box = DemoSettings(scenario="owner", instruction="Go where my guest's box is.").with_scenario()
    assert box.seed == BOX.seed and box.goal == BOX.target
    other = DemoSettings(scenario="owner", instruction="bring me to the ball I lost").with_scenario()
    assert other.instruction == "bring me to the ball I lost" and other.goal == CHAIR.target
    with pytest.raises(ValueError, match="choose from owner"):
        DemoSettings(scenario="my-horse").with_scenario()
