# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from dsd_lab.bench.plan import (
    WALKS_S,
    RecordedReply,
    RecordedRound,
    Workload,
    draw,
    plan,
    read_workload,
    render,
    simulate,
    walks_of,
)
from dsd_lab.bench.profiles import TABLE_9
from dsd_lab.cli.main import main
from dsd_lab.cli.plan import parse_passes
from dsd_lab.links.emulation import LinkProfile
from dsd_lab.report import BenchError

ROOT = Path(__file__).resolve().parents[3]


def workload(think_s=0.0, pass_s=0.01, rounds=1, **values):
    """Replies of equal rounds without an observation, on a link that takes no time."""
    reply = RecordedReply(4 * rounds, 0, (RecordedRound(think_s, 0, 0, 4),) * rounds)
    return Workload((reply,), LinkProfile(), ((1, pass_s),), 0.0, **values)


@pytest.mark.parametrize("robots", [1, 2, 3, 8, 20])
def test_robots_that_take_turns_are_machines_that_wait_for_one_mechanic(robots):
    """Closed, with fixed times: a cycle lasts max(think + pass, robots * pass)."""
    found = simulate(workload(0.3, 0.1, max_batch=1, max_batch_tokens=5), robots, replies=20, warm_up=5)
    cycle = max(0.3 + 0.1, robots * 0.1)
    assert found["tokens_per_second"] == pytest.approx(robots * 4 / cycle, rel=0.02)
    assert found["reply_seconds_median"] == pytest.approx(cycle, rel=0.02)


@pytest.mark.parametrize("robots", [1, 5, 8, 32])
def test_robots_in_step_share_every_pass(robots):
    curve = tuple((batch, 0.62 * factor) for batch, factor in TABLE_9)
    shared = dataclasses.replace(workload(0.3, rounds=5), pass_s=curve)
    found = simulate(shared, robots, replies=3, warm_up=0)
    seconds = 0.62 * float(
        {1: 1, 5: (0.75 * 24.63 + 0.25 * 30.73) / 17.94, 8: 30.73 / 17.94, 32: 96.94 / 17.94}[robots]
    )
    assert found["reply_seconds_p95"] == pytest.approx(5 * (0.3 + seconds))
    assert found["mean_batch"] == robots


def test_robots_a_moment_apart_fall_into_two_groups():
    """The first to send begins a pass, and those that come during it share the next, so passes hold about half."""
    curve = tuple((batch, 0.62 * factor) for batch, factor in TABLE_9)
    apart = dataclasses.replace(workload(0.3, rounds=20), pass_s=curve, spread_s=0.002)
    assert 8 <= simulate(apart, 16, replies=3, warm_up=0)["mean_batch"] <= 9


def test_the_wait_of_many_independent_robots_is_that_of_an_m_d_1_queue():
    """Pollaczek-Khinchine with deterministic service: rho s / (2 (1 - rho))."""
    gaps = tuple(-4.0 * math.log1p(-(place + 0.5) / 2000) for place in range(2000))  # exponential, mean 4 s
    queue = workload(pass_s=0.01, max_batch=1, walks_s=gaps)
    found = [simulate(queue, 200, replies=12, seed=seed) for seed in range(3)]
    rho = 200 * 0.01 / (4.0 + 0.01)
    wait = statistics.fmean(row["wait_seconds_mean"] for row in found)
    assert wait == pytest.approx(rho * 0.01 / (2 * (1 - rho)), rel=0.1)
    assert statistics.fmean(row["busy"] for row in found) == pytest.approx(rho, rel=0.05)


def test_link_and_prefill_of_a_robot_alone_add_up():
    link = LinkProfile(0.1, 0.05, 0.0, 8e5, 8e6)
    reply = RecordedReply(9, 20_000, (RecordedRound(0.05, 1000, 100, 4), RecordedRound(0.3, 1000, 100, 4)))
    found = simulate(Workload((reply,), link, ((1, 0.6),), 0.5), 1, replies=1, warm_up=0)
    first = (0.1 + 0.2) + 2 * 0.6 + 0.05 + 0.0001  # the draft came with the picture: one pass over two sequences
    assert found["reply_seconds_median"] == pytest.approx(first + 0.3 + (0.1 + 0.01) + 0.6 + 0.05 + 0.0001)


def test_a_target_that_decodes_alone_sends_nothing_back_and_forth_between_its_rounds():
    rounds = (RecordedRound(0.01, 0, 0, 0), *[RecordedRound(0.0, 0, 0, 0, asked=False)] * 9)
    alone = Workload((RecordedReply(10, 0, rounds),), LinkProfile(0.2, 0.2), ((1, 0.6),), 0.6)
    # The prefill tells the first token.
    assert simulate(alone, 1, replies=1, warm_up=0)["reply_seconds_p95"] == pytest.approx(0.2 + 0.6 + 9 * 0.6 + 0.2)


