# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from dsd_ros.dragon.profiler import Acceptance, DecodeDelay, LinkEstimate, ProfilerError


def test_the_line_is_that_of_least_squares():
    generator = np.random.default_rng(0)
    lengths = list(range(64, 320))
    seconds = [0.03 + 4e-5 * t + generator.normal(0, 1e-3) for t in lengths]
    found = DecodeDelay()
    for t, taken in zip(lengths, seconds, strict=True):
        found.observe(t, taken)
    found.learn()
    slope, intercept = np.polyfit(lengths, seconds, 1)
    assert found.k_a / found.k_b == pytest.approx(slope, rel=1e-9)
    assert found.k_a == pytest.approx(np.mean((np.array(seconds) - intercept) * lengths), rel=1e-6)
    assert found.k_c == pytest.approx(intercept, rel=1e-9)
    assert found.at(100) == pytest.approx(intercept + 100 * slope)


def test_the_slope_follows_what_is_observed_as_the_paper_says():
    found = DecodeDelay()
    for t in range(10, 40):
        found.observe(t, 1.0 + 0.5 * t)
    found.learn()
    k_a, k_b, k_c = found.k_a, found.k_b, found.k_c
    assert k_c == pytest.approx(1.0) and k_a / k_b == pytest.approx(0.5)
    found.observe(10, 9.0)
    expected = (0.8 * k_a + 0.2 * (9.0 - k_c) * 10) / (0.8 * k_b + 0.2 * 100)
    assert found.at(20) == pytest.approx(20 * expected + k_c)
    assert found.k_c == k_c


def test_without_a_fit_the_first_step_is_believed_and_a_change_is_followed():
    found = DecodeDelay()
    assert found.at(50) == 0.0
    found.observe(400, 0.08)
    assert found.at(400) == pytest.approx(0.08)
    for t in range(401, 440):
        found.observe(t, 0.16)
    assert found.at(440) == pytest.approx(0.16, rel=0.05)


def test_the_round_trip_is_latency_and_bytes_over_rate():
    link = LinkEstimate()
    assert link.round_trip(10_000) == 0.0
    link.observe(100_000, 5.0)  # no latency is known to take off
    for _ in range(3):
        link.observe(0, 0.1)
    assert link.round_trip() == pytest.approx(0.1)
    assert link.round_trip(10_000) == pytest.approx(0.1)
    link.observe(100_000, 1.1)  # 100 kB/s
    assert link.round_trip(50_000) == pytest.approx(0.6)


def test_where_all_messages_are_long_a_round_trip_is_what_they_take():
    link = LinkEstimate()
    for _ in range(20):
        link.observe(200_000, 0.5)
    assert link.round_trip(200_000) == pytest.approx(0.5)
    link.observe(100, 0.1)  # a short one tells them apart
    assert link.round_trip() == pytest.approx(0.1)
    for _ in range(20):
        link.observe(200_000, 0.5)
    assert link.round_trip(200_000) == pytest.approx(0.5)
    assert link.round_trip(100_000) == pytest.approx(0.3, rel=1e-3)


def test_the_delay_of_an_unmeasured_side_is_learnt_from_its_drafts():
    found = DecodeDelay()
    for start in (100, 400):
        for t in range(start, start + 20):
            found.observe(t, 0.03 + 1e-4 * t)
        before = found.at(1000)
        found.learn()
        if start == 100:  # of nearly one length: no line
            assert found.k_c == 0.0 and found.at(1000) == before
    assert found.k_c == pytest.approx(0.03) and found.at(1000) == pytest.approx(0.13)
    falling = DecodeDelay()
    for t in range(50, 80):
        falling.observe(t, 1.0 / t)
    falling.learn()
    assert falling.k_c == 0.0  # a line that falls is none of decoding


def test_the_latency_is_the_mean_of_a_quick_and_a_slow_average():
    link = LinkEstimate()
    link.observe(0, 1.0)
    link.observe(0, 2.0)
    assert link.latency == pytest.approx((1.5 + 1.05) / 2)
    for _ in range(400):
        link.observe(0, 2.0)
    assert link.latency == pytest.approx(2.0)


def test_acceptance_is_a_mean_at_first_and_then_moves():
    found = Acceptance()
    for accepted in (True, False):
        found.observe(accepted)
    assert found.value == pytest.approx((4 * 0.5 + 1) / 6)
    for _ in range(100):
        found.observe(1.0)
    before = found.value
    found.observe(0.0)
    assert found.value == pytest.approx(0.95 * before)


def test_measurements_that_are_none_are_refused():
    for wrong in (
        lambda: DecodeDelay().observe(0, 1.0),
        lambda: DecodeDelay().observe(5, -1.0),
        lambda: LinkEstimate().observe(0, float("inf")),
        lambda: LinkEstimate().observe(-1, 1.0),
        lambda: Acceptance().observe(1.5),
        lambda: Acceptance().observe(float("nan")),
    ):
        with pytest.raises(ProfilerError):
            wrong()
