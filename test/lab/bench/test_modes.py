# SPDX-License-Identifier: Apache-2.0
"""`dsd-lab bench modes` and `dsd-lab bench soak`, run with tiny models."""

from __future__ import annotations

import dataclasses
import json
import os
import threading

import pytest
from in_process import dsd_lab
from PIL import Image
from tiny_models import make_tiny_model

from dsd_lab.bench import modes
from dsd_lab.bench.harness import Decoding
from dsd_lab.bench.modes import measure_modes
from dsd_lab.bench.modes_report import Measured, make_report
from dsd_lab.bench.profiles import ASSUMPTIONS, load_profile
from dsd_lab.bench.sweeps import Variant, crossed, parse_modes, parse_sweep
from dsd_lab.report import BenchError
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.vlm.exits import ExitAdapters
from dsd_ros.vlm.loading import ModelSettings, load_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    target = make_tiny_model(folder / "target", seed=1)
    model = load_model(ModelSettings(str(target), threads=1))
    ExitAdapters.untrained(model).save(target, model.fingerprint)
    make_tiny_model(folder / "draft", seed=1, noise=0.05, noise_seed=2)
    return ["--draft", str(folder / "draft"), "--target", str(folder / "target")]


def models(pair: list[str]) -> tuple[ModelSettings, ModelSettings]:
    return ModelSettings(pair[1], threads=1), ModelSettings(pair[3], threads=1)


def test_every_mode_is_measured_on_the_same_pictures(pair, capsys, tmp_path):
    threads = threading.active_count()
    file, plot = tmp_path / "modes.json", tmp_path / "modes.png"
    code, out, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--profile", "loopback", "--images", "2", "--max-tokens", "10",
        "--modes", "ar, dsd fsd fsd:predraft_source=guesses+predraft_workers=2", "--json", file, "--plot", plot,
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(file.read_text())
    assert report["exact"] is True and report["differences"] == []
    assert report["profile"] == "loopback" and report["torch"]
    assert [row["mode"] for row in report["rows"]] == ["ar", "dsd", "fsd", "fsd"]
    for row in report["rows"]:
        assert row["label"] in out
        assert row["seconds_per_reply"] > 0 and row["limit_seconds"] > 0 and row["predicted_seconds"] > 0
        assert row["bytes_up_per_token"] > 0 and row["bytes_down_per_token"] > 0
    ar, dsd_row, fsd, guesses = report["rows"]
    assert ar["speedup"] == 1.0 and ar["speedup_spread"] == 0.0 and ar["tau"] == 1.0
    assert ar["settings"] == {} and ar["miss_rate"] is None and ar["draft_round_ms"] is None
    assert dsd_row["settings"] == {"proof": "preset", "shape": "preset", "draft_length": 4}
    assert ar["draft_prefill_ms"] is None and dsd_row["draft_prefill_ms"] > 0
    assert dsd_row["miss_rate"] is None
    assert guesses["settings"]["predraft_workers"] == 2 and fsd["settings"]["predraft_workers"] == 6
    assert dsd_row["tau"] == fsd["tau"] == guesses["tau"] > 1.0
    assert 0.0 <= guesses["miss_rate"] <= 1.0
    assert guesses["exits"] == 0.0 and guesses["mean_exit"] is None
    with Image.open(plot) as picture:
        assert picture.width > 500
    assert threading.active_count() <= threads  # those of other tests may end


def test_a_stretched_clock_is_kept_and_reported(pair, capsys, tmp_path):
    """At a fifth of the time a forward of the target still takes 124 ms, and is reported as 620."""
    file = tmp_path / "modes.json"
    code, out, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--modes", "ar,dsd,fsd", "--images", "1", "--max-tokens", "6",
        "--time-scale", "0.2", "--json", file,
    )  # fmt: skip
    assert code == 0, err
    assert "the clock is stretched" in out and "multiplied by 0.2" in out
    report = json.loads(file.read_text())
    for row in report["rows"]:
        assert row["verify_round_ms"] is None or row["verify_round_ms"] >= 620
        assert row["link_delay_ms"] is None or row["link_delay_ms"] >= 119
        assert row["seconds_per_reply"] >= 0.86  # one forward and one round trip at the least
    # The first token of a reply is drafted from the prefill's logits: it costs no forward of its own.
    assert report["rows"][1]["draft_round_ms"] >= 2 * 72
    fsd = report["rows"][2]
    assert fsd["exits"] > 0.0 and 1.0 <= fsd["mean_exit"] <= 2.0


def test_a_real_websocket_under_the_emulated_link(pair):
    variants = parse_modes("ar fsd:pipeline_depth=2", {"max_tokens": 8})
    report = measure_modes(load_profile("loopback"), variants, 1, *models(pair), transport="websocket")
    assert report["exact"] and report["transport"] == "websocket"


def test_a_verifier_of_its_own_process_at_real_speed(pair, capsys, tmp_path):
    """Each side on a core; transformers' generate says the same tokens; figures from the third reply on."""
    before, file = os.sched_getaffinity(0), tmp_path / "real.json"
    code, out, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--profile", "wifi6-lan", "--transport", "process", "--images", "3",
        "--max-tokens", "8", "--modes", "ar dsd", "--json", file,
    )  # fmt: skip
    assert code == 0, out + err
    report = json.loads(file.read_text())
    assert report["exact"] and report["generate"]["same_tokens"] and report["generate"]["of"] == 1
    assert len(report["cores"]) == min(2, len(before) // 2 * 2) and os.sched_getaffinity(0) == before
    ar, dsd_row = (row["settled"] for row in report["rows"])
    assert ar["over_ar"]["value"] == 1.0 and dsd_row["over_ar"]["value"] > 0
    assert dsd_row["seconds"]["of"] == 1 and dsd_row["over_generate"]["value"] > 0
    assert report["limit"] is None and report["rows"][1]["link_delay_ms"] >= 2


def test_both_sides_in_one_process_at_real_speed(pair, capsys, tmp_path):
    """As ``dsd decode`` without a verifier; fsd rests where it costs more than it gains, and says the same."""
    file = tmp_path / "one.json"
    code, out, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--profile", "loopback", "--transport", "one-process", "--images", "3",
        "--max-tokens", "8", "--modes", "ar dsd fsd", "--json", file,
    )  # fmt: skip
    assert code == 0, out + err
    report = json.loads(file.read_text())
    assert report["exact"] and report["generate"]["same_tokens"] and report["cores"] == []
    assert report["transport"] == "one-process" and report["rows"][2]["settled"]["over_generate"]["value"] > 0


def test_each_assumption_of_a_profile_is_left_out_in_turn(pair, capsys, tmp_path):
    file = tmp_path / "assumptions.json"
    code, out, err = dsd_lab(
        capsys, "bench", "modes", *pair, "--without", "each", "--modes", "ar,dsd", "--images", "1",
        "--time-scale", "0.02", "--json", file,
    )  # fmt: skip
    assert code == 0, out + err
    report = json.loads(file.read_text())
    assert report["exact"] and report["times"]["thread_growth"] == 1.0
    left_out = [tuple(row["without"]) for row in report["rows"]]
    assert left_out[::2] == [(), ("prefill",), ("exits",), ("batch",), ("threads",), ASSUMPTIONS]
    limits = {tuple(row["without"]): row["limit"] for row in report["rows"]}
    # With prompts for free, the target's passes are a larger part of what is left.
    assert (
        limits["prefill",]["seconds"] < limits[()]["seconds"] and limits["prefill",]["speedup"] > limits[()]["speedup"]
    )


def test_a_mode_that_decodes_other_tokens_fails_the_run(pair, capsys, monkeypatch, tmp_path):
    def corrupted(measured, *args, **kwargs):
        reply = measured[1].replies[0]
        wrong = dataclasses.replace(reply, tokens=[reply.tokens[0] + 1, *reply.tokens[1:]])
        return make_report([measured[0], Measured(measured[1].variant, [wrong])], *args, **kwargs)

    monkeypatch.setattr(modes, "make_report", corrupted)
    file = tmp_path / "modes.json"
    code, out, _ = dsd_lab(
        capsys, "bench", "modes", *pair, "--profile", "loopback", "--modes", "ar,dsd", "--images", "1",
        "--max-tokens", "4", "--json", file,
    )  # fmt: skip
    assert code == 1
    assert "NOT EXACT: dsd differs from ar on picture 0" in out
    assert json.loads(file.read_text())["exact"] is False


def test_without_ar_there_are_no_speedups(pair, tmp_path):
    variants = crossed(
        parse_modes("dsd fsd", {"max_tokens": 6}),
        [parse_sweep("predraft_workers=1,2"), parse_sweep("client_queue=priority,fifo")],
    )
    sweeps = [("predraft_workers", [1, 2]), ("client_queue", ["priority", "fifo"])]
    report = measure_modes(load_profile("loopback"), variants, 1, *models(pair), sweeps=sweeps)
    assert [row["speedup"] for row in report["rows"]] == [None] * 5
    assert "not measured" in modes.BENCH.render(report)
    modes.BENCH.draw(report, tmp_path / "grid.svg")
    assert (tmp_path / "grid.svg").stat().st_size > 1000


# ------------------------------------------------------------------------------------- modes and sweeps


def labels(variants: list[Variant]) -> list[str]:
    return [variant.label for variant in variants]


def test_modes_are_separated_by_commas_or_spaces_and_may_have_settings():
    assert labels(parse_modes("ar,dsd fsd,", {})) == ["ar", "dsd", "fsd"]
    ar, fsd = parse_modes("ar fsd:exit_layers=2,4+predraft_workers=3", {"draft_length": 7})
    assert (ar.decode.draft_length, fsd.decode.draft_length) == (7, 7)
    assert (fsd.decode.exit_layers, fsd.decode.predraft_workers) == ("2,4", 3)
    assert "predraft_source" in fsd.settings and ar.settings == {}


