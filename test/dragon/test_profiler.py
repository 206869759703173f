# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from dsd_ros.dragon.profiler import Average, Profile
from dsd_ros.dragon.scheduler import Estimates


def test_an_average_is_a_mean_at_first_and_then_moves():
    found = Average(0.2)
    assert found.value == 0.0
    for value in (1.0, 2.0, 6.0):
        found.observe(value)
    assert found.value == pytest.approx(3.0)
    for _ in range(60):
        found.observe(1.0)
    assert found.value == pytest.approx(1.0, abs=1e-4)
    found.observe(2.0)
    assert found.value == pytest.approx(1.2, abs=1e-3)


def test_of_an_unknown_side_half_the_drafts_are_accepted():
    profile = Profile()
    assert profile.estimates() == Estimates(0.0, 0.0, 0.0, 0.5, 0.5)
    for accepted in (True, False):
        profile.acceptance["device"].observe(accepted)
    assert profile.estimates().device_acceptance == pytest.approx((4 * 0.5 + 1) / 6)
    profile.delays["cloud"].observe(0.03)
    profile.link.observe(0.1)
    assert profile.estimates() == Estimates(0.0, 0.03, 0.1, profile.acceptance["device"].value, 0.5)
