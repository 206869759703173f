# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from tiny_models import make_tiny_model

from dsd_lab.bench.overhead import measure_overhead, render, tree_costs


def test_every_transport_is_measured_between_processes(tmp_path, ros_domain):
    make_tiny_model(tmp_path / "target", seed=1)
    make_tiny_model(tmp_path / "draft", seed=1, noise=0.05, noise_seed=2)
    report = measure_overhead(
        ["local", "websocket", "dds"], replies=2, draft=str(tmp_path / "draft"), target=str(tmp_path / "target")
    )
    assert [row["transport"] for row in report["rows"]] == ["local", "websocket", "dds"]
    for row in report["rows"]:
        assert row["rounds"] > 0
        assert 0.0 < row["median_ms"] <= row["p95_ms"]
        assert row["transport"] in render(report)
    assert {row["nodes"] for row in report["trees"]} == {64}
    assert "mask and positions of a binary of 64" in render(report)
    ahead = report["ahead"]
    assert ahead["dsd_s"] > 0 and ahead["fsd_s"] > 0
    assert f"fsd over dsd {ahead['fsd_over_dsd']:.2f} times" in render(report)
    # Greedy and exact: every transport decoded the same replies, in the same number of rounds.
    assert len({row["rounds"] for row in report["rows"]}) == 1


def test_replies_over_a_websocket_are_timed_only_where_it_is_asked_for(tmp_path, monkeypatch):
    make_tiny_model(tmp_path / "target", seed=1)
    monkeypatch.setattr("dsd_lab.bench.overhead.drafting_ahead", lambda *_: pytest.fail("a websocket was opened"))
    report = measure_overhead(["local"], replies=1, draft=str(tmp_path / "target"), target=str(tmp_path / "target"))
    assert [row["transport"] for row in report["rows"]] == ["local"]
    assert "ahead" not in report and "a reply at real speed" not in render(report)


def test_what_cannot_be_measured_is_named():
    with pytest.raises(ValueError, match="pigeon"):
        measure_overhead(["pigeon"], replies=1, draft="", target="")
    with pytest.raises(ValueError, match="replies is 0"):
        measure_overhead(["local"], replies=0, draft="", target="")


def test_what_a_tree_costs_is_measured_by_shape():
    rows = tree_costs(passes=5, nodes=7)
    assert [row["tree"] for row in rows] == ["chain", "binary", "star"]
    assert all(row["nodes"] == 7 and 0.0 < row["median_ms"] <= row["p95_ms"] for row in rows)
