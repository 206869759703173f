from __future__ import annotations

import math

import pytest
from scipy.stats import binomtest

from dsd_lab.pair.intervals import bootstrap, ratio, share, wilson


@pytest.mark.parametrize(("hits", "of"), [(0, 7), (7, 7), (1, 10), (97, 100), (333, 1000)])
def test_wilsons_interval_is_scipys(hits: int, of: int) -> None:
    expected = binomtest(hits, of).proportion_ci(0.95, method="wilson")
    assert wilson(hits, of) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_share_of_nothing_is_unknown() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert share([]) == {"value": None, "low": 0.0, "high": 1.0, "of": 0}
    assert share([True, False])["value"] == 0.5


def test_the_bootstrap_is_seeded_and_near_the_normal_interval_of_a_mean() -> None:
    values = [math.sin(n) for n in range(400)]
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values) != bootstrap(values, seed=1)
    spread = 1.96 * math.sqrt(0.5 / 400)  # of a sine
    assert low == pytest.approx(-spread, abs=0.01) and high == pytest.approx(spread, abs=0.01)


def test_a_ratio_is_one_of_sums_over_pairs() -> None:
    found = ratio([1.0, 6.0], [1.0, 3.0])
    assert found["value"] == pytest.approx(7 / 4)
    assert (found["low"], found["high"], found["of"]) == (1.0, 2.0, 2)
    assert ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])["low"] == 2.0
    assert ratio([])["value"] is None
