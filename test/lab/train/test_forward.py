# SPDX-License-Identifier: Apache-2.0
"""The training's own forward passes against transformers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsd_lab.train.forward import CPU, autocast, embed, language_forward, patches, tower_forward
from dsd_lab.train.frames import MODEL_HEIGHT, MODEL_WIDTH
from dsd_lab.train.model import DRAFT, build_model
from dsd_lab.train.replies import greedy_replies
from dsd_lab.train.tokenizer import EOS, IMAGE_TOKENS, prompt_ids, train_tokenizer
from dsd_lab.worlds.phrases import all_instructions

REPLY = "The red box is a little left, 1.2 m away; the way is open. Action: forward 75 cm"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([REPLY, *all_instructions()[::20]])


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (2, MODEL_HEIGHT, MODEL_WIDTH, 3), dtype=np.uint8)


def official_pixels(images: np.ndarray):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(do_resize=False, patch_size=14, merge_size=2, temporal_patch_size=2)
    made = [processor(image, input_data_format="channels_last", return_tensors="pt") for image in images]
    pixels = torch.cat([m["pixel_values"] for m in made])
    return pixels, torch.cat([m["image_grid_thw"] for m in made])


def test_patches_and_tower_equal_transformers(images: np.ndarray) -> None:
    pixels, grid = official_pixels(images)
    frames = pixels.view(2, -1, 3, 2, 14, 14)
    assert torch.allclose(frames[:, :, :, 0].flatten(2), patches(torch.from_numpy(images)), atol=1e-5)
    tower = build_model(DRAFT, 1).model.visual.eval()
    with torch.no_grad():
        theirs = tower(pixels, grid_thw=grid).pooler_output.view(2, IMAGE_TOKENS, -1)
        ours = tower_forward(tower, torch.from_numpy(images))
    assert torch.allclose(theirs, ours, atol=1e-5)


def test_language_model_equals_transformers(images: np.ndarray, tokenizer) -> None:
    model = build_model(DRAFT, 2).eval()
    (prompt,) = prompt_ids(tokenizer, ["find the red box"])
    pixels, grid = official_pixels(images[:1])
    ids = torch.tensor([[*prompt, *tokenizer.encode(REPLY).ids]])
    with torch.no_grad():
        theirs = model(
            input_ids=ids, pixel_values=pixels, image_grid_thw=grid,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits  # fmt: skip
        features = tower_forward(model.model.visual, torch.from_numpy(images[:1]))
        language = model.model.language_model
        hidden, _ = language_forward(language, *embed(language, ids, features))
        ours = model.lm_head(hidden)
    assert torch.allclose(theirs, ours, atol=1e-4)
    assert greedy_replies(model, features, [prompt], max_tokens=4)[0][0] == int(theirs[0, len(prompt) - 1].argmax())


def test_cached_replies_follow_from_the_whole_sequence(images: np.ndarray, tokenizer) -> None:
    model = build_model(DRAFT, 3).eval()
    with torch.no_grad():
        features = tower_forward(model.model.visual, torch.from_numpy(images))
    prompts = prompt_ids(tokenizer, ["find the red box", "go over to the blue can"])
    replies = greedy_replies(model, features, prompts, max_tokens=12)
    language = model.model.language_model
    for prompt, reply, shown in zip(prompts, replies, features, strict=True):
        ids = torch.tensor([[*prompt, *reply[:-1]]])
        with torch.no_grad():
            hidden, _ = language_forward(language, *embed(language, ids, shown[None]))
            assert model.lm_head(hidden)[0, len(prompt) - 1 :].argmax(-1).tolist() == reply
    assert all(reply[-1] == EOS or len(reply) == 12 for reply in replies)
    assert greedy_replies(model, features, prompts[:1], max_tokens=12, rows=[0]) == replies[:1]


@pytest.mark.parametrize(("there", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_a_cpu_computes_in_bfloat16_where_it_is_fast(monkeypatch: pytest.MonkeyPatch, there: bool, dtype) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": there})
    some = torch.ones(2, 2)
    with autocast(CPU):
        assert (some @ some).dtype == dtype
