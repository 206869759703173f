# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding equals transformers' forward pass over the whole text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny_models import TOKENS, make_tiny_model

from dsd_ros.vlm.errors import ContextError, SequenceError
from dsd_ros.vlm.loading import ModelSettings, load_model

INSTRUCTION = "find the silver bottle"
REPLY = [3, 77, 200, 12, 12, 255, 90, 41, 8, 133, 64]


@torch.no_grad()
def one_shot(model, image, instruction, reply):
    """Logits (len(reply) + 1, tokens) after prompt and reply tokens, by transformers alone."""
    pixels, grid = (None, None) if image is None else model.images(image)
    count = 0 if grid is None else int(grid.prod()) // 4
    ids = torch.tensor([model.prompt_tokens(instruction, count) + list(reply)])
    options = {}
    if pixels is not None:
        options = {
            "pixel_values": pixels,
            "image_grid_thw": grid,
            "mm_token_type_ids": (ids == model.hf.config.image_token_id).int(),
        }
    model.hf.model.rope_deltas = None
    logits = model.hf(input_ids=ids, use_cache=False, **options).logits[0]
    return logits[-len(reply) - 1 :, :TOKENS].float()


def same(actual, expected):
    torch.testing.assert_close(actual[..., :TOKENS], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_image", [True, False])
def test_token_by_token_equals_one_shot(model, picture, with_image):
    image = picture() if with_image else None
    expected = one_shot(model, image, INSTRUCTION, REPLY)
    sequence = model.prefill(image, INSTRUCTION)
    same(sequence.next_logits(), expected[0])
    for index, token in enumerate(REPLY):
        sequence.append([token])
        same(sequence.next_logits(), expected[index + 1])
    assert sequence.tokens == REPLY


@pytest.mark.parametrize("size", [(90, 30), (20, 20), (300, 500)])
def test_every_image_shape_equals_one_shot(model, picture, size):
    image = picture(1, *size)
    sequence = model.prefill(image, INSTRUCTION)
    same(sequence.verify(REPLY), one_shot(model, image, INSTRUCTION, REPLY))


def test_interleaved_sequences_do_not_mix(model, picture):
    """Different images give different M-RoPE offsets; each sequence must keep its own."""
    images = [picture(1, 56, 56), None, picture(2, 140, 168), picture(3, 60, 168)]
    sequences = [model.prefill(image, f"go to object {i}") for i, image in enumerate(images)]
    replies = [[(i * 31 + 7 * k) % 256 for k in range(12)] for i in range(len(images))]
    for step in range(0, 12, 3):
        for sequence, reply in zip(sequences, replies, strict=True):
            sequence.verify(reply[step : step + 3])
    for i, (sequence, image) in enumerate(zip(sequences, images, strict=True)):
        same(sequence.next_logits(), one_shot(model, image, f"go to object {i}", replies[i])[-1])


def test_threads_may_share_a_model(model_directory, picture):
    """Each thread its own sequence."""
    shared = load_model(ModelSettings(str(model_directory)))
    reply = [(7 * k) % 256 for k in range(40)]

    def decode(seed):
        sequence = shared.prefill(picture(seed), INSTRUCTION)
        for start in range(0, len(reply), 4):
            logits = sequence.verify(reply[start : start + 4])
        return logits[-1].clone()

    alone = [decode(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(decode, range(4)))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)


def test_long_replies_outgrow_the_first_cache(model, picture):
    reply = [int(t) for t in np.random.default_rng(0).integers(0, 256, 300)]
    sequence = model.prefill(picture(), INSTRUCTION)
    for start in range(0, 300, 7):
        logits = sequence.verify(reply[start : start + 7])
    same(logits[-1], one_shot(model, picture(), INSTRUCTION, reply)[-1])


def test_padding_ids_are_never_likely(model, picture):
    logits = model.prefill(picture(), INSTRUCTION).verify(REPLY)
    assert model.vocab_size == 272
    assert torch.isneginf(logits[:, TOKENS:]).all() and torch.isfinite(logits[:, :TOKENS]).all()


def test_context_limit_is_an_error_and_the_sequence_survives(tmp_path):
    directory = make_tiny_model(tmp_path / "m", seed=3, max_positions=64)
    small = load_model(ModelSettings(str(directory)))
    sequence = small.prefill(None, INSTRUCTION)
    room = 64 - sequence.prompt_length
    sequence.verify(list(range(room)))
    with pytest.raises(ContextError, match="holds 64"):
        sequence.verify([1])
    assert len(sequence.tokens) == room
    sequence.rollback(3)
    same(sequence.verify([5, 6]), one_shot(small, None, INSTRUCTION, [0, 1, 2, 5, 6])[3:])
    with pytest.raises(ContextError, match="shorter instruction"):
        small.prefill(None, "x" * 200)


def test_unknown_tokens_are_refused(model, picture):
    sequence = model.prefill(None, INSTRUCTION)
    for token in (-1, model.vocab_size):
        with pytest.raises(SequenceError, match="not in the vocabulary"):
            sequence.append([token])
        with pytest.raises(SequenceError, match="not in the vocabulary"):
            sequence.verify([1, token])
    for length in (-1, 1):
        with pytest.raises(SequenceError, match="give a length from 0"):
            sequence.rollback(length)
    assert sequence.tokens == []


def test_a_failing_hook_leaves_the_sequence_usable(model, picture):
    def hook(layer, hidden):
        raise RuntimeError("gone")

    sequence = model.prefill(picture(), INSTRUCTION)
    sequence.append(REPLY[:2])
    with pytest.raises(RuntimeError, match="gone"):
        sequence.verify(REPLY[2:5], hook)
    assert sequence.tokens == REPLY[:2]
    same(sequence.verify(REPLY[2:]), one_shot(model, picture(), INSTRUCTION, REPLY)[2:])


def test_a_head_that_fails_leaves_the_sequence_usable(model, picture, monkeypatch):
    def head(hidden):
        raise RuntimeError("out of memory")

    sequence = model.prefill(picture(), INSTRUCTION)
    sequence.append(REPLY[:2])
    for attempt in (lambda: sequence.verify(REPLY[2:5]), sequence.next_logits):
        with monkeypatch.context() as patch:
            patch.setattr(model, "head", head)
            with pytest.raises(RuntimeError, match="out of memory"):
                attempt()
        assert sequence.tokens == REPLY[:2]
    same(sequence.verify(REPLY[2:]), one_shot(model, picture(), INSTRUCTION, REPLY)[2:])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.integers(0, 255), max_size=3)),
        st.tuples(st.just("verify"), st.lists(st.integers(0, 255), max_size=5)),
        st.tuples(st.just("hooked"), st.lists(st.integers(0, 255), max_size=5)),
        st.tuples(st.just("rollback"), st.floats(0, 1)),
        st.tuples(st.just("logits"), st.none()),
        st.tuples(st.just("fork"), st.booleans()),
    ),
    max_size=14,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=operations, with_image=st.booleans())
