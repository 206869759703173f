# SPDX-License-Identifier: Apache-2.0
"""The examples without ROS, run as a user runs them. examples/navigate.py: test/nodes/test_navigate_example.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import VerifierSettings
from dsd_ros.navigation.run.actions import all_actions, format_action, parse_reply, read_grammar
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.prompts import CHAT_TEMPLATE, DEFAULT_PROMPT, PromptTemplate

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_a_picture_is_decoded_through_a_verifier(tmp_path):
    with Simulator(World.from_seed(0)) as simulator:
        Image.fromarray(simulator.render()).save(tmp_path / "view.png")
    target = load_model(ModelSettings(str(ROOT / "models" / "target"), threads=1))
    with VerifierEngine(target) as engine, VerifierServer(engine, VerifierSettings(port=0)) as server:
        found = run("decode_picture.py", server.url, str(tmp_path / "view.png"), "find the black can")
    assert found.returncode == 0, found.stderr
    reply, figures, action = found.stdout.strip().splitlines()
    assert "Action: " in reply and " tokens in " in figures and action.startswith("the robot would do: ")
    nobody = run("decode_picture.py", server.url, str(tmp_path / "view.png"), "find the black can")
    assert nobody.returncode == 3 and nobody.stderr and "Traceback" not in nobody.stderr


def test_many_robots_share_a_verifier():
    found = run("many_robots.py", "3")
    assert found.returncode == 0, found.stderr
    *robots, total = found.stdout.strip().splitlines()
    assert [line.split(",")[0] for line in robots] == ["robot 0", "robot 1", "robot 2"]
    assert all("Action: " in line for line in robots) and total.startswith("3 replies in ")


def test_own_models_are_read_by_an_own_grammar(tmp_path):
    assert len((ROOT / "examples" / "own_model.py").read_text().splitlines()) < 80
    with Simulator(World.from_seed(0)) as simulator:
        Image.fromarray(simulator.render()).save(tmp_path / "view.png")
    mine = tmp_path / "mine.yaml"
    preset = json.dumps(dict(read_grammar("dsd").data))  # which is YAML, too
    mine.write_text(preset.replace('"forward {} cm"', '"onward {} cm", "forward {} cm"'))  # the first is written
    models = [str(ROOT / "models" / name) for name in ("draft", "target")]
    asked = [str(tmp_path / "view.png"), "find the black can"]
    found = run("own_model.py", *models, str(mine), *asked)
    assert found.returncode == 0, found.stderr
    reply, _, action = found.stdout.strip().splitlines()
    meant = reply.partition("Action: ")[2].replace("forward", "onward")
    assert meant and action.startswith(f"the robot would do: {meant}, ")
    other = run("own_model.py", *models, "navila", *asked)
    assert other.returncode == 3 and "the reply has no action" in other.stdout
    none = run("own_model.py", *models, "navilla", *asked)
    assert none.returncode == 1 and none.stderr.startswith("There is no grammar 'navilla'")


@pytest.mark.parametrize("name", ["dsd", "navila"])
def test_a_prompt_preset_asks_for_its_grammar(name, tmp_path):
    folder = ROOT / "config" / "prompts"
    (tmp_path / "dsd.json").write_bytes((folder / f"{name}.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    template = PromptTemplate.from_directory(tmp_path)
    grammar = read_grammar(name)
    assert all(format_action(action) in template.prompt for action in all_actions(grammar))
    assert parse_reply(template.prompt.partition("Example: ")[2], grammar).action
    assert "find the black can" in template.render("find the black can", 4, [(4, "stop")])
    assert name != "dsd" or template.prompt == DEFAULT_PROMPT  # what a model without dsd.json is asked


@pytest.mark.parametrize(
    ("name", "words"), [("decode_picture.py", ["ws://x"]), ("many_robots.py", ["17"]), ("own_model.py", ["navila"])]
)
def test_wrong_words_give_the_usage(name, words):
    found = run(name, *words)
    assert found.returncode == 2 and found.stderr.startswith(f"usage: {name}")
