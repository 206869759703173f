# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from dsd_lab.report import ratio, share


def test_a_share_has_wilsons_interval() -> None:
    for hits, of in [(0, 7), (7, 7), (1, 10), (97, 100), (333, 1000)]:
        found = share([True] * hits + [False] * (of - hits))
        assert (found["value"], found["of"]) == (hits / of, of)
        z, p = 1.959964, hits / of
        middle, half = p + z * z / (2 * of), z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
        expected = ((middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of))
        assert (found["low"], found["high"]) == pytest.approx(expected, abs=1e-6)


def test_figures_of_nothing_are_none() -> None:
    assert share([]) == {"value": None, "low": 0.0, "high": 1.0, "of": 0}


def test_the_bootstrap_is_seeded_and_near_the_normal_interval_of_a_mean() -> None:
    values = [math.sin(n) for n in range(400)]
    found = ratio(values)
    assert found == ratio(values)
    spread = 1.96 * math.sqrt(0.5 / 400)  # of a sine
    assert (found["low"], found["high"]) == pytest.approx((-spread, spread), abs=0.01)


def test_a_ratio_is_one_of_sums_over_pairs() -> None:
    found = ratio([1.0, 6.0], [1.0, 3.0])
    assert found["value"] == pytest.approx(7 / 4)
    assert (found["low"], found["high"], found["of"]) == (1.0, 2.0, 2)
    assert ratio([])["value"] is None
