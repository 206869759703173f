# SPDX-License-Identifier: Apache-2.0
"""The examples without ROS, run as a user runs them. examples/navigate.py: test/nodes/test_navigate_example.py."""

from __future__ import annotations

import json
import runpy
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


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example: exit code, what it printed, what it complained."""

    def example(name: str, *words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        code: object = 0
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        told = capsys.readouterr()
        return (code, *told) if isinstance(code, int) else (1, told.out, f"{told.err}{code}")

    return example


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    path = tmp_path_factory.mktemp("view") / "view.png"
    with Simulator(World.from_seed(0)) as simulator:
        Image.fromarray(simulator.render()).save(path)
    return str(path)


def test_a_picture_is_decoded_through_a_verifier(run, view):
    target = load_model(ModelSettings(str(ROOT / "models" / "target"), threads=1))
    with VerifierEngine(target) as engine, VerifierServer(engine, VerifierSettings(port=0)) as server:
        code, out, err = run("decode_picture.py", server.url, view, "find the black can")
    assert code == 0, err
    reply, figures, action = out.strip().splitlines()
    assert "Action: " in reply and " tokens in " in figures and action.startswith("the robot would do: ")
    code, _, err = run("decode_picture.py", server.url, view, "find the black can")
    assert code == 3 and err and "Traceback" not in err


def test_many_robots_share_a_verifier(run):
    code, out, err = run("many_robots.py", "3")
    assert code == 0, err
    *robots, total = out.strip().splitlines()
    assert [line.split(",")[0] for line in robots] == ["robot 0", "robot 1", "robot 2"]
    assert all("Action: " in line for line in robots) and total.startswith("3 replies in ")


def test_own_models_are_read_by_an_own_grammar(run, tmp_path, view):
    mine = tmp_path / "mine.yaml"
    preset = json.dumps(dict(read_grammar("dsd").data))  # which is YAML, too
    mine.write_text(preset.replace('"forward {} cm"', '"onward {} cm", "forward {} cm"'))  # the first is written
    models = [str(ROOT / "models" / name) for name in ("draft", "target")]
    code, out, err = run("own_model.py", *models, str(mine), view, "find the black can")
    assert code == 0, err
    reply, _, action = out.strip().splitlines()
    meant = reply.partition("Action: ")[2].replace("forward", "onward")
    assert meant and action.startswith(f"the robot would do: {meant}, ")
    code, out, _ = run("own_model.py", *models, "navila", view, "find the black can")
    assert code == 3 and "the reply has no action" in out
    code, _, err = run("own_model.py", *models, "navilla", view, "find the black can")
    assert code == 1 and err.startswith("There is no grammar 'navilla'")


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


def test_wrong_words_give_the_usage(run):
    for name, words in (("decode_picture.py", ["ws://x"]), ("many_robots.py", ["17"]), ("own_model.py", ["navila"])):
        code, _, err = run(name, *words)
        assert code == 2 and err.startswith(f"usage: {name}")
