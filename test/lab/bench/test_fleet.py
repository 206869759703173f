# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from dsd_lab.bench.fleet import TABLE_9, draw, measure_fleet, render
from dsd_lab.bench.pace import Pace
from dsd_lab.bench.profiles import load_profile
from dsd_lab.report import BenchError
from dsd_ros.decoding.settings import DecodeSettings


def test_a_pass_over_many_costs_what_table_9_says():
    pace = Pace(17.94e-3, batch_curve=TABLE_9)
    assert [pace.seconds(n) for n in (1, 8, 32)] == pytest.approx([17.94e-3, 30.73e-3, 96.94e-3])


@pytest.mark.parametrize("values", [{}, {"mode": "coupled", "temperature": 0.8}, {"temperature": 1.0}])
def test_robots_share_passes_and_get_their_own_replies(tiny_pair, tmp_path, values):
    settings = DecodeSettings(**({"mode": "dsd", "max_tokens": 8} | values))
    paths = dict(zip(("target", "draft"), map(str, tiny_pair), strict=True))
    report = measure_fleet(load_profile("go2-a100"), settings, [1, 4], [1, 8], 1, **paths, time_scale=0.02)
    alone, turns, _, together = report["rows"]
    assert alone["largest_batch"] == turns["largest_batch"] == 1 < together["largest_batch"] <= 4
    assert together["mean_batch"] > 1 and together["tokens_per_second"] > 0
    assert report["exact"] is (None if values == {"temperature": 1.0} else True)
    assert "mean batch" in render(report)
    json.dumps(report)
    draw(report, tmp_path / "fleet.png")
    assert (tmp_path / "fleet.png").stat().st_size > 10_000


def test_what_cannot_be_measured_is_named():
    with pytest.raises(BenchError, match="robots is 0"):
        measure_fleet(load_profile("loopback"), DecodeSettings(), [0], [1], 1, "draft", "target")
