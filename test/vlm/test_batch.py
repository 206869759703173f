# SPDX-License-Identifier: Apache-2.0
"""Sequences advanced together equal the same sequences advanced alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from tiny_models import TOKENS

from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import next_logits_together

INSTRUCTION = "find the silver bottle"


def same(actual, expected):
    torch.testing.assert_close(actual[:TOKENS], expected[:TOKENS], atol=1e-4, rtol=1e-4)


def alone(model, image, instruction, tokens):
    """The logits after ``tokens``, by a sequence of their own."""
    sequence = model.prefill(image, instruction)
    sequence.append(tokens)
    return sequence.next_logits()


@pytest.fixture
def forwards(model, monkeypatch):
    """Counts the passes of the model: how many sequences each advanced."""
    seen = []
    run_layers = model._run_layers

    def counting(hidden, rotations, cache, mask, *rest):
        seen.append(len(mask) if isinstance(mask, list) else 1)
        return run_layers(hidden, rotations, cache, mask, *rest)

    monkeypatch.setattr(model, "_run_layers", counting)
    return seen


def test_one_pass_for_all_lengths_images_and_pending_counts(model, picture, forwards):
    prompts = [
        (picture(1), INSTRUCTION),
        (None, "stop"),
        (picture(2, 112, 168), "turn left, then forward"),
        (picture(1), INSTRUCTION),
    ]
    replies = [[3], [77, 200, 12], [5, 9], [3, 4, 5, 6, 7]]
    sequences = [model.prefill(*prompt) for prompt in prompts]
    for sequence, reply in zip(sequences, replies, strict=True):
        sequence.append(reply)
    forwards.clear()
    results = next_logits_together(sequences)
    assert forwards == [4]
    for (image, instruction), reply, logits in zip(prompts, replies, results, strict=True):
        assert logits.shape == (model.vocab_size,) and logits.dtype == torch.float32
        same(logits, alone(model, image, instruction, reply))


def test_what_is_known_needs_no_pass(model, picture, forwards):
    fresh, fed, pending = (model.prefill(picture(seed), INSTRUCTION) for seed in range(3))
    fed.append([8])
    known = fed.next_logits()
    pending.append([9])
    forwards.clear()
    results = next_logits_together([fresh, fed, pending])
    assert forwards == [1]
    assert torch.equal(results[0], fresh.next_logits()) and torch.equal(results[1], known)
    same(results[2], alone(model, picture(2), INSTRUCTION, [9]))
    assert next_logits_together([]) == []


def test_the_same_sequence_twice_is_advanced_once(model, picture, forwards):
    one, other = model.prefill(picture(), INSTRUCTION), model.prefill(None, "stop")
    one.append([11])
    other.append([12])
    forwards.clear()
    first, second, again = next_logits_together([one, other, one])
    assert forwards == [2]
    assert torch.equal(first, again)
    one.append([13])
    same(one.next_logits(), alone(model, picture(), INSTRUCTION, [11, 13]))
    same(second, alone(model, None, "stop", [12]))


def test_a_sequence_that_is_full_leaves_the_others_usable(model, picture):
    full, short, long = (model.prefill(picture(seed), INSTRUCTION) for seed in range(3))
    full.append([5] * (model.max_length - full.prompt_length + 1))
    short.append([6])
    long.append([7, 8])
    with pytest.raises(ContextError, match="ask for a shorter reply"):
        next_logits_together([short, full, long])
    assert short.tokens == [6] and long.tokens == [7, 8]
    results = next_logits_together([short, long])
    same(results[0], alone(model, picture(1), INSTRUCTION, [6]))
    same(results[1], alone(model, picture(2), INSTRUCTION, [7, 8]))
    full.rollback(2)
    short.append([9])
    results = next_logits_together([short, full])
    same(results[0], alone(model, picture(1), INSTRUCTION, [6, 9]))
    same(results[1], alone(model, picture(0), INSTRUCTION, [5, 5]))


def test_a_pass_that_fails_changes_nothing(model, picture, monkeypatch):
    sequences = [model.prefill(picture(seed), INSTRUCTION) for seed in range(2)]
    for sequence in sequences:
        sequence.append([21, 22])

    def broken(hidden):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model, "head", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            next_logits_together(sequences)
    for seed, logits in enumerate(next_logits_together(sequences)):
        same(logits, alone(model, picture(seed), INSTRUCTION, [21, 22]))


TOKEN = st.integers(0, TOKENS - 1)
STEP = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 3), st.lists(TOKEN, min_size=1, max_size=4)),
    st.tuples(st.just("rollback"), st.integers(0, 3), st.integers(0, 6)),
    st.tuples(st.just("alone"), st.integers(0, 3), st.none()),
    st.tuples(st.just("verify"), st.integers(0, 3), st.lists(TOKEN, max_size=4)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("together"), st.just(0), st.lists(st.integers(0, 3), max_size=4)),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=3, max_size=14))
def test_any_mixture_with_single_use(model, picture, steps):
    prompts = [(picture(1), INSTRUCTION), (None, "stop"), (picture(2), "go"), (None, INSTRUCTION)]
    sequences = [model.prefill(*prompt) for prompt in prompts]
    for what, which, value in steps:
        sequence = sequences[which]
        if what == "append":
            sequence.append(value)
        elif what == "rollback":
            sequence.rollback(min(value, len(sequence.tokens)))
        elif what == "alone":
            sequence.next_logits()
        elif what == "verify":
            sequence.verify(value)
        elif what == "fork":
            sequences[value], prompts[value] = sequence.fork(), prompts[which]
        else:
            chosen = [sequences[index] for index in value]
            results = next_logits_together(chosen)
            for index, logits in zip(value, results, strict=True):
                same(logits, alone(model, *prompts[index], sequences[index].tokens))
    results = next_logits_together(sequences)
    for prompt, sequence, logits in zip(prompts, sequences, results, strict=True):
        same(logits, alone(model, *prompt, sequence.tokens))
        assert torch.equal(logits, sequence.next_logits())
