# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

from in_process import dsd_lab
from tiny_models import make_tiny_model

from dsd_lab.bench.overhead import tree_costs


def test_every_transport_is_measured_between_processes(tmp_path, ros_domain, capsys):
    make_tiny_model(tmp_path / "target", seed=1)
    make_tiny_model(tmp_path / "draft", seed=1, noise=0.05, noise_seed=2)
    pair = ("--draft", tmp_path / "draft", "--target", tmp_path / "target", "--replies", "2")
    code, out, err = dsd_lab(capsys, "bench", "overhead", *pair, "--json", tmp_path / "report.json")
    assert code == 0, err
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["transport"] for row in rows[:3]] == ["local", "websocket", "dds"]
    assert {row["nodes"] for row in rows[3:]} == {64} and "a binary of 64" in out
    assert all(0.0 < row["median_ms"] <= row["p95_ms"] and row["transport"] in out for row in rows)
    # Greedy and exact: every transport decoded the same replies, in the same number of rounds.
    assert len({row["rounds"] for row in rows[:3]}) == 1 and rows[0]["rounds"] > 0
    for options, named in ((["--transports", "pigeon"], "pigeon"), (["--replies", "0"], "replies is 0")):
        code, _, err = dsd_lab(capsys, "bench", "overhead", *pair, *options)
        assert code == 2 and named in err


def test_what_a_tree_costs_is_measured_by_shape():
    rows = tree_costs(passes=5, nodes=7)
    assert [row["tree"] for row in rows] == ["chain", "binary", "star"]
    assert all(row["nodes"] == 7 and 0.0 < row["median_ms"] <= row["p95_ms"] for row in rows)
