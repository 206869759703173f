# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import numpy as np
import pytest

from dsd_lab.papers.acceptance import side_acceptance
from dsd_lab.papers.dragon_simulator import STRATEGIES, Setting, compare, speedup
from dsd_lab.papers.theory import TheoryError
from dsd_lab.reproduce import measure


def equation_9(c_device, c_cloud, rtt, a_cloud) -> float:
    if c_device <= c_cloud:
        return 1 / (1 - a_cloud / (1 + c_cloud / rtt))
    if c_device <= c_cloud + rtt:
        return 1 / (1 - (1 - c_device / (c_cloud + rtt)) * a_cloud)
    return 1.0


def test_the_speedup_is_equation_9():
    generator = np.random.default_rng(0)
    for _ in range(500):
        device, cloud, rtt = generator.exponential(1.0, 3) + 1e-3
        a = generator.random()
        assert speedup(device, cloud, rtt, a) == pytest.approx(equation_9(device, cloud, rtt, a))
        edge = cloud + rtt
        assert speedup(edge, cloud, rtt, a) == pytest.approx(equation_9(edge, cloud, rtt, a))
    for wrong in ((-1.0, 1.0, 1.0, 0.5), (1.0, 1.0, 1.0, 1.5), (0.0, 0.0, 1.0, 0.5)):
        with pytest.raises(TheoryError):
            speedup(*wrong)


def test_a_side_is_accepted_more_often_the_more_often_its_sample_is_taken():
    """Equation 5 and Theorem 4.2, on random pairs of distributions."""
    generator = np.random.default_rng(5)
    for _ in range(300):
        rows = np.exp(generator.normal(size=(2, 64)) * generator.uniform(0.3, 4.0))
        own, other = rows / rows.sum(1, keepdims=True)
        eta = float(generator.random())
        rates = [float(side_acceptance(own, other, eta, share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
        assert rates == sorted(set(rates))


def test_the_speedup_falls_with_the_gap_and_rises_with_acceptance():
    """Corollaries 6.3 and 6.4."""
    gaps = [speedup(device, 1.0, 4.0, 0.8) for device in (1.0, 2.0, 4.0)]
    rates = [speedup(1.0, 1.0, 4.0, acceptance) for acceptance in (0.2, 0.5, 0.8, 0.95)]
    assert gaps == sorted(gaps, reverse=True) and rates == sorted(rates)


def test_strategies_are_compared_over_the_same_answers():
    (found,) = compare(Setting(0.1, 0.05, 0.02, (0.8, 0.8), 30), [0.3], 3)
    seconds = found.seconds
    assert set(seconds) == {*STRATEGIES, "token-wise", "sequence-wise"}
    # Every token waits for the cloud's step and a round trip, which the jitter makes 20 % longer at most.
    assert 29 * 0.29 < seconds["token-wise"] < 30 * (0.1 + 0.38)
    assert seconds["sequence-wise"] == pytest.approx(3.0)
    assert 3.0 <= min(seconds["device"], seconds["auto"]) < seconds["token-wise"]
    assert found.over_best_side() == seconds["auto"] / min(seconds["device"], seconds["cloud"])
    # Where every draft holds, nothing but the device's own steps is waited for.
    (every,) = compare(Setting(0.1, 0.05, 0.02, (1.0, 1.0), 30), [0.0], 1)
    assert every.seconds["auto"] == every.seconds["device"] == pytest.approx(3.0)


def test_the_study_of_schedules_is_reported_and_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(measure.simulator, "compare", lambda setting, extras, count: compare(setting, extras[:2], 1))
    report = measure.measure_scheduling(tmp_path / "s.json", tmp_path / "s.png")
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(json.dumps(report))
    assert report["models"] == {}  # so that `dsd-lab figures` knows its state
    assert [row["extra"] for row in report["rows"]] == [0.0, 0.1] and (tmp_path / "s.png").stat().st_size > 10_000
