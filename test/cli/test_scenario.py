# SPDX-License-Identifier: Apache-2.0
"""`dsd demo --scenario my-chair`: robot and cloud find the chair together, and neither does alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsd_ros.cli.demo import SCENARIOS, DemoSettings
from dsd_ros.cli.demo_run import arguments_of
from dsd_ros.robot.sim.world import World
from dsd_ros.ros.bringup import plan

CHAIR = SCENARIOS["my-chair"]


def run(tmp_path, *arguments: str) -> tuple[int, dict, str]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsd_ros.cli", "demo", "--scenario", "my-chair", "--headless"]
    done = subprocess.run([*command, "--json", str(report), *arguments], capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    return done.returncode, json.loads(report.read_text()), output


def check_found(code: int, report: dict, output: str) -> None:
    assert code == 0, output
    assert report["reached"] and report["outcome"] == "ARRIVED"
    assert report["instruction"] == CHAIR.instruction and report["scenario"] == "my-chair"
    assert report["answer"].endswith(f"Go: {CHAIR.target}")
    assert report["resolved_instruction"] == CHAIR.target
    assert "memory: " in output and report["steps"]


def test_the_chair_that_its_owner_likes_is_found_over_dds(ros_domain, tmp_path):
    check_found(*run(tmp_path))


@pytest.mark.slow
def test_it_is_found_over_a_websocket(ros_domain, tmp_path):
    check_found(*run(tmp_path, "--transport", "websocket"))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["cloud_documents:=", "memory_documents:="])
def test_without_either_half_it_is_not_known(ros_domain, tmp_path, missing):
    code, report, output = run(tmp_path, missing)
    assert code == 1, output
    assert report["outcome"] == "NOT_KNOWN" and not report["reached"]
    assert report["steps"] == [] and report["resolved_instruction"] == ""


def test_its_room_has_the_chair_among_others():
    world = World.from_seed(CHAIR.seed, CHAIR.target)
    chairs = {thing.colour for thing in world.things if thing.kind == "chair"}
    assert "red" in chairs and len(chairs) >= 4
    assert "red" not in CHAIR.instruction


def test_the_plain_demo_starts_nothing_of_it():
    plain = {start.name: start.parameters for start in plan("demo")}
    assert "memory_node" not in plain
    assert not {"documents", "text_model"} & plain["verifier_node"].keys()  # its file has none
    command = next(start for start in plan("demo", {"transport": "websocket"}) if start.name == "verifier").command
    assert command[command.index("--documents") + 1] == "" == command[command.index("--text-model") + 1]
    wanted = plan("demo", {"memory": "auto", "cloud_documents": "shipped"})
    names = [start.name for start in wanted]
    assert names.index("memory_node") < names.index("verifier_node")
    given = {start.name: start.parameters for start in wanted}
    assert given["navigation_node"]["memory.when"] == "auto"
    assert given["verifier_node"]["documents"] == "shipped"
    memory = next(start for start in wanted if start.name == "memory_node")
    assert memory.layers[-1]["documents"] == "shipped"  # the demo's own default, over the node's file


def test_what_is_given_comes_before_the_scenario():
    settings = DemoSettings(scenario="my-chair", seed=3).with_scenario()
    assert settings.seed == 3 and settings.instruction == CHAIR.instruction
    given = arguments_of(settings, {"cloud_documents": ""})
    assert given.items() >= {**CHAIR.arguments, "cloud_documents": ""}.items()
    with pytest.raises(ValueError, match="choose from my-chair"):
        DemoSettings(scenario="my-horse").with_scenario()
