# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL and Qwen3-VL decode as transformers does: windows in the vision tower, DeepStack, interleaved M-RoPE."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TOKENS, make_tiny_model

from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.sequence import PromptChunk, TreeCheck, verify_trees_together

INSTRUCTION = "find it"
REPLY = [3, 77, 200, 12, 12, 255, 90]
SIZES = {0: [], 1: [(90, 30)], 3: [(84, 140), (20, 20), (150, 70)]}  # (height, width) of the pictures in a prompt


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def directory(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp(family) / "model"
    return make_tiny_model(folder, seed=3, layers=4, vocab_rows=272, family=family)


@pytest.fixture(scope="module")
def model(directory):
    return load_model(ModelSettings(str(directory)))


def test_patches_are_embedded_by_one_matrix_product(model, directory):
    """What transformers' convolution gives, which takes a CPU seven times as long."""
    stock = type(model.hf).from_pretrained(directory).model.visual.patch_embed
    assert isinstance(stock.proj, torch.nn.Conv3d)
    own = model.hf.model.visual.patch_embed
    assert not any(isinstance(part, torch.nn.Conv3d) for part in own.modules())
    assert own.state_dict().keys() == stock.state_dict().keys()
    patches = torch.randn(24, stock.proj.weight[0].numel(), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(own(patches), stock(patches), atol=1e-5)


def inputs(model, pictures, reply=()):
    """What transformers takes for a prompt with these pictures, the earlier ones of steps before, and a reply."""
    merged = model.images.merge_size**2
    seen = [model.images(picture) for picture in pictures]
    counts = [int(grid.prod()) // merged for _, grid in seen]
    past = [(count, "stop") for count in counts[:-1]]
    ids = torch.tensor([[*model.prompt_tokens(INSTRUCTION, counts[-1] if counts else 0, past), *reply]])
    if not seen:
        return {"input_ids": ids}
    pixels, grids = (torch.cat(parts) for parts in zip(*seen, strict=True))
    kinds = (ids == model.hf.config.image_token_id).int()
    return {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}


def opened(model, pictures, read=True):
    """The same prompt here."""
    past = [(picture, "stop") for picture in pictures[:-1]]
    begin = model.prefill if read else model.open
    return begin(pictures[-1] if pictures else None, INSTRUCTION, past)


@torch.no_grad()
def one_shot(model, pictures, reply):
    """Logits (len(reply) + 1, tokens) and each layer's hidden states of these rows, by transformers alone."""
    states = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: states.append(out[0, -len(reply) - 1 :].clone()))
        for layer in model.hf.model.language_model.layers
    ]
    model.hf.model.rope_deltas = None
    try:
        logits = model.hf(**inputs(model, pictures, reply), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits[-len(reply) - 1 :, :TOKENS], states


def same(actual, expected):
    torch.testing.assert_close(actual[..., : expected.shape[-1]], expected, atol=1e-4, rtol=1e-4)


@pytest.fixture
def pictures(picture):
    return lambda count: [picture(10 + index, *size) for index, size in enumerate(SIZES[count])]


@pytest.mark.parametrize("count", sorted(SIZES))
def test_prompts_drafts_rollbacks_and_layers_equal_transformers(model, pictures, count):
    expected, states = one_shot(model, pictures(count), REPLY)
    sequence = opened(model, pictures(count))
    same(sequence.next_logits(), expected[0])
    fork = sequence.fork()
    seen = []
    same(fork.verify(REPLY, lambda _, hidden: seen.append(hidden.clone())), expected)
    for ours, theirs in zip(seen, states, strict=True):
        same(ours, theirs)
    for index, token in enumerate(REPLY):
        sequence.append([token])
        same(sequence.next_logits(), expected[index + 1])
    fork.rollback(2)
    same(fork.verify(REPLY[2:]), expected[2:])


def test_prompts_in_parts_ride_in_passes_with_trees_of_others(model, pictures):
    """A prompt's deep features land on its own rows, wherever it stands in a pass and however it is cut."""
    texts = {count: one_shot(model, pictures(count), REPLY)[0] for count in SIZES}
    reading, checked, text = opened(model, pictures(3), read=False), opened(model, pictures(1)), opened(model, [])
    tree, parents = [REPLY[0], 9, REPLY[1]], [-1, -1, 0]
    for part in (5, 17, 2):
        rows = verify_trees_together(
            [TreeCheck(checked, tree, parents), TreeCheck(text, REPLY, range(-1, len(REPLY) - 1))],
            chunks=[PromptChunk(reading, part)],
        )
        same(rows[0][[0, 1, 3]], texts[1][:3])
        same(rows[1], texts[0])
    rows = verify_trees_together([TreeCheck(text, tree, parents), TreeCheck(reading, tree, parents)])
    same(rows[1][[0, 1, 3]], texts[3][:3])
    reading.keep_path([0, 2])
    same(reading.verify(REPLY[2:]), texts[3][2:])


def test_deep_features_matter(model, family, picture):
    if family != "qwen3_vl":
        pytest.skip("only Qwen3-VL has them")
    sequence = model.open(picture(1), INSTRUCTION)
    without = model.open(picture(1), INSTRUCTION)
    without._prompt = without._prompt._replace(deep=None)
    assert sequence._prompt.deep.shape[0] == 2
    assert not torch.allclose(sequence.next_logits(), without.next_logits(), atol=1e-2)


def test_the_published_layout_loads_the_same(directory, family, model, tmp_path, picture):
    """As on the hub: rotary settings as rope_scaling, Qwen2.5-VL's text configuration flat."""
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    if family == "qwen3_vl":
        text["rope_scaling"] = {key: rope[key] for key in ("mrope_interleaved", "mrope_section", "rope_type")}
    else:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        kept = ("model_type", "layer_types")
        config |= {key: value for key, value in config.pop("text_config").items() if key not in kept}
        config["vision_config"] |= {"spatial_patch_size": 14, "in_chans": 3, "tokens_per_second": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "model.safetensors").keys()
    names = {"qwen2_5_vl": "visual.patch_embed.proj.weight", "qwen3_vl": "model.visual.patch_embed.proj.weight"}
    assert names[family] in stored
    found = load_model(ModelSettings(str(tmp_path))).prefill(picture(), INSTRUCTION).next_logits()
    torch.testing.assert_close(found, model.prefill(picture(), INSTRUCTION).next_logits())


def test_a_family_that_is_not_read_is_named(directory, tmp_path):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen9_vl"}))
    with pytest.raises(ModelError, match="of type 'qwen9_vl'; use one of qwen2_vl, qwen2_5_vl, qwen3_vl"):
        load_model(ModelSettings(str(tmp_path)))
