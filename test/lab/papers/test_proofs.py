# SPDX-License-Identifier: Apache-2.0
"""DSSD's and TSLT's formulas by hand; DSSD's Table 1 is held to docs/papers.md."""

from __future__ import annotations

import pytest

from dsd_lab.papers.proofs import (
    TABLE_2,
    accepted_tokens,
    distribution_seconds,
    distributions,
    dsd_comm_seconds,
    dssd_comm_seconds,
    index_bits,
    nodes,
    payload,
    round_seconds,
    speedup,
)
from dsd_lab.papers.theory import TheoryError, expected_tokens


def test_dssd_equations():
    """Equations 5 to 13, of OPT in single precision at 100 Mbit/s and 20 ms."""
    t_v = distribution_seconds(entries=50272, b_prob=32, rate=100e6)
    assert t_v == pytest.approx(0.01608704)
    dsd = dsd_comm_seconds(sent=8, t_v=t_v, t_ntt=0.02)
    assert dsd == pytest.approx(0.14869632)
    dssd = dssd_comm_seconds(alpha=0.5, gamma=2, t_v=t_v, t_ntt=0.02)
    assert dssd == pytest.approx(0.02 + 0.75 * 0.01608704)
    for alpha in (0.0, 0.3, 0.9, 1.0):  # 10
        assert 0.02 <= dssd_comm_seconds(alpha=alpha, gamma=4, t_v=t_v, t_ntt=0.02) <= 0.02 + t_v
    late = dssd_comm_seconds(alpha=0.9, gamma=200, t_v=t_v, t_ntt=0.02)
    assert late == pytest.approx(0.02 + t_v)  # 11
    assert dssd_comm_seconds(alpha=1.0, gamma=4, t_v=t_v, t_ntt=0.02) == 0.02  # 12
    assert round_seconds(gamma=8, t_p=0.01, t_q=0.1, t_comm=dsd) == pytest.approx(0.32869632)
    assert speedup(tokens=3, seconds=0.2, t_q=0.1) == pytest.approx(1.5)


def test_where_the_papers_table_2_parts_from_its_formulas():
    for row in TABLE_2:
        # DSD's column is equation 5 over as many rounds as DSSD's column speaks of.
        assert row.predicted_dsd() == pytest.approx(row.dsd, rel=0.022)
        # DSSD's holds no more than their round trips: nothing like a whole distribution came down.
        assert row.rounds * row.t_ntt == pytest.approx(row.dssd, abs=0.011)
        assert row.predicted_dssd() - row.dssd > 0.47
    # 31 rounds for 128 tokens gain 4.1 a round, where alpha = 0.61 makes 2.5 of gamma 8; and the 8 rounds of its
    # last row cannot reach 128 tokens at all.
    assert {row.rounds for row in TABLE_2} == {31, 8}
    assert expected_tokens(alpha=0.61, gamma=8) == pytest.approx(2.53, abs=0.01)
    assert 128 / 31 > 4.1
    assert 8 * (TABLE_2[-1].gamma + 1) < 128


def test_tslt_equations():
    """Equations 1 to 10 of its Table 1's vocabulary, half precision, and 26 to 28 of <2,2,2>."""
    assert [index_bits(v) for v in (2, 3, 1024, 1025, 32000, 152064)] == [1, 2, 10, 11, 15, 18]
    assert distribution_seconds(entries=32000, b_prob=16, b_idx=15, rate=1e6) == pytest.approx(0.992)
    # Its experiments speak of 0.5 Mbit, which is equation 3 without the ids.
    assert distribution_seconds(entries=32000, b_prob=16, rate=1e6) == pytest.approx(0.512)
    assert expected_tokens(alpha=0.5, gamma=3) == pytest.approx(1.875)
    assert expected_tokens(alpha=0.8, gamma=5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens(alpha=1.0, gamma=5) == 6 and expected_tokens(alpha=0.0, gamma=5) == 1
    assert (distributions([2, 2, 2]), nodes([2, 2, 2])) == (7, 14)
    assert (distributions([1] * 4), nodes([1] * 4)) == (4, 4)
    assert (distributions([3]), nodes([3]), distributions([4, 1, 2]), nodes([4, 1, 2])) == (1, 3, 9, 16)
    assert accepted_tokens([0.9, 0.5, 0.1]) == pytest.approx(0.9 + 0.45 + 0.045)
    comm = dsd_comm_seconds(sent=distributions([2, 2, 2]), t_v=0.05)
    whole = round_seconds(gamma=3, t_p=0.01, t_q=0.1, t_comm=comm)
    assert whole == pytest.approx(0.03 + 0.35 + 0.1)
    # 28 as printed, 1 / (x + 1) with x above 0, could show no speed-up at all.
    assert speedup(tokens=1 + accepted_tokens([1.0] * 3), seconds=whole - comm, t_q=0.1) == pytest.approx(
        4 * 0.1 / 0.13
    )


def test_payloads_by_hand():
    line = {"config": [1] * 4, "alpha": 0.5, "vocabulary": 152064, "b_prob": 16}
    count, index = 3, 18  # 0 to 4 accepted; ids
    full = payload("full", **line)
    assert full.up == 4 * (152064 * 16 + index) and full.down == count + index
    truncated = payload("truncated", kept=100, **line)
    assert truncated.up == 4 * (100 * (16 + index) + index) and truncated.down == full.down
    split = payload("split", **line)
    assert split.up == 4 * (16 + index) + 0.9375 * index
    assert split.down == count + 0.9375 * 152064 * 16 + 0.0625 * index
    sparse = payload("split", target_kept=50, **line)
    assert sparse.down == count + 0.9375 * 50 * (16 + index) + 0.0625 * index
    coupled = payload("coupled", **line)
    assert coupled.up == 4 * index and coupled.down == full.down
    tree = payload("truncated", config=[2, 2, 2], alpha=0.5, vocabulary=1024, kept=8)
    assert tree.up == 7 * 8 * (16 + 10) + 14 * (10 + 8)
    # The sibling of a first child that is rejected, and all below it: 1 + 7, 1 + 3, or 1 + 1 rows.
    split = payload("split", config=[2, 2, 2], alpha=0.5, vocabulary=1024)
    rows = 0.5 * 8 + 0.25 * 4 + 0.125 * 2
    assert split.up == 14 * (16 + 10 + 8) + 0.875 * 10
    assert split.down == 4 + rows * 1024 * 16 + 0.125 * 10


def test_what_no_formula_takes_is_refused():
    for call, message in [
        (lambda: expected_tokens(alpha=1.2, gamma=4), "share from 0 to 1"),
        (lambda: expected_tokens(alpha=0.5, gamma=0), "at least 1 token"),
        (lambda: accepted_tokens([0.5, -0.1]), "layer 2"),
        (lambda: index_bits(1), "at least 2"),
        (lambda: distribution_seconds(entries=5, b_prob=16, rate=0), "above 0"),
        (lambda: dssd_comm_seconds(alpha=0.5, gamma=4, t_v=-1), "0 or more"),
        (lambda: payload("none", config=[1], alpha=0.5, vocabulary=9), "no proof 'none'"),
        (lambda: payload("truncated", config=[1], alpha=0.5, vocabulary=9), "keep 1 or more"),
    ]:
        with pytest.raises(TheoryError, match=message):
            call()
