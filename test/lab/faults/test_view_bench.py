# SPDX-License-Identifier: Apache-2.0
"""How `dsd-lab bench view` evaluates its replies."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest

from dsd_lab.faults.view_bench import _page, median_difference, receiver
from dsd_ros.observe.view.web import PageFeed, WebServer


def test_the_data_is_received_as_a_browser_would():
    assert _page("[INFO] [1795325637.377] [view_node]: live page at http://127.0.0.1:9090/") == "http://127.0.0.1:9090/"
    assert _page("[INFO] [1795325637.377] [visual_node]: nobody looks") == ""
    feed = PageFeed(16)
    with WebServer(feed, "127.0.0.1", 0) as server, receiver(server.page()) as sizes:
        deadline = time.monotonic() + 30.0
        while not (feed.watched and sizes):
            assert time.monotonic() < deadline
            time.sleep(0.01)


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
