# SPDX-License-Identifier: Apache-2.0
"""Models written for llama.cpp say there what they say here: the real llama-server, on every family."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
import torch
from in_process import dsd_lab
from llama_server import LlamaServer, readable
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_ros.edge.engine import DraftEngine
from dsd_ros.vlm.loading import ModelSettings, load_front, load_model

# llama.cpp reads Qwen3-VL's table of positions a little otherwise.
APART = {"qwen2_vl": 0.02, "qwen2_5_vl": 0.02, "qwen3_vl": 0.5}


@pytest.mark.parametrize("family", APART)
def test_a_model_says_the_same_in_llama_server(capsys, tmp_path, family):
    folder = readable(make_tiny_model(tmp_path / "tiny", 5, family=family, layers=3))
    if family == "qwen2_5_vl":
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["window_size"] = 112
        (folder / "config.json").write_text(json.dumps(config))
    code, out, err = dsd_lab(capsys, "export", "gguf", "--model", folder, "--folder", tmp_path, "--type", "f32")
    assert code == 0, err
    settings = ModelSettings(str(folder))
    model, engine = load_model(settings), DraftEngine("http://here:1", load_front(settings))
    with LlamaServer(*out.split()) as server:
        marker = engine._api.hello(urllib.request.urlopen(f"{server.url}/props").read())
        for number, sides in enumerate([(56, 84), (112, 168), (100, 150)]):
            picture = np.random.default_rng(number).integers(0, 256, (*sides, 3), dtype=np.uint8)
            prompt = engine.prompt(picture, "go")
            body = json.dumps(engine._api.body(marker, prompt, "", 1, 5)).encode()
            said = urllib.request.urlopen(f"{server.url}/completion", body).read()
            found = engine._api.piece(said.splitlines()[0].partition(b"data:")[2])
            wanted = torch.log_softmax(model.prefill(picture, "go").next_logits(), -1)
            assert found.read == prompt.tokens and len(found.candidates) == 5
            for token, chance in found.candidates:
                assert abs(chance - wanted[token]) < APART[family]


def test_what_llama_cpp_would_read_otherwise_is_refused(capsys, tmp_path):
    text = make_tiny_text(tmp_path / "text", 5)
    windows = make_tiny_model(tmp_path / "windows", 5, family="qwen2_5_vl")
    capsys.readouterr()  # transformers shows how it writes them
    code, _, err = dsd_lab(capsys, "export", "gguf", "--model", text, "--folder", tmp_path)
    assert code == 2 and "is no Qwen-VL" in err and err.count("\n") == 1
    code, _, err = dsd_lab(capsys, "export", "gguf", "--model", windows, "--folder", tmp_path)
    assert code == 2 and "windows of 56 pixels" in err and not list(tmp_path.glob("*.gguf"))