def test_any_history_equals_a_fresh_sequence(model, picture, operations, with_image):
    image = picture(4) if with_image else None
    sequence = model.prefill(image, INSTRUCTION)
    others = []
    expected: list[int] = []
    for name, argument in operations:
        if name == "append":
            sequence.append(argument)
            expected = expected + argument
        elif name in ("verify", "hooked"):
            before = len(expected)
            seen: list[tuple[int, torch.Tensor]] = []
            hook = (lambda layer, hidden, seen=seen: seen.append((layer, hidden.clone()))) if name == "hooked" else None
            logits = sequence.verify(argument, hook)
            expected = expected + argument
            if name == "hooked":
                assert [layer for layer, _ in seen] == list(range(model.num_layers))
                same(model.head(seen[-1][1]), logits[:, :TOKENS])
            same(logits, one_shot(model, image, INSTRUCTION, expected)[before:])
        elif name == "rollback":
            expected = expected[: round(argument * len(expected))]
            sequence.rollback(len(expected))
        elif name == "logits":
            same(sequence.next_logits(), one_shot(model, image, INSTRUCTION, expected)[-1])
        else:
            twin = sequence.fork()
            kept, sequence = (sequence, twin) if argument else (twin, sequence)
            others.append((kept, list(expected)))
        assert sequence.tokens == expected
    for other, reply in [*others, (sequence, expected)]:
        assert other.tokens == reply
        same(other.next_logits(), one_shot(model, image, INSTRUCTION, reply)[-1])
