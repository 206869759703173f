# SPDX-License-Identifier: Apache-2.0
"""FSD's formulas, and where its measurements deviate from Table 4."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dsd_lab.cli.main import main
from dsd_lab.papers import theory
from dsd_lab.papers.formulas import FORMULAS, described
from dsd_lab.papers.theory import (
    SETUPS,
    Prices,
    TheoryError,
    api_cost,
    ar_seconds,
    fsd_seconds,
    fsd_speedup,
    limit_seconds,
    predict,
    sd_seconds,
)

GO2 = {"n": 200, "tau": 2.92, "gamma": 4, "t_p": 0.072, "t_q": 0.62, "t_c": 0.12, "r": 0.5563}


def test_no_method_that_drafts_sequences_beats_the_limit():
    """Dearer drafts, a longer link and a costly prompt raise it; alpha is found back from tau."""
    for alpha in (0.0, 0.5, 0.88, 1.0):
        tau = theory.expected_tokens(alpha=alpha, gamma=4)
        assert theory.acceptance_of(tau=tau, gamma=4) == pytest.approx(alpha, abs=1e-6)
    known = {"n": 36, "alpha": 0.88, "t_p": 0.072, "t_q": 0.62, "t_c": 0.12, "prefill": 0.795, "longest": 64}
    gamma, seconds = theory.sequence_limit(**known)
    assert gamma == 9  # a little longer to draft than a pass of the target takes, for a tau of 6.0
    assert seconds == pytest.approx(0.795 + 0.24 + 36 * 0.12 / (1 - 0.88**10) * 9 * 0.072, rel=1e-6)
    for name, more in (("t_p", 0.2), ("t_c", 0.5), ("prefill", 2.0), ("t_q", 0.9)):
        assert theory.sequence_limit(**known | {name: more})[1] > seconds
    assert theory.sequence_limit(**known | {"alpha": 0.95})[1] < seconds


def test_cost_of_other_prices_and_shapes():
    prices = Prices("own", 1.0, 2.0, 3.0, 4.0)
    cost = api_cost(prices, gamma=2, tau=2.0, requests=500_000, input_tokens=10, output_tokens=20)
    assert cost.ar == pytest.approx(0.5 * (10 * 3 + 20 * 4))
    assert cost.edge_cloud_sd == pytest.approx(0.5 * (10 * 3 + 10 * 4))
    assert cost.cloud_sd == pytest.approx(cost.edge_cloud_sd + 0.5 * (10 * 1 + 20 * 2))


def test_table_4():
    assert ar_seconds(n=200, t_q=0.62, t_c=0.12) == pytest.approx(124.24)
    times = {key: GO2[key] for key in ("n", "tau", "gamma", "t_p", "t_q", "t_c")}
    assert sd_seconds(**times) == pytest.approx(200 / 2.92 * 1.148)
    assert fsd_seconds(**times, r=1.0) == pytest.approx(sd_seconds(**times))
    assert fsd_seconds(**times, r=0.0, t_r=0.01) == pytest.approx(200 / 2.92 * 0.87)
    assert limit_seconds(n=200, tau=2.92, t_q=0.62, t_c=0.12) == pytest.approx(42.466 + 0.24, abs=1e-3)


def test_equation_9_is_table_4_without_a_link():
    for gamma, c, r in [(4, 0.17, 0.65), (7, 0.3, 0.25), (10, 0.9, 0.02)]:
        free = predict(n=50, tau=2, gamma=gamma, t_p=0.5 * c, t_q=0.5, t_c=0, r=r)
        assert free.fsd_over_sd == pytest.approx(free.equation_9)
        assert free.equation_9 == pytest.approx(fsd_speedup(gamma=gamma, c=c, r=r))
    # Appendix B: with c = 0.3 a speed-up of two needs r below about 10, 25 and 35 %.
    for gamma, r in [(4, 0.10), (7, 0.25), (10, 0.35)]:
        assert fsd_speedup(gamma=gamma, c=0.3, r=r) == pytest.approx(2, abs=0.08)
    # It also speaks of five and more for c above 0.5 and r below 10 %; equation 9 gives 4 there at best.
    assert fsd_speedup(gamma=10, c=0.5, r=0.1) == pytest.approx(4)


def test_no_scheme_beats_the_limit_and_a_lower_miss_rate_never_hurts():
    before = None
    for r in np.linspace(1, 0, 11):
        latency = predict(**{**GO2, "r": float(r)})
        assert latency.limit_seconds < latency.fsd_seconds <= latency.sd_seconds
        assert before is None or latency.fsd_seconds <= before
        before = latency.fsd_seconds


def test_where_the_papers_figures_part_from_its_formulas():
    """Its speculative decoding is slower than Table 4 has it; on the robot its FSD gains more than any r allows."""
    for setup in SETUPS:
        says = setup.predicted()
        assert 1.2 < says.sd_over_ar / setup.sd_over_ar < 1.8
        if "Go2" not in setup.name:
            assert 1.05 < says.fsd_over_sd / setup.fsd_over_sd < 1.35
    robot = SETUPS[-1]
    assert robot.predicted() == predict(**GO2)
    assert robot.predicted().cost_ratio == pytest.approx(0.11, abs=0.01)
    assert robot.predicted().fsd_over_sd == pytest.approx(1.13, abs=0.01)
    assert robot.sd_over_ar * robot.fsd_over_sd == pytest.approx(1.21, abs=0.01)
    # The reported 1.34 is what the formula gives when no draft is ever missing.
    assert predict(**{**GO2, "r": 0.0}).fsd_over_sd == pytest.approx(robot.fsd_over_sd, abs=0.01)


def test_what_no_formula_takes_is_refused():
    for change, message in [
        ({"tau": 5.5}, "gains 1 to 5"),
        ({"gamma": 0}, "at least 1 token"),
        ({"r": 1.01}, "share from 0 to 1"),
        ({"t_q": 0.0}, "above 0"),
        ({"t_c": -0.1}, "0 or more"),
        ({"t_r": float("nan")}, "0 or more"),
    ]:
        with pytest.raises(TheoryError, match=message):
            predict(**{**GO2, **change})


def test_a_formula_by_its_name(capsys, tmp_path):
    file = tmp_path / "found.json"
    words = "predict n=200 tau=3 gamma=4 t_p=0.01 t_q=0.1 t_c=0.02 r=0.1"
    assert main(["papers", "formula", *words.split(), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["sd_seconds"] == pytest.approx(12.0) and found["fsd_over_sd"] == pytest.approx(180 / 144)
    assert "fsd_over_sd" in capsys.readouterr().out
    for words, name, value in (
        ("api_cost draft_in=0.1 draft_out=0.1 target_in=0.9 target_out=0.9", "edge_cloud_sd", 270),
        ("distributions config=2,2,2", "distributions", 7),
        ("total_acceptance rates=0.6,0.4", "total_acceptance", 0.76),
        ("truncation_bounds beta=0.8 sigma=0.05", "truncation_bounds", [0.75, 0.85]),
        ("dragon_speedup c_device=0.1 c_cloud=0.05 rtt=0.3 a_cloud=0.8", "dragon_speedup", 7 / 3),
    ):
        assert main(["papers", "formula", *words.split(), "--json", str(file)]) == 0
        assert json.loads(file.read_text())[name] == pytest.approx(value)
    words = ["proof=coupled", "alpha=0.5", "config=1,1", "vocabulary=152064"]
    assert main(["papers", "formula", "payload", *words]) == 0
    assert all(described(name) for name in FORMULAS)


def test_bad_input_ends_with_a_sentence(capsys, tmp_path, monkeypatch):
    for line, message in [
        ("papers formula predct", "there is no formula 'predct'"),
        ("papers formula api_cost draft_in=1", "needs draft_out, target_in, target_out"),
        ("papers formula api_cost draft_in=1 draft_out=1 target_in=1 target_out=nan", "0 or more"),
        ("papers formula fsd_speedup gamma=4.5 c=0.1 r=0.5", "gamma is '4.5'; give int"),
        ("papers formula fsd_speedup gamma=4 tua=3", "'tua=3' is no argument"),
    ]:
        monkeypatch.chdir(tmp_path)
        assert main(line.split()) == 2
        assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []
