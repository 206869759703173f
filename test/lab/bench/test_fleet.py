# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from dsd_lab.bench.fleet import BENCH, Flags, measure
from dsd_lab.bench.harness import Decoding
from dsd_lab.bench.pace import Pace
from dsd_lab.bench.profiles import TABLE_9
from dsd_lab.cli.main import main
from dsd_ros.cloud.engine import VerifierEngine
from dsd_ros.cloud.metrics_server import MetricsServer
from dsd_ros.cloud.server import VerifierServer
from dsd_ros.cloud.settings import MetricsSettings, VerifierSettings
from dsd_ros.vlm.loading import ModelSettings, load_model


def test_a_pass_over_many_costs_what_table_9_says():
    pace = Pace(17.94e-3, batch_curve=TABLE_9)
    assert [pace.seconds(n) for n in (1, 8, 32)] == pytest.approx([17.94e-3, 30.73e-3, 96.94e-3])


def fleet(pair, **flags):
    """The report of a bench with these flags, over a pair (target, draft)."""
    target, draft = map(str, pair)
    return measure(Flags(draft=draft, target=target, **flags), lambda done, text: None)


@pytest.mark.parametrize("values", [{}, {"mode": "coupled", "temperature": 0.8}, {"temperature": 1.0}])
def test_robots_share_passes_and_get_their_own_replies(tiny_pair, tmp_path, values):
    sampled = {"temperature": values["temperature"]} if "temperature" in values else {}
    report = fleet(
        tiny_pair, mode=values.get("mode", "dsd"), robots="1,4", batches="1,8", replies=1, time_scale=0.02,
        decoding=Decoding(max_tokens=8, **sampled),
    )  # fmt: skip
    alone, turns, _, together = report["rows"]
    assert alone["largest_batch"] == turns["largest_batch"] == 1 < together["largest_batch"] <= 4
    assert together["mean_batch"] > 1 and together["tokens_per_second"] > 0
    assert report["exact"] is (None if values == {"temperature": 1.0} else True)
    assert together["share_of_n_alone"] == together["tokens_per_second"] / (4 * report["rows"][2]["tokens_per_second"])
    assert "of n x one" in BENCH.render(report)
    BENCH.draw(report, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").stat().st_size > 10_000


@pytest.mark.parametrize("mode", ["ar", "fsd:predraft_workers=2"])
def test_a_verifier_at_an_address_is_measured_by_its_own_metrics(tiny_pair, tmp_path, mode):
    target, draft = map(str, tiny_pair)
    report = tmp_path / "fleet.json"
    with (
        VerifierEngine(load_model(ModelSettings(target, threads=1))) as engine,
        VerifierServer(engine, VerifierSettings(port=0)) as server,
        MetricsServer(engine.metrics.registry, MetricsSettings()) as operators,
    ):
        words = f"--profile loopback --mode {mode} --robots 1,3 --replies 1 --max-tokens 8 --draft {draft}"
        told = ["--verifier", server.url, "--metrics", operators.url, "--json", str(report)]
        assert main(["bench", "fleet", *words.split(), *told]) == 0
        assert main(["bench", "fleet", *words.split(), *told[:2], "--metrics", server.url.replace("ws", "http")]) == 2
    found = json.loads(report.read_text())
    one, three = found["rows"]
    assert found["exact"] and found["models"]["target"]["fingerprint"] == engine.model.fingerprint
    assert one["mean_batch"] == 1 <= three["mean_batch"] <= 3
    assert one["pass_seconds"] > 0
    assert {one["max_batch"], three["largest_batch"]} == {None}


def test_what_a_greedy_robot_costs_the_others(tiny_pair):
    report = fleet(
        tiny_pair, profile="loopback", mode="dsd", robots="2", batches="8", replies=1, greedy_robot="pictures,tokens",
        decoding=Decoding(max_tokens=8),
    )  # fmt: skip
    (row,) = report["rows"]
    assert report["exact"] and list(row["beside"]) == ["pictures", "tokens"]
    assert all(found["round_seconds_median"] > 0 < found["reply_seconds_p95"] for found in row["beside"].values())
    printed = BENCH.render(report)
    assert "pictures of 16 megapixels" in printed and "replies without end" in printed


def test_a_slip_is_one_sentence(capsys):
    for words, named in [
        ("--mode dsd,fsd", "several modes"),
        ("--metrics http://127.0.0.1:9/metrics", "give --verifier too"),
        ("--robots 2,x", "--robots has 'x'"),
        ("--robots 65", "robots is 65"),
        ("--greedy-robot words", "no greedy robot is called 'words'; use pictures or tokens"),
        ("--verifier ws://127.0.0.1:9 --time-scale 0.5", "keeps its own times"),
    ]:
        assert main(["bench", "fleet", *words.split()]) == 2
        err = capsys.readouterr().err
        assert named in err and err.count("\n") == 1
