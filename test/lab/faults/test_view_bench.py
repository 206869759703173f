# SPDX-License-Identifier: Apache-2.0
"""How `dsd-lab bench view` evaluates its replies."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from dsd_lab.faults.view_bench import _data_url, median_difference


def test_the_data_is_received_from_where_the_page_has_it():
    page = "http://127.0.0.1:9090/?url=rerun%2Bhttp%3A%2F%2F127.0.0.1%3A9876%2Fproxy"
    line = f"[INFO] [1795325637.377] [view_node]: web view at {page}"
    assert _data_url(line) == "rerun+http://127.0.0.1:9876/proxy"
    assert _data_url("[INFO] [1795325637.377] [visual_node]: nobody looks") == ""


def test_a_reply_that_was_held_up_once_changes_nothing():
    quiet = [0.100 + 0.001 * (n % 5) for n in range(40)]
    longer = [value + 0.002 for value in quiet]
    longer[7] += 30.0
    middle, error = median_difference(longer, quiet)
    assert middle == pytest.approx(0.002) and error < 1e-6


def test_the_standard_error_is_that_of_a_median():
    numbers = random.Random(4)
    found = [median_difference([numbers.gauss(1.0, 0.3) for _ in range(100)], [0.9] * 100) for _ in range(400)]
    spread = statistics.stdev(middle for middle, _ in found)
    told = statistics.fmean(error for _, error in found)
    assert told == pytest.approx(0.3 * math.sqrt(math.pi / 200), rel=0.05)
    assert spread == pytest.approx(told, rel=0.15)
