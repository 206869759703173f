# SPDX-License-Identifier: Apache-2.0
"""Training of early exits: what they learn from, which weights change, resuming, files and reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_lab.train.exits import examples as made
from dsd_lab.train.exits.examples import Example, HiddenStates, self_written_examples
from dsd_lab.train.exits.training import (
    exit_losses,
    exit_stage,
    fit,
    match_scale,
    measure,
    parse_layers,
    table,
    train_exits,
    write_card,
)
from dsd_lab.train.settings import ExitSettings
from dsd_lab.train.stages import descend, optimizer_of
from dsd_ros.vlm.exits import EXITS_FILE, ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.model import VisionLanguageModel

LAYERS = 4


class Killed(Exception):
    pass


def quiet(line: str, share: float) -> None:
    pass


@pytest.fixture(scope="module")
def vlm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny_model(tmp_path_factory.mktemp("m") / "tiny", seed=5, layers=LAYERS, vocab_rows=272)
    (directory / "README.md").write_text("# tiny\n\nA card.\n")
    return directory


@pytest.fixture(scope="module")
def text_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_text(tmp_path_factory.mktemp("m") / "text", seed=3)


def frozen(directory: Path) -> VisionLanguageModel:
    model = load_model(ModelSettings(str(directory)))
    model.hf.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def vlm(vlm_directory: Path) -> VisionLanguageModel:
    return frozen(vlm_directory)


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Replies about pictures of several sizes."""
    rng = np.random.default_rng(0)
    found = []
    for n in range(12):
        shape = (int(rng.integers(50, 170)), int(rng.integers(50, 170)), 3)
        picture = rng.integers(0, 256, shape, dtype=np.uint8)
        found.append(Example(picture, f"How far is thing {n}?", rng.integers(40, 120, 4 + n).tolist()))
    return found


def settings(tmp_path: Path, **options: Any) -> ExitSettings:
    options = {"cache": tmp_path / "cache", "threads": 1, "steps": 12, "batch": 4} | options
    return ExitSettings(**options)


def test_hidden_states_stand_before_each_token_of_a_reply(text_directory: Path) -> None:
    model, reply = frozen(text_directory), [70, 71, 72, 73]
    hidden = HiddenStates(model, [Example(None, "count", reply)], [1]).of(0)
    prompt = model.prompt_tokens("count", 0)
    with torch.no_grad():
        out = model.hf(torch.tensor([prompt + reply[:-1]]), output_hidden_states=True)
    torch.testing.assert_close(hidden[0], out.hidden_states[1][0, -len(reply) :], atol=1e-4, rtol=1e-4)
    known = model.tokenizer.get_vocab_size(with_added_tokens=True)  # the rest is padding
    logits = out.logits[0, -len(reply) :, :known]
    torch.testing.assert_close(model.head(hidden[1])[:, :known], logits, atol=1e-4, rtol=1e-4)


def test_an_exits_loss_reaches_its_own_adapter_alone(vlm: VisionLanguageModel, examples: list[Example]) -> None:
    exits = ExitAdapters.untrained(vlm, rank=8)
    hidden = HiddenStates(vlm, examples, exits.layers).of(0)
    with torch.no_grad():  # an adapter at its start passes no gradient on to its first matrix
        for layer in exits.layers:
            exits.adapter(layer).up.normal_(0, 0.02)
    for layer, (loss, _) in zip(exits.layers, exit_losses(vlm, exits, hidden), strict=True):
        exits.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for other in exits.layers:
            for parameter in exits.adapter(other).parameters():
                moved = parameter.grad is not None and bool(parameter.grad.any())
                assert moved == (other == layer)
    assert all(p.grad is None and not p.requires_grad for p in vlm.hf.parameters())


def test_an_exit_learns_the_same_whichever_others_learn_along(
    vlm: VisionLanguageModel, examples: list[Example]
) -> None:
    downs = []
    for layers in ((1,), (1, 2, 3)):
        exits = ExitAdapters.untrained(vlm, layers, 8)
        stage = exit_stage(exits, HiddenStates(vlm, examples, layers), 4, 1e-3, 0)
        optimizer = optimizer_of(stage)
        for step in range(3):
            descend(stage, optimizer, vlm.device, step, 0.0)
        downs.append(exits.adapter(1).down.detach())
    torch.testing.assert_close(downs[0], downs[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_training_lowers_every_exits_loss(
    vlm: VisionLanguageModel, examples: list[Example], tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "_HIDDEN_BYTES", kept)
    untrained = ExitAdapters.untrained(vlm)
    states = HiddenStates(vlm, examples, untrained.layers)
    before = measure(vlm, untrained, states)
    exits, figures = fit(settings(tmp_path, steps=40), vlm, examples, quiet)
    after = measure(vlm, exits, states)
    for old, new in zip(before["exits"], after["exits"], strict=True):
        assert new["loss"] < 0.8 * old["loss"]
    assert figures["steps"] == 40


def test_an_adapter_begins_at_the_size_of_the_states_that_it_reads(
    vlm: VisionLanguageModel, examples: list[Example]
) -> None:
    """So that as many steps teach an exit whose states are thirty times as large as much."""
    states = HiddenStates(vlm, examples, (1, 2))
    exits = ExitAdapters.untrained(vlm, (1, 2), 8)
    match_scale(exits, states)
    for layer, rows in zip(exits.layers, states.of(0)[:-1], strict=True):
        size = float(rows.square().mean(-1).sqrt().median())
        assert torch.equal(exits.adapter(layer).scale, torch.full_like(exits.adapter(layer).scale, size))
        assert torch.equal(exits.adapter(layer)(rows), rows)  # still the identity


def test_a_killed_run_goes_on_and_ends_the_same(
    vlm: VisionLanguageModel, examples: list[Example], tmp_path: Path
) -> None:
    whole, figures = fit(settings(tmp_path / "whole"), vlm, examples, quiet)

    def kill(line: str, share: float) -> None:
        raise Killed

    asked = settings(tmp_path / "killed")
    with pytest.raises(Killed):
        fit(asked, vlm, examples, kill, save_seconds=0.0)
    resumed, again = fit(asked, vlm, examples, quiet)
    assert again["steps"] == figures["steps"] == 12
    ours, theirs = resumed.state_dict(), whole.state_dict()
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], atol=1e-5, rtol=1e-4)
    assert again["loss"] == pytest.approx(figures["loss"], rel=1e-3)


