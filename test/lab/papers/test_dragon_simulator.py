# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from dsd_lab.papers.dragon_schedules import latency
from dsd_lab.papers.dragon_simulator import JITTER_PERIOD, sample_acceptances, sequence_wise, simulate, steady_link
from dsd_lab.papers.theory import TheoryError

BOTH, DEVICE, CLOUD, NONE = (True, True), (True, False), (False, True), (False, False)


def test_timelines_worked_by_hand():
    for accepted, settings, times, delivered in [
        # The cloud's drafts are made at 1, 2, 3 and there at 2, 3, 4; the device's at 2, 4, 6.
        ([BOTH] * 3, {"strategy": "device"}, [2, 4, 6], 6),
        # The device's are in the cloud at 3, 5, 7, and the last verdict back at 8.
        ([BOTH] * 3, {"strategy": "cloud"}, [3, 5, 7], 8),
        # The verdict of 2 is in the cloud at 3, its next draft made at 4 and there at 5.
        ([DEVICE] * 3, {"strategy": "device"}, [2, 5, 8], 8),
        # The device starts again at 2 and at 4; the cloud's drafts wait.
        ([CLOUD] * 3, {"strategy": "device"}, [2, 4, 6], 6),
        # In the cloud, 3, the device is rejected: it hears at 4, drafts until 6, there at 7.
        ([CLOUD] * 3, {"strategy": "cloud"}, [3, 7, 11], 12),
        ([NONE] * 3, {"strategy": "device"}, [2, 5, 8], 8),
        # Nothing is drafted ahead of a verdict.
        ([BOTH] * 3, {"strategy": "device", "window": 1}, [2, 5, 8], 8),
        # Two ahead: the cloud's draft 2 waits for the verdict 0, at 3, and is made at 4.
        ([BOTH] * 4, {"strategy": "device", "window": 2}, [2, 4, 6, 8], 8),
    ]:
        run = simulate(accepted, 2.0, 1.0, steady_link(2.0), **settings)
        assert [seconds for seconds, _ in run.decided] == pytest.approx(times)
        assert run.seconds == pytest.approx(times[-1])
        assert run.delivered == pytest.approx(delivered)
        assert run.switches == 0


def test_a_switch_worked_by_hand():
    # Drafts of 1 s, 2 s each way. The cloud's draft 0 arrives at 3 and is rejected; aggregation goes with the verdict
    # to the cloud, 5; its draft 1 is made at 6, the device's has been there since 4. Token 2: made at 7, there at 5.
    run = simulate([DEVICE, BOTH, BOTH], 1.0, 1.0, steady_link(4.0), strategy="auto")
    assert run.decided == [(3.0, "device"), (6.0, "cloud"), (7.0, "cloud")]
    assert (run.switches, run.seconds, run.delivered) == (1, 7.0, 9.0)
    stays = simulate([DEVICE, BOTH, BOTH], 1.0, 1.0, steady_link(4.0), strategy="device")
    assert stays.decided == [(3.0, "device"), (8.0, "device"), (9.0, "device")]


@pytest.mark.parametrize("rates", [(1.0, 1.0), (0.9, 0.7), (0.6, 0.9), (0.0, 0.0)])
@pytest.mark.parametrize(("device", "cloud"), [(0.05, 0.05), (0.02, 0.08)])
def test_long_answers_take_what_equation_7_says(rates, device, cloud):
    accepted = sample_acceptances(600, *rates, 2)
    run = simulate(accepted, device, cloud, steady_link(0.2), strategy="device", window=600)
    expected = latency(device, cloud, 0.2, accepted[:, 1].mean())
    assert run.seconds / 600 == pytest.approx(expected, rel=0.02)
    run = simulate(accepted, device, cloud, steady_link(0.2), strategy="device", window=1)
    assert run.seconds / 600 == pytest.approx(max(device, cloud + 0.2), rel=0.01)


def test_a_slow_side_that_drafts_ahead_while_it_waits_beats_equation_7():
    accepted = sample_acceptances(600, 0.9, 0.8, 2)
    run = simulate(accepted, 0.1, 0.02, steady_link(0.3), strategy="device", window=600)
    expected = latency(0.1, 0.02, 0.3, accepted[:, 1].mean())
    assert 0.7 * expected < run.seconds / 600 < 0.9 * expected


@pytest.mark.parametrize(
    ("device", "cloud", "rates"),
    [(0.1, 0.02, (0.9, 0.9)), (0.1, 0.1, (0.95, 0.5)), (0.1, 0.1, (0.8, 0.8)), (0.05, 0.1, (0.6, 0.9))],
)
def test_scheduling_matches_the_best_side_and_beats_chance(device, cloud, rates):
    for extra in (0.1, 0.6):
        found = {"auto": 0.0, "device": 0.0, "cloud": 0.0, "random": 0.0}
        for seed in range(4):
            accepted = sample_acceptances(80, *rates, seed)
            for strategy in found:
                link = steady_link(0.02, extra, phase=seed)
                run = simulate(accepted, device, cloud, link, strategy=strategy, seed=seed)
                found[strategy] += run.delivered
        assert found["auto"] <= 1.05 * min(found["device"], found["cloud"])
        assert found["auto"] < found["random"]


def test_links_and_acceptances():
    link = steady_link(0.05, 0.5)
    times = np.linspace(0, JITTER_PERIOD, 1001)
    found = [link(time) for time in times]
    assert max(found) == pytest.approx(0.65, abs=1e-4)
    assert min(found) == pytest.approx(0.45, abs=1e-4)
    assert link(JITTER_PERIOD + 3.0) == pytest.approx(link(3.0))
    rates = sample_acceptances(40_000, 0.9, 0.4, 1).mean(axis=0)
    assert rates == pytest.approx([0.9, 0.4], abs=0.03)
    assert sequence_wise(10, 0.1, 0.02, steady_link(0.3)) == pytest.approx(1.0)
    assert sequence_wise(10, 0.1, 0.2, steady_link(0.3)) == pytest.approx(2.15)


def test_wrong_settings_are_refused():
    link = steady_link(0.1)
    for accepted, settings, reason in (
        ([], {}, "acceptances"),
        ([[True]], {}, "acceptances"),
        ([BOTH], {"window": 0}, "window"),
    ):
        with pytest.raises(TheoryError, match=reason):
            simulate(accepted, 0.1, 0.1, link, **settings)
    with pytest.raises(TheoryError, match="device is -1"):
        simulate([BOTH], -1.0, 0.1, link)
    with pytest.raises(ValueError, match="schedule is best"):
        simulate([BOTH], 0.1, 0.1, link, strategy="best")
