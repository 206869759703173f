# SPDX-License-Identifier: Apache-2.0
"""Evaluations: of untrained pairs and of any Qwen2-VL."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model

from dsd_lab.cli import main
from dsd_lab.pair import evaluate
from dsd_lab.pair.evaluate import evaluate_pair
from dsd_lab.pair.report import render, write_card, write_page
from dsd_lab.pair.scenes import DEMO, rooms_of, scenes_of
from dsd_lab.pair.settings import PairSettings
from dsd_lab.train.model import SIZES, build_model, write_model
from dsd_lab.train.runs import Run
from dsd_lab.train.tokenizer import train_tokenizer
from dsd_lab.worlds.phrases import all_instructions

ROOT = Path(__file__).parents[3]
WORDS = ROOT / "test" / "lab" / "worlds" / "others_words.json"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_pair_is_measured_and_its_card_is_written(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(all_instructions()[::20])
    for name, seed in (("target", 1), ("draft", 2)):
        write_model(build_model(SIZES["small"][1], seed), tokenizer, tmp_path / name)
    pair = {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")}
    figures = evaluate_pair(PairSettings(f"plain,{DEMO}", 2, 1, **pair), repeats=1)
    # Untrained models say nothing that parses: no action, no success, and no crash.
    for name in pair:
        assert figures[name]["all"]["actions_right"]["value"] == 0.0
        assert figures[name]["all"]["actions_right"]["of"] == 2  # the demo's rooms do not count
        assert figures[name]["situations"]["plain"]["closed_loop"]["value"] == 0.0
        assert figures[name]["situations"][DEMO]["missed_seeds"] == [100]
    assert figures["acceptance"]["value"] is None  # no reply came to its end
    assert figures["exits"] is None
    exits = "<!-- dsd-lab train exits: begin -->\nfive\n<!-- dsd-lab train exits: end -->\n"
    (tmp_path / "target" / "README.md").write_text(f"# old\n\n{exits}")
    training = {
        "vision": {"steps": 7, "minutes": 0.5}, "dagger": [{"steps": 3, "minutes": 0.2}],
        "start": {"target": "0123abcd"},
    }  # fmt: skip
    write_card(tmp_path / "target", "target", figures, training)
    text = (tmp_path / "target" / "README.md").read_text()
    assert "| actions right (exactly the expert's) | 0.0 % [0.0, 65.8] |" in text and exits in text
    assert "| dagger, round 0 | 3 | 0.2 |" in text and "(target 0123abcd)" in text


def test_any_qwen2_vl_is_measured_and_a_page_has_its_figures(tmp_path: Path) -> None:
    target = str(make_tiny_model(tmp_path / "big", seed=3, vocab_rows=272))
    draft = str(make_tiny_model(tmp_path / "small", seed=3, layers=1))
    settings = PairSettings("two,absent", 1, 1, words=str(WORDS), target=target, draft=draft)
    figures = json.loads(json.dumps(evaluate_pair(settings, repeats=1), allow_nan=False))
    assert figures["target"]["name"] == "big"
    assert list(figures["target"]["situations"]) == ["two", "absent"]
    row = figures["target"]["situations"]["two"]
    assert set(row["truth"]) == {"object", "colour", "side", "distance", "other", "all"}
    assert row["ended"] == {"unparsable": 1} and row["path_ratio"]["value"] is None
    assert sum(sum(said.values()) for said in row["confusion"].values()) == 1
    for model in ("target", "draft"):
        assert figures[model]["ms"]["verify"]["cpu_ms"] > 0.0
    (tmp_path / "pair.md").write_text("old\n\n<!-- written by hand -->\n\n## What it gets wrong\n")
    page = write_page(tmp_path, figures, "dsd-lab evaluate pair").read_text()
    assert "| target: actions right | ≥ 98.0 % | 0.0 % [0.0 %, 65.8 %] | missed |" in page
    assert "others_words.json" in page and "| all | 0.0 % [0.0, 65.8] | 0.0 % [0.0, 65.8] |" in page
    assert page.endswith("## What it gets wrong\n") and "old" not in page
    assert "target: actions right" in render(figures) and "| ---" not in render(figures)


@pytest.mark.slow
def test_a_model_alone_and_a_pair_of_two_tokenizers_are_measured_without_acceptance(tmp_path: Path) -> None:
    target = str(make_tiny_model(tmp_path / "big", seed=3))
    alone = evaluate_pair(PairSettings("plain", 1, 1, target=target), alone=True, repeats=1)
    assert alone["draft"] is None and alone["acceptance"] is None
    unknown = {row["name"] for row in alone["bars"] if row["met"] is None}
    assert {"draft: step", "exit at half depth agrees with the last layer"} <= unknown
    assert "draft: acceptance, greedy" not in {row["name"] for row in alone["bars"]}
    other = str(make_tiny_model(tmp_path / "other", other_tokenizer=True))
    both = evaluate_pair(PairSettings("plain", 1, 1, target=target, draft=other), repeats=1)
    assert both["draft"] is not None and both["acceptance"] is None


@pytest.mark.parametrize("situation", ["plain", "two"])
def test_scenes_are_of_their_situation_and_the_same_again(situation: str) -> None:
    scenes = list(scenes_of(situation, 6))
    assert len(scenes) == 6 and {scene.situation for scene in scenes} == {situation}
    assert all(scene.picture.shape == (224, 336, 3) for scene in scenes)
    assert scenes[0].view.world.situation == situation
    again = next(scenes_of(situation, 1))
    assert np.array_equal(again.picture, scenes[0].picture)
    assert (again.instruction, again.reply) == (scenes[0].instruction, scenes[0].reply)
    (room,) = rooms_of(situation, 1)
    assert room.seed != scenes[0].view.world.seed
    assert Run(room, [(0.0, 0.0), (3.0, 4.0), (3.0, 5.0)]).length == 6.0


def test_bad_input_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in [
        ("--situations plain,moon", "there is no situation 'moon'; name plain, search"),
        ("--split all", "there is no split 'all'; name training, validation, test"),
        ("--scenes 0", "scenes must be at least 1, but it is 0."),
        ("--words /nowhere.json", "The words cannot be read"),
        ("--target /nowhere", "there is no model directory /nowhere"),
        ("--draft /nowhere --no-draft", "--draft names a model and --no-draft wants none"),
        ("--page /nowhere", "there is no folder /nowhere for the page"),
        ("--device tpu", "unknown device 'tpu'"),
    ]:
        assert main.main(["evaluate", "pair", *words.split()]) == 2
        told = capsys.readouterr().err
        assert sentence in told and told.count("\n") == 1


def test_the_command_fails_on_what_is_missed_only_when_strict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = json.loads((ROOT / "benchmarks" / "pair.json").read_text())
    monkeypatch.setattr(evaluate, "evaluate_pair", lambda *given: figures)
    assert main.main(["evaluate", "pair"]) == 0
    out = capsys.readouterr().out
    assert "missed" in out and "runs that reach the goal" in out
    assert main.main(["evaluate", "pair", "--json", "--strict"]) == 1
    assert json.loads(capsys.readouterr().out)["bars"] == figures["bars"]
