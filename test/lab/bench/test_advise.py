# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from dsd_lab.bench.advise import BENCH, WITHIN, Flags, measure
from dsd_lab.bench.harness import Decoding


def test_advice_stands_beside_what_is_measured(tiny_pair):
    target, draft = map(str, tiny_pair)
    report = measure(
        Flags(
            draft=draft, target=target, profiles="agx-72b-wifi", images=1, robots=2, shortest_ms=4,
            decoding=Decoding(max_tokens=8),
        ),
        lambda done, text: None,
    )  # fmt: skip
    whats = [row["what"] for row in report["rows"]]
    assert whats[:2] == ["times as fast", "s a reply, 2 robots alone"]
    assert all(row["error"] == pytest.approx(row["advised"] / row["measured"] - 1) for row in report["rows"])
    assert report["within"] == all(abs(row["error"]) <= WITHIN for row in report["rows"])
    assert "agx-72b-wifi" in BENCH.render(report)


@pytest.mark.slow
def test_advice_is_within_15_percent_of_what_is_then_measured_on_four_machines():
    report = measure(Flags(), lambda done, text: None)
    assert len({row["profile"] for row in report["rows"]}) == 4
    assert report["within"], BENCH.render(report)
