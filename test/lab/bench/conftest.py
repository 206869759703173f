# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from tiny_models import make_tiny_model

from dsd_ros.vlm.loading import ModelSettings, load_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny model with padded vocabulary and more query than key/value heads."""
    folder = tmp_path_factory.mktemp("models") / "target"
    return load_model(ModelSettings(str(make_tiny_model(folder, seed=3, vocab_rows=272))))


@pytest.fixture(scope="session")
def picture():
    """Makes RGB pictures by seed."""

    def make(seed: int = 0, height: int = 84, width: int = 140) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)

    return make