def test_a_fleet_gets_what_its_part_of_one_verifier_gets():
    one = workload(0.3, 0.05, rounds=4, walks_s=WALKS_S)
    many, few = simulate(one, 300, 30, replies=4), simulate(one, 10, 1, replies=40)
    for name in ("reply_seconds_median", "reply_seconds_p95", "mean_batch", "busy"):
        assert many[name] == pytest.approx(few[name], rel=0.1)
    assert many["tokens_per_second"] == pytest.approx(30 * few["tokens_per_second"], rel=0.1)


def test_a_plan_names_the_fewest_verifiers_for_each_limit(tmp_path):
    curve = tuple((batch, 0.1 * factor) for batch, factor in TABLE_9)
    asked = dataclasses.replace(workload(0.3, rounds=3, walks_s=WALKS_S), pass_s=curve)
    report = plan(asked, [5, 30], [1.5, 3.0])
    assert [(row["limit_s"], row["robots"]) for row in report["rows"]] == [(1.5, 5), (1.5, 30), (3, 5), (3, 30)]
    for row in report["rows"]:
        assert row["reply_seconds_p95"] <= row["limit_s"]
        if row["verifiers"] > 1:
            fewer = simulate(asked, row["robots"], row["verifiers"] - 1)
            assert fewer["reply_seconds_p95"] > 0.97 * row["limit_s"]
    assert report["rows"][1]["verifiers"] > report["rows"][3]["verifiers"] >= 1
    row = report["rows"][1]
    assert simulate(asked, 30, row["verifiers"]) | {"limit_s": 1.5} == row, "the same seed gives the same figures"
    assert "verifiers" in render(json.loads(json.dumps(report)))
    draw(report, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_simulation_agrees_with_the_fleets_that_were_measured():
    path = ROOT / "benchmarks/fleet.json"
    asked, rows = read_workload(path), json.loads(path.read_text())["rows"]
    assert [row["robots"] for row in rows] == [1, 2, 4, 8, 16]
    for row in rows:
        found = simulate(asked, row["robots"], replies=3, warm_up=0)
        for name in ("tokens_per_second", "reply_seconds_median", "reply_seconds_p95", "mean_batch"):
            assert found[name] == pytest.approx(row[name], rel=0.12), (row["robots"], name)


def test_a_limit_that_no_verifier_can_keep_is_named():
    with pytest.raises(BenchError, match=r"takes? a robot alone .* so 0.2 s cannot be"):
        plan(workload(0.3, 0.1), [5], [0.2])
    with pytest.raises(BenchError, match="robots is 0"):
        plan(workload(), [0])


def test_walks_come_from_a_recorded_run():
    walks = walks_of(ROOT / "test/bags/straight")
    assert len(walks) > 2 and min(walks) > 0.5
    assert statistics.fmean(walks) == pytest.approx(statistics.fmean(WALKS_S), abs=0.5)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "has no workload"),
        ('{"workload": null}', "has no workload"),
        ('{"workload": {"replies": [], "link": {}, "pass_s": [[1, 0.1]], "prefill_s": 0}}', "empty or negative"),
        ('{"workload": {"replies": [], "link": {"delay_up_s": -1}, "pass_s": [], "prefill_s": 0}}', "delay_up_s is -1"),
    ],
)
def test_a_file_that_is_no_measurement_is_one_sentence(tmp_path, capsys, content, named):
    path = tmp_path / "fleet.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=named):
        read_workload(path)
    assert main(["plan", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_plans_from_a_report(tmp_path, capsys):
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"workload": dataclasses.asdict(workload(0.3, 0.1, rounds=3))}))
    asked = ["--robots", "4,40", "--pass-ms", "1:20,8:30", "--bag", str(ROOT / "test/bags/straight")]
    assert main(["plan", str(path), *asked, "--json", str(tmp_path / "plan.json")]) == 0
    assert "robots on one verifier" in capsys.readouterr().out
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["workload"]["pass_s"] == [[1, 0.02], [8, 0.03]] and report["commit"]
    assert [row["robots"] for row in report["rows"]] == [4, 40, 4, 40]


@pytest.mark.parametrize("text", ["", "8:30", "1:20,1:30", "1:0", "1:nan", "1", "1:2:3", "a:b"])
def test_passes_that_cannot_be_are_named(text):
    with pytest.raises(ValueError, match="--pass-ms"):
        parse_passes(text)
