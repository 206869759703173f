# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model

from dsd_ros.vlm.loading import ModelSettings, load_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A tiny model with padded vocabulary and more query than key/value heads; do not change it."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "target", seed=3, vocab_rows=272)


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
