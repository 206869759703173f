# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dsd_lab.papers.dragon_schedules import Schedule, latency
from dsd_ros.dragon.scheduler import Estimates, delta_z, switches, wait, won_back


def test_delta_z_is_the_difference_of_both_latencies():
    generator = np.random.default_rng(0)
    cases = dict.fromkeys(range(4), 0)
    for _ in range(5000):
        cloud, rtt = generator.exponential(1.0, 2)
        device = generator.choice([cloud, cloud + rtt, max(0.0, cloud - rtt), generator.exponential(1.5)])
        shares = generator.choice([0.0, 1.0, generator.random()], 2)
        found = delta_z(device, cloud, rtt, *shares)
        z = latency(device, cloud, rtt, shares[1]) - latency(cloud, device, rtt, shares[0])
        assert found == pytest.approx(z, abs=1e-12)
        cases[sum(device > edge for edge in (cloud - rtt, cloud, cloud + rtt))] += 1
    assert min(cases.values()) > 200
    assert delta_z(1.0, 1.0, 0.0, 0.5, 0.5) == 0.0
    assert delta_z(0.0, 0.0, 0.0, 0.0, 1.0) == 0.0


def test_the_static_and_the_random_schedule():
    guess = Estimates(1.0, 0.1, 0.1, 0.1, 0.9)
    for current in ("device", "cloud"):
        for fixed in ("device", "cloud"):
            assert Schedule(fixed).switches(guess, current, True, True) == (fixed != current)
    chosen = [Schedule("random", seed).switches(guess, "device", True, True) for seed in range(40)]
    assert 8 < sum(chosen) < 32
    one, again = Schedule("random", 3), Schedule("random", 3)
    for _ in range(20):
        assert one.switches(guess, "device", True, True) != again.switches(guess, "cloud", True, True)
    with pytest.raises(ValueError, match="schedule is best"):
        Schedule("best")


def test_the_papers_schedule_follows_the_sign_of_delta_z():
    guess = Estimates(0.1, 0.1, 0.3, 0.9, 0.6)  # delta Z: (0.9 - 0.6) 0.3 = 0.09
    other = Estimates(0.1, 0.1, 0.3, 0.6, 0.9)
    rule = Schedule("delta-z")
    assert rule.switches(guess, "device", True, True) and not rule.switches(guess, "cloud", True, True)
    assert rule.switches(other, "cloud", True, True) and not rule.switches(other, "device", True, True)
    assert not rule.switches(Estimates(0.1, 0.1, 0.006, 0.9, 0.6), "device", True, True)  # too little is gained


def test_a_wait_is_for_the_later_draft_where_the_verdict_is():
    assert wait(1.0, 0.5, 0.25, False) == 1.0
    assert wait(1.0, 0.9, 0.25, False) == 1.15
    assert wait(1.0, 0.9, 0.25, True) == 1.25
    assert wait(0.1, 0.9, 0.25, True) == 0.9


def test_aggregation_goes_where_a_rejected_draft_has_to_be_made_again():
    guess = Estimates(0.1, 0.1, 1.0, 0.9, 0.9)
    assert switches(guess, "device", True, False, own_ahead=3)
    assert switches(guess, "cloud", False, True, own_ahead=3)
    assert not switches(guess, "device", False, True, other_ahead=3)
    assert not switches(guess, "device", True, True, own_ahead=0, other_ahead=3)


def test_aggregation_stays_where_drafts_hold_less():
    guess = Estimates(0.1, 0.1, 1.0, 0.2, 0.98)
    assert not switches(guess, "device", False, True, other_ahead=5)
    assert switches(guess, "cloud", False, True, own_ahead=5)


def test_without_a_link_to_cross_no_side_switches():
    guess = Estimates(0.1, 0.05, 0.0, 0.5, 0.9)
    for held in product((True, False), repeat=2):
        for current in ("device", "cloud"):
            assert not switches(guess, current, *held)


def test_what_is_won_back_of_a_wait_are_the_drafts_that_hold():
    for count, share in ((1, 0.9), (4, 0.5), (7, 0.99)):
        useful = sum(share**k for k in range(1, count + 1))
        assert won_back(count * 0.1, 0.1, share) == pytest.approx(0.1 * useful)
    assert won_back(0.3, 0.1, 1.0) == pytest.approx(0.3) == pytest.approx(won_back(0.3, 0.1, 1 - 1e-9))
    assert won_back(0.3, 0.1, 0.0) == won_back(-1.0, 0.1, 0.9) == won_back(0.3, 0.0, 0.9) == 0.0


def test_a_wait_during_which_the_slower_side_drafts_on_is_no_reason_to_switch():
    estimates = Estimates(0.1, 0.02, 0.32, 0.9, 0.9)
    # The cloud's draft was rejected; the device makes three of its own until the next one is there.
    assert not switches(estimates, "device", True, False, own_ahead=0)
