# SPDX-License-Identifier: Apache-2.0
"""The swim-lane: consistent spans, exits in their places, hits distinguished from misses."""

from __future__ import annotations

import pytest
from views_sample import sample_reply, sample_stream

from dsd_ros.observe.view.state import Round, ShownReply
from dsd_ros.observe.view.timeline import DRAFT, HIT, LANES, PARTLY, READ, exits_of, lanes_of, spans_of


def of_round(spans, number):
    return {span.lane: span for span in spans if span.round == number and span.what != READ}


def test_a_rounds_spans_follow_each_other_and_drafts_ahead_lie_within_the_round_before():
    spans = spans_of(sample_reply())
    assert [span.what for span in spans].count(READ) == 1 and {span.lane for span in spans} == set(LANES)
    for number in range(1, 6):
        lanes = of_round(spans, number)
        up, target, down = lanes["uplink"], lanes["target"], lanes["downlink"]
        assert up.end == pytest.approx(target.start) and target.end == pytest.approx(down.start)
        assert up.end - up.start == pytest.approx(0.01) == pytest.approx(down.end - down.start)
        assert target.end - target.start == pytest.approx(0.03)
    assert of_round(spans, 1)["draft"].what == DRAFT and of_round(spans, 1)["draft"].end == pytest.approx(0.022)
    assert of_round(spans, 1)["target"].label == "4+1"
    ahead = {span.round: span for span in spans if span.lane == "ahead"}
    assert {number: span.what for number, span in ahead.items()} == {2: HIT, 3: PARTLY, 5: HIT}
    for number, span in ahead.items():
        before = of_round(spans, number - 1)
        assert before["uplink"].start <= span.start < span.end <= before["downlink"].end + 1e-9


def test_the_first_right_exit_is_marked():
    found = [early for early in exits_of(sample_reply()) if early.round == 1]
    assert [(early.layer, early.held) for early in found] == [(2, False), (4, True), (6, False)]
    target = of_round(spans_of(sample_reply()), 1)["target"]
    assert all(target.start <= early.at <= target.end for early in found)


def test_passes_follow_each_other_while_the_robot_drafts():
    spans = spans_of(sample_stream())
    target = [(span.start, span.end, span.label) for span in spans if span.lane == "target"]
    assert [label for *_, label in target] == ["0+1", "3+1", "0+1", "1+1"]
    ends = [0.04, 0.05, 0.06, 0.07]  # the last two came together: the third had ended before the fourth began
    assert [end for _, end, _ in target] == pytest.approx(ends)
    assert [start for start, *_ in target] == pytest.approx([0.02, *ends[:-1]])
    drafts = [(span.start, span.end) for span in spans if span.lane == "draft"]
    assert drafts == [pytest.approx(span) for span in [(0.03, 0.04), (0.042, 0.05), (0.058, 0.07)]]
    assert {span.lane for span in spans} == set(lanes_of("stream")) and lanes_of("ar") == ("target",)


def test_odd_measurements_make_no_span_that_ends_before_it_begins():
    # A verifier that says it took longer than the robot waited: rounds sent ahead overlap.
    flight = Round(4, 4, ("a",) * 5, source="flight", began=0.1, draft=0.01, wait=0.02, verify=0.5)
    for reply in (ShownReply(), ShownReply(rounds=(flight, flight)), ShownReply(rounds=(Round(),))):
        assert all(span.end >= span.start for span in spans_of(reply))
    assert not [span for span in spans_of(ShownReply(rounds=(flight,))) if span.what == DRAFT]
