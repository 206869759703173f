# SPDX-License-Identifier: Apache-2.0
"""Models written for llama.cpp say there what they say here: the real llama-server, on every family."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from in_process import dsd_lab
from llama_server import LlamaServer, readable
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_ros.edge.engine import CANDIDATES, DraftEngine
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model
from dsd_ros.wire.client import Limits

# llama.cpp reads Qwen3-VL's table of positions a little otherwise.
APART = {"qwen2_vl": 0.02, "qwen2_5_vl": 0.02, "qwen3_vl": 0.5}


@pytest.mark.parametrize("family", APART)
def test_a_model_says_the_same_in_llama_server(capsys, caplog, tmp_path, family):
    folder = readable(make_tiny_model(tmp_path / "tiny", 5, family=family, layers=3))
    if family == "qwen2_5_vl":
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["window_size"] = 112
        (folder / "config.json").write_text(json.dumps(config))
    code, out, err = dsd_lab(capsys, "export", "gguf", "--model", folder, "--folder", tmp_path, "--type", "f32")
    assert code == 0, err
    settings = ModelSettings(str(folder))
    model = load_model(settings)
    with LlamaServer(*out.split()) as server:
        engine = DraftEngine(server.url, load_front(settings))
        for number, sides in enumerate([(56, 84), (112, 168), (100, 150)]):
            picture = np.random.default_rng(number).integers(0, 256, (*sides, 3), dtype=np.uint8)
            sequence = engine.prefill(picture, "go")
            sequence.chosen, sequence.limits = True, Limits()
            said = sequence.next_logits()
            wanted = torch.log_softmax(model.prefill(picture, "go").next_logits(), -1)
            named = said > -100
            assert named.sum() == CANDIDATES and abs(said - wanted)[named].max() < APART[family]
    assert "bounds for pictures" not in caplog.text  # it reads as many tokens


def test_what_llama_cpp_would_read_otherwise_is_refused(capsys, tmp_path):
    text = make_tiny_text(tmp_path / "text", 5)
    windows = make_tiny_model(tmp_path / "windows", 5, family="qwen2_5_vl")
    capsys.readouterr()  # transformers shows how it writes them
    code, _, err = dsd_lab(capsys, "export", "gguf", "--model", text, "--folder", tmp_path)
    assert code == 2 and "is no Qwen-VL" in err and err.count("\n") == 1
    code, _, err = dsd_lab(capsys, "export", "gguf", "--model", windows, "--folder", tmp_path)
    assert code == 2 and "windows of 56 pixels" in err and not list(tmp_path.glob("*.gguf"))
