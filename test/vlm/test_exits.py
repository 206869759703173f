# SPDX-License-Identifier: Apache-2.0
"""Early exits: adapters that start as the identity, their file, and its check against the model's weights."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from dsd_ros.vlm.errors import ModelError
from dsd_ros.vlm.exits import ExitAdapters, default_rank, load_exits
from dsd_ros.vlm.loading import ModelSettings, load_model


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("exits") / "deep", seed=5, layers=4)


@pytest.fixture
def directory(deep, tmp_path):
    return shutil.copytree(deep, tmp_path / "deep")


@pytest.fixture
def model(directory):
    return load_model(ModelSettings(str(directory)))


def trained(model, **options):
    """Exits with some weight in every place."""
    exits = ExitAdapters.untrained(model, **options)
    with torch.no_grad():
        for parameter in exits.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return exits


def test_an_untrained_exit_says_what_the_head_makes_of_its_layer(model, picture):
    exits = ExitAdapters.untrained(model)
    assert exits.layers == (1, 2, 3)
    seen = {}
    sequence = model.prefill(picture(), "find the silver bottle")
    sequence.verify([5, 6, 7], lambda index, hidden: seen.update({index + 1: hidden}))
    for layer in exits.layers:
        said = exits.logits(model, layer, seen[layer])
        assert said.shape == (4, model.vocab_size) and said.dtype == torch.float32
        assert torch.equal(said, model.head(seen[layer]))
        assert not said.requires_grad


def test_adapters_have_the_size_they_say():
    assert default_rank(3584) == 448 and default_rank(192) == 32 and default_rank(16) == 16
    exits = ExitAdapters([3, 1], hidden_size=192, num_layers=6)
    assert exits.layers == (1, 3)
    assert exits.parameters_count == 2 * (192 + 2 * 192 * 32)


def test_layers_and_ranks_that_the_model_cannot_have_are_refused(model):
    for layers in ([], [0, 1], [4], [-1]):
        with pytest.raises(ModelError, match="from 1 to 3"):
            ExitAdapters.untrained(model, layers)
    for rank in (0, 65):
        with pytest.raises(ModelError, match="1 to 64"):
            ExitAdapters.untrained(model, rank=rank)


def test_exits_beside_a_model_are_loaded_with_it(model, directory):
    assert model.exits is None
    exits = trained(model, layers=[1, 3], rank=8)
    exits.save(directory, model.fingerprint)
    again = load_model(ModelSettings(str(directory)))
    assert again.fingerprint == model.fingerprint
    assert again.exits is not None
    assert (again.exits.layers, again.exits.rank) == ((1, 3), 8)
    assert not any(parameter.requires_grad for parameter in again.exits.parameters())
    hidden = torch.randn(3, model.hidden_size)
    said = again.exits.logits(again, 3, hidden)
    torch.testing.assert_close(said, exits.logits(model, 3, hidden), atol=2e-2, rtol=2e-2)
    assert load_model(ModelSettings(str(directory)), exits=False).exits is None
    with pytest.raises(ModelError, match="no exit after layer 2"):
        again.exits.adapter(2)


def test_exits_lie_out_of_the_way_of_engines_that_take_every_safetensors_file_for_weights(model, directory):
    weights = sorted(directory.glob("*.safetensors"))
    trained(model).save(directory, model.fingerprint)
    assert sorted(directory.glob("*.safetensors")) == weights


def test_exits_take_the_precision_of_their_model(model, directory):
    trained(model).save(directory, model.fingerprint)
    half = load_model(ModelSettings(str(directory), dtype="bfloat16"))
    assert half.exits is not None and next(half.exits.parameters()).dtype == torch.bfloat16
    hidden = torch.randn(2, half.hidden_size, dtype=torch.bfloat16)
    assert half.exits.logits(half, 1, hidden).dtype == torch.float32


def test_exits_of_other_weights_are_refused(model, directory):
    trained(model).save(directory, model.fingerprint)
    make_tiny_model(directory, seed=6, layers=4)
    with pytest.raises(ModelError, match="other weights.*dsd-lab train exits"):
        load_model(ModelSettings(str(directory)))
    assert load_model(ModelSettings(str(directory)), exits=False).exits is None


def load(directory, fingerprint="f"):
    return load_exits(directory, fingerprint, 64, 4, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("damage", ["cut", "empty", "no metadata", "format", "layers", "missing", "shape", "rank"])
def test_a_damaged_file_is_named(model, tmp_path, damage):
    path = ExitAdapters.untrained(model).save(tmp_path, "f")
    tensors = load_file(path)
    metadata = {"format": "1", "model": "f", "layers": "1,2,3", "rank": "32"}
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        if damage == "no metadata":
            metadata = {}
        elif damage == "format":
            metadata["format"] = "2"
        elif damage == "layers":
            metadata["layers"] = "1,2,4"
        elif damage == "missing":
            del tensors["adapters.1.up"]
        elif damage == "shape":
            tensors["adapters.1.up"] = torch.zeros(3, 3)
        elif damage == "rank":
            metadata["rank"] = "many"
        save_file(tensors, path, metadata=metadata)
    with pytest.raises(ModelError) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)
