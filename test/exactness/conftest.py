# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_tiny_model

from dsd_ros.vlm.loading import ModelSettings, load_model

torch.set_num_threads(1)
SERVER = Path(__file__).parents[1] / "support" / "serve_model.py"


@contextmanager
def _serving(model: str, *options: str) -> Iterator[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, str(SERVER), model, *options], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "listening on ws" in line, line
        yield line.split()[-1]
    finally:
        process.terminate()
        assert process.wait(timeout=20) == 0
        process.stdout.close()


@pytest.fixture(scope="session")
def serving():
    """serving(model, *options): a context with the address of a verifier in another process."""
    return _serving


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("exactness") / "target", seed=5)


@pytest.fixture(scope="session")
def target(target_directory):
    return load_model(ModelSettings(str(target_directory)))


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    """Agrees with the target often, not always, and pads its vocabulary otherwise."""
    directory = tmp_path_factory.mktemp("exactness") / "draft"
    return load_model(ModelSettings(str(make_tiny_model(directory, 5, noise=0.08, vocab_rows=320))))


@pytest.fixture(scope="session")
def picture():
    """Makes RGB pictures by seed."""

    def make(seed: int = 0, height: int = 56, width: int = 84) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)

    return make