def test_a_length_is_the_profiles_where_none_is_given():
    (given,) = parse_modes("dsd", {}, gamma=6)
    assert given.decode.draft_length == 6
    (given,) = parse_modes("dsd", {"draft_length": 3}, gamma=6)
    assert given.decode.draft_length == 3
    with pytest.raises(BenchError, match="makes no use of tree_budget"):
        parse_modes("dsd:tree_budget=4", {})


def test_sweeps_are_crossed_where_they_matter():
    sweeps = [parse_sweep("gamma=1..2"), parse_sweep("predraft_workers=1,3")]
    assert labels(crossed(parse_modes("ar dsd fsd", {}), sweeps)) == [
        "ar",
        "dsd:draft_length=1",
        "dsd:draft_length=2",
        "fsd:draft_length=1+predraft_workers=1",
        "fsd:draft_length=1+predraft_workers=3",
        "fsd:draft_length=2+predraft_workers=1",
        "fsd:draft_length=2+predraft_workers=3",
    ]
    assert labels(crossed(parse_modes("fsd:predraft_workers=9 fsd", {}), sweeps[1:])) == [
        "fsd:predraft_workers=9", "fsd:predraft_workers=1", "fsd:predraft_workers=3",
    ]  # fmt: skip


def test_what_cannot_be_measured_gives_one_sentence(pair, capsys):
    for options, said in [
        (["--modes", "quickly"], "unknown mode 'quickly'"),
        (["--modes", "fsd:workers=1"], "unknown setting 'workers'"),
        (["--modes", "fsd:predraft_workers=many"], "give a whole number"),
        (["--modes", "ar:gamma=3"], "mode ar makes no use of draft_length"),
        (["--modes", "dsd:temperature=1"], "give it as --temperature"),
        (["--sweep", "gamma=9..1"], "is empty"),
        (["--sweep", "gamma=1..900"], "over 200"),
        (["--sweep", "gamma=1,2", "--sweep", "draft_length=3"], "swept twice"),
        (["--modes", "dsd", "--sweep", "predraft_workers=1,2"], "no mode here makes use of"),
        (["--profile", "mars"], "unknown profile 'mars'"),
        (["--time-scale", "nan"], "time-scale is nan"),
        (["--profile", "lte", "--time-scale", "0.5"], "no time-scale changes"),
        (["--transport", "process"], "which --transport process cannot"),
        (["--without", "tea"], "there is no assumption 'tea'"),
        (["--profile", "lte", "--without", "exits"], "nothing to leave out"),
        (["--plot", "no/such/place/plot.png"], "no directory"),
    ]:
        code, out, err = dsd_lab(capsys, "bench", "modes", *pair, *options)
        assert code == 2 and out == ""
        assert said in err and err.count("\n") == 1


# ----------------------------------------------------------------------------------------------- soak


def test_a_soak_watches_what_the_process_holds(pair, capsys, tmp_path):
    file = tmp_path / "soak.json"
    code, out, err = dsd_lab(
        capsys, "bench", "soak", *pair, "--replies", "60", "--mode", "fsd:predraft_workers=2",
        "--max-tokens", "8", "--json", file,
    )  # fmt: skip
    assert code == 0, out + err
    report = json.loads(file.read_text())
    assert report["replies"] == 60 and report["steady"] is True
    assert report["rows"][0].keys() >= {"replies", "memory_mb", "threads", "sessions", "caches"}
    assert report["rows"][-1]["sessions"] == 1
    assert set(report["growth"]) == set(report["rows"][0]) - {"replies"}
    assert "threads: steady" in out


def test_a_growing_process_is_reported():
    from dsd_lab.bench.soak import _judged

    still = [{"replies": n, "memory_mb": 100.0, "threads": 9} for n in range(40)]
    assert _judged(still, {"memory_mb": 10.0})["steady"]
    for name, step in (("memory_mb", 1.0), ("threads", 0.2)):
        growing = [{**sample, name: sample[name] + step * n} for n, sample in enumerate(still)]
        judged = _judged(growing, {"memory_mb": 10.0})
        assert not judged["steady"]
        assert judged["growth"][name]["growth"] > judged["growth"][name]["bound"]


def test_a_soak_that_cannot_be_run_gives_one_sentence(pair, capsys):
    for options, said in [
        (["--replies", "3"], "replies is 3"),
        (["--max-growth-mb", "0"], "max-growth-mb is 0"),
        (["--mode", "ar,dsd"], "several modes"),
    ]:
        code, _out, err = dsd_lab(capsys, "bench", "soak", *pair, *options)
        assert code == 2 and said in err and err.count("\n") == 1


def test_every_decode_setting_is_an_option_of_the_bench():
    given = vars(Decoding())
    assert given.keys() == {field.name for field in dataclasses.fields(DecodeSettings)} - {"mode"}
