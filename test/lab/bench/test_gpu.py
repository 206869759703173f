# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench gpu` at tiny sizes on the CPU: the same code as on a GPU, but for its streams and 4-bit matrices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model

from dsd_lab.bench import gpu, gpu_times
from dsd_lab.bench.gpu_models import _image_processor, build_model, read_sizes
from dsd_lab.bench.profiles import ProfileError, load_profile
from dsd_lab.cli.main import main
from dsd_lab.report import BenchError

ROOT = Path(__file__).parents[3]
COMMAND = ["bench", "gpu", "--device", "cpu", "--draft-size", "small", "--target-size", "large", "--picture", "84x56"]


def size(hidden: int, layers: int) -> dict:
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 4]}
    text = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": 300,
        "num_attention_heads": hidden // 16, "num_key_value_heads": hidden // 32, "rope_parameters": rope,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": hidden, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    return {
        "architecture": "Qwen2VLForConditionalGeneration", "tie_word_embeddings": False, "text_config": text,
        "vision_config": vision,
    }  # fmt: skip


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command line, with few passes a timing."""
    monkeypatch.setattr(gpu_times, "_ENOUGH_S", 0.0)
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({"small": size(32, 2), "large": size(64, 4)}))
    tokenizer = make_tiny_model(tmp_path / "tokenizer")
    return [*COMMAND, "--sizes", str(sizes), "--tokenizer", str(tokenizer), "--json", str(tmp_path / "gpu.json")]


def times_of(report: dict, model: str, what: str) -> dict[int, dict]:
    return {row["count"]: row for row in report["rows"] if (row["model"], row["what"]) == (model, what)}


def test_every_time_is_measured_and_decoding_agrees_with_transformers(command, tmp_path, capsys):
    assert main(command) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert list(times_of(report, "target", "batch")) == list(times_of(report, "draft", "step")) == [1, 2, 4, 8, 16, 32]
    assert list(times_of(report, "target", "verify")) == [0, 1, 2, 4, 8, 16]
    (exits,) = times_of(report, "target", "exits").values()
    assert exits["count"] == 3 and len(exits["known_ms"]) == 3 and exits["known_ms"] == sorted(exits["known_ms"])
    assert all(0 < each["p10"] <= each["ms"] <= each["p90"] for each in report["rows"])
    assert report["agreement"]["worst"] < 1e-4 and report["agreement"]["layers_compared"] == 3
    assert report["left_out"] == [] and "batch" in capsys.readouterr().out


def test_pictures_are_bounded_in_tokens_of_the_family(tmp_path):
    tokenizer = make_tiny_model(tmp_path / "tokenizer")
    for patch, side in ((14, 28), (16, 32)):  # Qwen2-VL, Qwen3-VL
        images = _image_processor(tokenizer, patch)
        assert (images.min_pixels, images.max_pixels) == (4 * side**2, 1280 * side**2)


def test_other_benches_take_a_measured_target_for_a_profile(command, tmp_path):
    assert main(command) == 0
    file = tmp_path / "gpu.json"
    report, go2 = json.loads(file.read_text()), load_profile("go2-a100")
    profile = load_profile(str(file))
    verify, batch = times_of(report, "target", "verify"), times_of(report, "target", "batch")
    times = profile.times
    assert profile.name == "gpu" and profile.link == go2.link and profile.gamma == go2.gamma
    assert (times.draft_s, times.draft_prefill_s) == (go2.times.draft_s, go2.times.draft_prefill_s)
    assert times.target_s == pytest.approx(verify[0]["ms"] / 1e3)
    for drafted in (1, 4, 16):
        assert times.verify_s(1 + drafted) == pytest.approx(verify[drafted]["ms"] / 1e3)
    (prefill,), (exits,) = (times_of(report, "target", what).values() for what in ("prefill", "exits"))
    assert times.target_prefill_s == pytest.approx(prefill["ms"] / 1e3)
    assert times.exit_s == pytest.approx(max(0.0, (exits["ms"] - verify[4]["ms"]) / 3e3))
    assert dict(times.target_batch)[32] == pytest.approx(batch[32]["ms"] / batch[1]["ms"])
    assert profile.without("batch").times.target_batch == ()
    modes = ["--profile", str(file), "--modes", "ar,dsd", "--images", "1", "--max-tokens", "4", "--json"]
    assert main(["bench", "modes", *modes, str(tmp_path / "modes.json")]) == 0
    measured = json.loads((tmp_path / "modes.json").read_text())
    assert measured["profile"] == "gpu" and measured["times"]["target_batch"][0] == [1.0, 1.0]


def test_the_robot_before_a_measured_target_may_be_described_in_its_file(command, tmp_path):
    file = tmp_path / "gpu.json"
    assert main([*command, "--robot", "lte"]) == 0
    report = json.loads(file.read_text())
    step = times_of(report, "draft", "step")
    own = load_profile(str(file))
    assert own.link == load_profile("lte").link and own.times.draft_s == pytest.approx(step[1]["ms"] / 1e3)
    assert own.times.batch_growth == pytest.approx(max(0.0, step[8]["ms"] / step[1]["ms"] - 1))
    file.write_text(json.dumps(report | {"robot": {"delay_ms": 7, "draft_ms": 50, "gamma": 3}}))
    described = load_profile(str(file))
    assert (described.link.delay_up_s, described.gamma, described.times.draft_s) == (0.007, 3, 0.05)
    assert described.times.target_s == own.times.target_s
    for broken, said in (
        ({"robot": {"delya_ms": 7}}, "unknown setting 'delya_ms'"),
        ({"robot": "mars"}, "unknown profile 'mars'"),
        ({"rows": []}, "gpu.json is no report with a target's times"),
        ({"robot": "lte", "rows": [r for r in report["rows"] if r["model"] == "target"]}, "gpu.json is no report"),
    ):
        file.write_text(json.dumps(report | broken))
        with pytest.raises(ProfileError, match=said):
            load_profile(str(file))
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(str(tmp_path / "other.json"))


def test_what_does_not_agree_is_said(command, tmp_path, monkeypatch):
    build = gpu.build_model

    def other(*given, **named):
        model = build(*given, **named)
        cos, sin = model._table
        model._table = cos, sin * 2  # the rotations of text positions
        return model

    monkeypatch.setattr(gpu, "build_model", other)
    assert main(command) == 1
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert not report["agrees"] and report["agreement"]["draft"] > 1e-3 > report["agreement"]["prefill"]


def test_parts_are_left_out_when_time_is_up(command, tmp_path, monkeypatch, capsys):
    now = iter(range(0, 10_000_000, 100))
    monkeypatch.setattr(gpu, "_clock", lambda: float(next(now)))
    assert main([*command, "--seconds", "150"]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["left_out"] == ["draft"]
    assert "left out for lack of time: draft" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(command, capsys):
    for given, sentence in [
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--draft-size", "qwen9"], "there is no model size 'qwen9'; choose from small, large"),
        (["--parts", "tea"], "there is no part 'tea'; name some of times, modes, drafts"),
        (["--draft-layers", "5"], "draft-layers is 5; use 1 to 4"),
        (["--picture", "1280"], "--picture is '1280'; give width and height"),
        (["--picture", "9999x20"], "a side of the picture is 9999 pixels"),
    ]:
        assert main([*command, *given]) == 2
        assert sentence in capsys.readouterr().err


def test_odd_files_of_sizes_are_refused(tmp_path):
    for text in ["{", "[]", '{"a": {"text_config": {}}}']:
        (tmp_path / "sizes.json").write_text(text)
        with pytest.raises(BenchError, match=r"sizes\.json"):
            read_sizes(tmp_path / "sizes.json")


@pytest.mark.parametrize("name", sorted(read_sizes()))
def test_the_listed_sizes_are_buildable(name, tmp_path):
    """On torch's meta device, which allocates nothing."""
    tokenizer = make_tiny_model(tmp_path)
    billions = {  # of parameters, as their model cards say
        "qwen2-vl-2b": 2.21, "qwen2-vl-7b": 8.29, "qwen2.5-vl-3b": 3.75, "qwen2.5-vl-7b": 8.29, "qwen3-vl-2b": 2.13,
        "qwen3-vl-8b": 8.77,
    }  # fmt: skip
    import transformers

    config = dict(read_sizes()[name])
    kind = getattr(transformers, config.pop("architecture"))
    with torch.device("meta"):
        hf = kind(kind.config_class(**config))
    assert sum(each.numel() for each in hf.parameters()) / 1e9 == pytest.approx(billions[name], abs=0.01)
    assert build_model(size(32, 2), torch.device("cpu"), torch.float32, tokenizer, layers=1).num_layers == 1
