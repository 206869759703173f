"""The training's own forward passes against transformers', and its prompts against the vlm room's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dsd_lab.train.architecture import DRAFT, IMAGE_TOKENS, VOCABULARY, Size, build_model
from dsd_lab.train.batches import EOS, Example, collate
from dsd_lab.train.data import MODEL_HEIGHT, MODEL_WIDTH
from dsd_lab.train.forward import PLAIN, Passes, language_forward, patches, tower_forward
from dsd_lab.train.language_stage import embed, reply_loss
from dsd_lab.train.questions import prompt_with_past
from dsd_lab.train.replies import acceptance, followed, greedy_replies
from dsd_lab.train.text import all_instructions, instruction_for, prompt_ids, train_tokenizer
from dsd_lab.worlds.phrases import phrasings
from dsd_lab.worlds.situations import Split
from dsd_ros.robot.sim.world import World
from dsd_ros.vlm.prompts import PromptTemplate

REPLY = "The red box is a little left, 1.2 m away; the way is open. Action: forward 75 cm"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([REPLY, *all_instructions()])


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


@pytest.mark.parametrize("past", [(), ("turn left 45 degrees",)])
def test_language_model_equals_transformers(images: np.ndarray, tokenizer, past) -> None:
    model = build_model(DRAFT, 2).eval()
    prompt = prompt_with_past(tokenizer, "find the red box", past)
    reply = [*tokenizer.encode(REPLY).ids, EOS]
    images = images[: 1 + len(past)]
    pixels, grid = official_pixels(images)
    ids = torch.tensor([prompt + reply[:-1]])
    with torch.no_grad():
        theirs = model(
            input_ids=ids,
            pixel_values=pixels,
            image_grid_thw=grid,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits
        features = tower_forward(model.model.visual, torch.from_numpy(images))
        batch = collate([Example(0, None, reply)], [prompt])
        language = model.model.language_model
        hidden, _ = language_forward(language, *embed(language, batch, features))
        ours = model.lm_head(hidden)
    assert torch.allclose(theirs, ours, atol=1e-4)
    said = greedy_replies(model, features, [prompt], max_tokens=4, pictures=[range(1 + len(past))])
    assert said[0][0] == int(theirs[0, len(prompt) - 1].argmax())


@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_passes_equal_the_plain_ones(
    images: np.ndarray, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backward: bool
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = build_model(Size(1, 64, 128, 1, tower_layers=1, tower_width=32), 4)
    prompt = prompt_with_past(tokenizer, "find the red box")
    replies = [[*tokenizer.encode(text).ids, EOS] for text in (REPLY, REPLY[:30], REPLY[:40])]
    passes = Passes(compiled=True)
    # One after the other, of different numbers and lengths, as a training has them.
    images = np.concatenate([images, images[::-1, ::-1]])
    for count in (3, 2):
        rows = [Example(n, None, reply) for n, reply in enumerate(replies[-count:])]
        batch = collate(rows, [prompt] * count)
        losses, gradients = [], []
        for each in (PLAIN, passes):
            model.zero_grad()
            with torch.set_grad_enabled(backward):
                features = each.tower(model.model.visual, torch.from_numpy(images[:count]))
                loss, _, _ = reply_loss(model, None, batch, features, passes=each)
            losses.append(loss.item())
            if backward:
                loss.backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert len(gradients[0]) == len(gradients[1])
        assert len(gradients[0]) > 20 or not backward
        for plain, compiled in zip(*gradients, strict=True):
            assert torch.allclose(plain, compiled, rtol=1e-3, atol=1e-5)


def test_passes_without_a_compiler_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no no-such-compiler .* without --compile"):
        Passes(compiled=True)


def test_cached_replies_follow_from_the_whole_sequence(images: np.ndarray, tokenizer) -> None:
    model = build_model(DRAFT, 3).eval()
    with torch.no_grad():
        features = tower_forward(model.model.visual, torch.from_numpy(images))
    prompts = [prompt_ids(tokenizer, text) for text in ("find the red box", "go to the blue can")]
    replies = greedy_replies(model, features, prompts, max_tokens=12)
    assert followed(model, features, prompts, replies) == replies
    assert acceptance(replies, replies, gamma=4)[0] == 1.0


def test_acceptance_counts_rounds_as_decoding_would() -> None:
    reply = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    guess = [1, 2, 0, 4, 5, 6, 7, 0, 9, 10]
    # Rounds: 1 2 | x gives 3; 4 5 6 7 and 8 for nothing; 9 10 are all that is left.
    share, per_round = acceptance([guess], [reply], gamma=4)
    assert share == pytest.approx((2 + 4 + 2) / (4 + 4 + 2))
    assert per_round == pytest.approx(10 / 3)


def test_tokenizer_round_trip_and_prompt_of_the_chat_template(tokenizer) -> None:
    assert tokenizer.get_vocab_size() <= VOCABULARY
    for text in (REPLY, "Grüße, 3.5 m — ok?", "find the silver bottle"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    rng = np.random.default_rng(0)
    rendered = PromptTemplate("{instruction}").render("find the silver bottle", IMAGE_TOKENS)
    assert tokenizer.encode(rendered, add_special_tokens=False).ids == prompt_ids(tokenizer, "find the silver bottle")
    asked = {instruction_for("red box", rng) for _ in range(500)}
    assert len(asked) > 200 and len(phrasings("find", Split.TRAINING)) >= 200
    assert World.from_seed(0, instruction_for("red box", rng)).target.name == "red box"
