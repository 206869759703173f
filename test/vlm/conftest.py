# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_tiny_model

from dsd_ros.vlm.loading import ModelSettings, load_model

torch.set_num_threads(1)


_DECODING = {"test_sequence", "test_history", "test_batch", "test_tree_pass", "test_exits"}


def pytest_generate_tests(metafunc):
    """Decoding is tested with a model of every family, but those other than Qwen2-VL only where all tests run."""
    if "model_directory" in metafunc.fixturenames:
        decodes = metafunc.module.__name__.rpartition(".")[2] in _DECODING
        others = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "qwen2_vl"]
        families = ["qwen2_vl", *(others if decodes else [])]
        metafunc.parametrize("model_directory", families, indirect=True, scope="session")


@pytest.fixture(scope="session")
def model_directory(request, tmp_path_factory):
    """A tiny model with padded vocabulary and more query than key/value heads; do not change it."""
    folder = tmp_path_factory.mktemp("models") / "target"
    return make_tiny_model(folder, seed=3, vocab_rows=272, family=request.param)


@pytest.fixture(scope="session")
def model(model_directory):
    return load_model(ModelSettings(str(model_directory)))


@pytest.fixture(scope="session")
def picture():
    """Makes RGB pictures by seed."""

    def make(seed: int = 0, height: int = 84, width: int = 140) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)

    return make


@pytest.fixture
def own_directory(tmp_path):
    """A model directory a test may damage."""
    return make_tiny_model(tmp_path / "model", seed=3, vocab_rows=272)