def test_the_whole_command_asks_about_scenes_and_writes_exits_report_and_card(
    vlm_directory: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = settings(tmp_path, model=str(vlm_directory), worlds=1, held_out=2, layers="1,3", rank=4, out=out)
    heard: list[str] = []
    report = train_exits(asked, lambda line, share: heard.append(line))
    assert any(line.startswith("exits step 10 ") for line in heard)
    assert json.loads((out / "exits.json").read_text()) == report
    assert report["num_layers"] == LAYERS and report["rank"] == 4 and report["held_out_replies"] == 2
    assert report["parameters"] == sum(row["parameters"] for row in report["exits"])
    assert [row["layer"] for row in report["exits"]] == [1, 3]
    for row in report["exits"]:
        assert 0 <= row["agreement"] <= 1 and 0 <= row["confident_share"] <= 1
        assert 0 < row["share"] < 1 and row["loss"] >= 0
    assert table(report) in (out / "README.md").read_text()
    (vlm_directory / EXITS_FILE).parent.mkdir()
    (vlm_directory / EXITS_FILE).write_bytes((out / EXITS_FILE).read_bytes())
    model = load_model(ModelSettings(str(vlm_directory)))
    assert model.exits is not None and model.exits.layers == (1, 3)
    (vlm_directory / EXITS_FILE).unlink()
    heard.clear()
    again = train_exits(asked, lambda line, share: heard.append(line))
    assert again["steps"] == report["steps"] and "the model answers" not in heard  # scenes and replies were kept


def test_only_the_cards_own_section_is_replaced(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# tiny\n\nA card.\n")
    report = {
        "model": "tiny", "num_layers": 2, "rank": 4, "parameters": 10, "share": 0.1, "data": "scenes",
        "train_examples": 3, "steps": 1, "batch": 1, "minutes": 0.0, "held_out_replies": 1,
        "held_out_tokens": 2,
        "exits": [
            {"layer": 1, "agreement": 0.5, "confident_share": 0.0, "confident_agreement": None,
             "loss": 1.0, "parameters": 10, "share": 0.1},
        ],
    }  # fmt: skip
    write_card(card, report)
    first = card.read_text()
    card.write_text(first + "\nAn end.\n")
    write_card(card, report | {"rank": 7})
    text = card.read_text()
    assert text.startswith("# tiny\n\nA card.\n") and text.endswith("\nAn end.\n")
    assert text.count("## Early exits") == 1 and "rank 7" in text and "rank 4" not in text
    write_card(card, report)
    assert card.read_text() == first + "\nAn end.\n"


def test_a_text_model_answers_its_own_questions_greedily_every_second_time(
    text_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BLOCK", 24), ("QUESTION_TOKENS", 160), ("REPLY_TOKENS", 12)):  # it rarely ends a turn
        monkeypatch.setattr(made, name, value)
    model = load_model(ModelSettings(str(text_directory)))
    train, held = self_written_examples(model, tmp_path, 40, 400, 0, quiet)
    assert len(list(tmp_path.rglob("*.json"))) == 2 and len(train) > 4 and len(held) >= 1
    greedy = 0
    for example in train:
        assert example.picture is None and example.instruction.strip() and 0 < len(example.reply) <= 12
        rows = model.prefill(None, example.instruction).verify(example.reply[:-1])
        greedy += rows.argmax(-1).tolist() == example.reply
    assert len(train) // 4 <= greedy < len(train)
    monkeypatch.setattr(made, "_write", None)  # nothing is written twice
    assert self_written_examples(model, tmp_path, 40, 400, 0, quiet) == (train, held)
    out = tmp_path / "out"
    options = {"layers": "1", "written": 40, "steps": 30, "dtype": "bfloat16", "cache": tmp_path}
    report = train_exits(settings(tmp_path, model=str(text_directory), out=out, **options), quiet)
    assert report["data"] == "self-written" and report["steps"] == 30 and (out / EXITS_FILE).exists()
    assert all(0 <= row["loss"] < 10 for row in report["exits"])
    assert "conversations that the model wrote itself" in (out / "README.md").read_text()


def test_settings_out_of_place_are_refused() -> None:
    for wrong in ({"rate": -1.0}, {"steps": 0}, {"minutes": 1.0, "steps": 5}, {"dtype": "int4"}):
        with pytest.raises(ValueError):
            ExitSettings(**wrong)
    assert parse_layers("all", 4) == (1, 2, 3) and parse_layers("3, 1", 4) == (1, 3)
    with pytest.raises(ValueError, match="2,4"):
        parse_layers("most", 4)
