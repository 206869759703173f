# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``target``, ``draft`` (the target with noise on it) and ``stranger`` (another tokenizer)."""
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "target", seed=1)
    make_tiny_model(folder / "draft", seed=1, noise=0.05, noise_seed=2)
    make_tiny_model(folder / "stranger", seed=3, other_tokenizer=True)
    return folder


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "view.png"
    pixels = np.random.default_rng(5).integers(0, 256, (112, 168, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path
