# SPDX-License-Identifier: Apache-2.0
"""The state of a view: rounds add up, paths stay bounded, figures are correct."""

from __future__ import annotations

import math

import pytest

from dsd_ros.observe.view import state
from dsd_ros.observe.view.figures import Figures, ReplyFigures, size
from dsd_ros.observe.view.state import Round, ShownReply, Walk, motion_of


def test_tau_counts_what_the_rounds_gained():
    reply = ShownReply("go", rounds=(Round(4, 2, ("a", "b", "c")), Round(4, 0, ("d",))))
    assert reply.tokens == 4 and reply.tau == 2.0
    assert ShownReply().tau == 0.0


def test_a_reply_keeps_its_newest_rounds(monkeypatch):
    monkeypatch.setattr(state, "ROUNDS_KEPT", 3)
    reply = ShownReply()
    for number in range(5):
        reply = reply.with_round(Round(accepted=number))
    assert [round_.accepted for round_ in reply.rounds] == [2, 3, 4]


def test_a_walk_keeps_poses_some_centimetres_apart_and_stays_bounded(monkeypatch):
    monkeypatch.setattr(state, "PATH_POINTS", 10)
    walk = Walk()
    assert walk.add((0.0, 0.0, 0.0)) and not walk.add((0.01, 0.0, 0.0))
    assert walk.add((0.01, 0.0, 0.5))  # a turn on the spot counts, too
    for number in range(100):
        walk.add((0.1 * number, 0.0, 0.0))
    assert len(walk.poses) <= 10
    assert walk.poses[0] == (0.0, 0.0, 0.0) and walk.poses[-1][0] == pytest.approx(9.9)


@pytest.mark.parametrize(
    ("ahead", "turn", "end"),
    [
        (0.5, 0.0, (1.0, 2.5, math.pi / 2)),
        (0.0, math.radians(30), (1.0, 2.0, math.radians(120))),
        (0.0, 0.0, (1.0, 2.0, math.pi / 2)),
    ],
)
def test_an_action_leads_where_it_says(ahead, turn, end):
    poses = motion_of((1.0, 2.0, math.pi / 2), ahead, turn)
    assert poses[0] == (1.0, 2.0, math.pi / 2)
    assert poses[-1] == pytest.approx(end)


def test_the_target_alone_is_estimated_from_its_own_passes():
    # Picture 0.2 s, then four rounds of 0.1 s each; 20 tokens take the target alone 19 more passes.
    reply = ReplyFigures(
        tokens=20, rounds=4, seconds=0.9, verify_seconds=0.2 + 0.1 + 3 * 0.1,
        verify_round_seconds=0.1, link_delay_seconds=0.05,
    )  # fmt: skip
    assert reply.alone_seconds == pytest.approx(0.3 + 19 * 0.1 + 0.1)
    assert reply.speedup == pytest.approx(2.3 / 0.9)
    assert ReplyFigures(tokens=3, rounds=1, seconds=1.0).speedup == 0.0  # nothing to reckon with


def test_figures_sum_up_a_run():
    figures = Figures()
    assert "no reply yet" in figures.markdown()
    figures.add_reply(ReplyFigures("fsd", "dds", 30, 6, 5.0, 0.3, miss_rate=0.5, bytes_up=1500))
    figures.add_reply(ReplyFigures("fsd", "dds", 10, 4, 2.5, 0.1, miss_rate=0.0, bytes_up=2_500_000))
    figures.add_step(2.0)
    figures.add_step(0.0)  # a first action has none in front of it
    rows = {name: (newest, run) for name, newest, run in figures.rows()}
    assert rows["tokens per round (tau)"] == ("2.50", "4.00")
    assert rows["seconds per reply"] == ("0.10", "0.20")
    assert rows["miss rate"] == ("0 %", "25 %")
    assert rows["seconds per action"][1] == "2.00"
    assert rows["bytes up"] == ("2.50 MB", "2.50 MB")
    assert rows["over the target alone (estimate)"] == ("unknown", "unknown")
    assert figures.markdown().startswith("**fsd** dds, 2 replies")
    assert [size(n) for n in (0, 999, 1500)] == ["0 B", "999 B", "1.5 kB"]
