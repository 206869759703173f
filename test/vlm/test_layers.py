"""The lean layers do what transformers' layers do, on the same weights; others keep theirs."""

from __future__ import annotations

import pytest
import torch
from tiny_models import TOKENS, make_tiny_model

from dsd_ros.vlm.batch import next_logits_together
from dsd_ros.vlm.layers import LeanLayer
from dsd_ros.vlm.loading import ModelSettings, load_model

INSTRUCTION = "find the silver bottle"


@pytest.fixture(scope="module")
def plain_model(model_directory):
    """The same model on transformers' own layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LeanLayer, "fits", staticmethod(lambda layer: False))
        return load_model(ModelSettings(str(model_directory)))


def is_lean(model):
    return all(isinstance(layer, LeanLayer) for layer in model._layers)


def results(model, picture):
    """Logits of every kind of pass, and the hidden states between the layers."""
    hidden = []
    sequence = model.prefill(picture(), INSTRUCTION)
    found = [sequence.next_logits(), *sequence.verify([5, 6, 7], lambda _, h: hidden.append(h))]
    sequence.append([8])
    found.append(sequence.next_logits())
    forks = [sequence.fork() for _ in range(3)]
    for length, fork in enumerate(forks):
        fork.append(range(20, 21 + length))
    found += next_logits_together(forks)
    return torch.stack(found)[:, :TOKENS], torch.cat(hidden)


def test_equals_transformers_layers(model, plain_model, picture):
    assert is_lean(model) and not is_lean(plain_model)
    for lean, plain in zip(results(model, picture), results(plain_model, picture), strict=True):
        torch.testing.assert_close(lean, plain, atol=1e-4, rtol=1e-4)


def test_weights_are_shared_not_copied(model):
    attention, mlp = model._language.layers[0].self_attn, model._language.layers[0].mlp
    for first, *others in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        storage = first.weight.untyped_storage().data_ptr()
        assert all(linear.weight.untyped_storage().data_ptr() == storage for linear in others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(model, model_directory, picture, dtype):
    half = load_model(ModelSettings(str(model_directory), dtype=dtype))
    assert is_lean(half)
    logits, hidden = results(half, picture)
    exact, _ = results(model, picture)
    assert hidden.dtype == getattr(torch, dtype)
    assert (logits - exact).abs().max() < 0.3


def test_a_quantized_model_keeps_its_layers(tmp_path, picture):
    directory = make_tiny_model(tmp_path, seed=3)
    quantized = load_model(ModelSettings(str(directory), quantization="int8"))
    assert not is_lean(quantized)
    exact, _ = results(load_model(ModelSettings(str(directory))), picture)
    near, _ = results(quantized, picture)
    assert (near - exact).abs().mean() < 0.2
