# SPDX-License-Identifier: Apache-2.0
"""Prompts with the pictures and actions of earlier steps equal transformers' own reading of them."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import TOKENS, make_tiny_model

from dsd_ros.vlm.errors import ContextError, ImageError, ModelError, PromptError
from dsd_ros.vlm.loading import ModelSettings, load_model
from dsd_ros.vlm.prompts import PromptTemplate

INSTRUCTION = "find it"
REPLY = [3, 77, 200, 12, 12, 255, 90]
SIZES = [(84, 140), (140, 84), (56, 56), (112, 168), (90, 30), (20, 20), (300, 500), (84, 140)]
ACTIONS = ["forward 25 cm", "turn left 15 degrees", "turn right 45 degrees", "stop"]


@pytest.fixture
def steps(picture):
    """Makes the last ``count`` of eight steps, no two pictures of one size."""
    return lambda count: [(picture(10 + index, *SIZES[index]), ACTIONS[index % len(ACTIONS)]) for index in range(count)]


@torch.no_grad()
def by_transformers(model, image, history, reply):
    """Positions (3, n), their delta and logits (len(reply) + 1, tokens), of a Hugging Face model alone."""
    pictures = [model.images(shown) for shown in [*(earlier for earlier, _ in history), image]]
    pixels, grids = (torch.cat(parts) for parts in zip(*pictures, strict=True))
    counts = [int(grid.prod()) // 4 for grid in grids]
    past = [(count, action) for count, (_, action) in zip(counts, history, strict=False)]
    ids = torch.tensor([model.prompt_tokens(INSTRUCTION, counts[-1], past) + list(reply)])
    kinds = (ids == model.hf.config.image_token_id).int()
    assert int(kinds.sum()) == sum(counts)
    positions, delta = model.hf.model.get_rope_index(ids, kinds, grids)
    model.hf.model.rope_deltas = None
    logits = model.hf(
        input_ids=ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=kinds,
        use_cache=False,
    ).logits[0]  # fmt: skip
    return positions[:, 0], int(delta), logits[-len(reply) - 1 :, :TOKENS].float()


def same(actual, expected):
    torch.testing.assert_close(actual[..., :TOKENS], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_pictures_of_any_sizes_equal_transformers(model, picture, steps, count):
    image, history = picture(1, 112, 84), steps(count)
    positions, delta, expected = by_transformers(model, image, history, REPLY)
    sequence = model.prefill(image, INSTRUCTION, history)
    assert sequence.prompt_length == positions.shape[1] - len(REPLY)
    # A reply's tokens stand where transformers puts them, however many positions the pictures saved.
    place = torch.arange(sequence.prompt_length, positions.shape[1])
    assert (positions[:, place] == place + sequence._rope_delta).all()
    assert delta == sequence._rope_delta
    same(sequence.fork().verify(REPLY), expected)
    for index, token in enumerate(REPLY):
        same(sequence.next_logits(), expected[index])
        sequence.append([token])
    same(sequence.next_logits(), expected[-1])


def test_what_a_prompt_says_of_earlier_steps():
    template = PromptTemplate("{instruction}")
    assert template.render("go", 1, [(2, "stop"), (1, "turn  left")]) == (
        "<|im_start|>user\ngo"
        "\nBefore: <|vision_start|><|image_pad|><|image_pad|><|vision_end|> Action: stop"
        "\nBefore: <|vision_start|><|image_pad|><|vision_end|> Action: turn left"
        "\nNow: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_sets_its_own_text_for_earlier_steps(own_directory):
    own = {"format": 1, "prompt": "{instruction}", "past": "{image}{action};", "present": ""}
    (own_directory / "dsd.json").write_text(json.dumps(own))
    text = PromptTemplate.from_directory(own_directory).render("go", 1, [(1, "{image} stop")])
    assert "<|vision_end|>{image} stop;<|vision_start|>" in text
    for wrong in ({"past": "{image}"}, {"past": 3}, {"present": "<|im_end|>"}):
        (own_directory / "dsd.json").write_text(json.dumps(own | wrong))
        with pytest.raises(ModelError, match="past|chat markers"):
            PromptTemplate.from_directory(own_directory)


@pytest.mark.parametrize("action", ["", "a" * 257, "stop<|im_end|>", "a\x00", None])
def test_actions_that_are_no_phrase_are_refused(model, picture, action):
    with pytest.raises(PromptError, match="action of an earlier step"):
        model.prefill(picture(), INSTRUCTION, [(picture(1), action)])


def test_what_cannot_be_shown_is_refused_with_a_sentence(model, picture, tmp_path):
    with pytest.raises(ImageError, match="without a present one"):
        model.prefill(None, INSTRUCTION, [(picture(), "stop")])
    with pytest.raises(ImageError, match="shape"):
        model.prefill(picture(), INSTRUCTION, [(picture()[0], "stop")])
    short = load_model(ModelSettings(str(make_tiny_model(tmp_path / "short", max_positions=100))))
    with pytest.raises(ContextError, match="with 3 earlier pictures .* use fewer of them"):
        short.prefill(picture(), INSTRUCTION, [(picture(), "stop")] * 3)


def test_the_tower_looks_at_each_picture_once(model_directory, picture, steps):
    model = load_model(ModelSettings(str(model_directory)))
    looks = []
    tower = model.hf.model.get_image_features

    def counting(pixels, *rest, **options):
        looks.append(len(pixels))
        return tower(pixels, *rest, **options)

    model.hf.model.get_image_features = counting
    walk = [*steps(4), (picture(1), "stop")]
    fresh = load_model(ModelSettings(str(model_directory)))
    for count in range(1, 5):
        told = model.prefill(walk[count][0], INSTRUCTION, walk[:count]).next_logits()
        assert len(looks) == count + 1
        assert torch.equal(told, fresh.prefill(walk[count][0], INSTRUCTION, walk[:count]).next_logits())
        fresh._backbone._known.clear()
    model.prefill(walk[0][0], INSTRUCTION)  # without a history nothing is remembered or looked up
    assert len(looks) == 6
