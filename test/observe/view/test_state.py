# SPDX-License-Identifier: Apache-2.0
"""The state of a view: rounds add up, paths stay bounded, figures are correct."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from dsd_ros.navigation.safety.causes import WAITING
from dsd_ros.observe.view import state
from dsd_ros.observe.view.figures import Figures, ReplyFigures, size
from dsd_ros.observe.view.overlay import token_run
from dsd_ros.observe.view.run_state import RunState
from dsd_ros.observe.view.state import Round, ShownReply, Walk, motion_of


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
        (0.5, math.pi / 2, (0.5, 2.0, math.pi)),
        (0.0, 0.0, (1.0, 2.0, math.pi / 2)),
    ],
)
def test_an_action_leads_where_it_says(ahead, turn, end):
    poses = motion_of((1.0, 2.0, math.pi / 2), ahead, turn)
    assert poses[0] == (1.0, 2.0, math.pi / 2)
    assert poses[-1] == pytest.approx(end)


def test_figures_of_a_stream_say_what_its_drafts_gave():
    figures = Figures()
    figures.add_reply(ReplyFigures("stream", "dds", 40, 20, 2.0, 0.2, draft_share=0.5, sooner=1.5))
    figures.add_reply(ReplyFigures("stream", "dds", 10, 9, 1.1, 0.2, draft_share=0.1, sooner=1.0))
    figures.add_reply(ReplyFigures("stream", "dds", 1, 1, 1.0, 0.1))  # too short for an estimate
    rows = {name: (newest, run) for name, newest, run in figures.rows()}
    assert rows["tokens from drafts"] == ("0 %", "41 %") and rows["passes per token"] == ("1.00", "0.59")
    assert rows["as fast as the target alone (estimate)"] == ("unknown", "1.25 x")
    assert not [name for name in rows if "tau" in name or "T_c" in name or "miss" in name or "round" in name]
    figures.add_reply(ReplyFigures("ar", "dds", 10, 10, 1.0, 0.2))
    assert not [name for name, *_ in figures.rows() if "draft" in name or "round" in name]


def test_what_the_drafts_gained_is_said_in_words():
    figures = Figures()
    assert figures.gained() == ""
    figures.add_reply(ReplyFigures("stream", "dds", 40, 20, 2.0, 0.2, draft_share=0.5))
    assert figures.gained() == "50 % of the tokens came from drafts."
    figures.add_reply(ReplyFigures("stream", "dds", 40, 20, 2.0, 0.2, draft_share=0.5, sooner=1.51))
    assert figures.gained().startswith("50 % of the tokens came from drafts: replies were about 1.5 times as fast as ")
    rounds, alone = Figures(), Figures()
    rounds.add_reply(ReplyFigures("dsd", "dds", 40, 10, 4.0, 0.2, draft_share=0.75))
    assert rounds.gained() == "75 % of the tokens came from drafts: 4.0 tokens a round in place of 1."
    alone.add_reply(ReplyFigures("ar", "dds", 40, 40, 1.0, 0.2))
    assert alone.gained() == ""


def test_the_rejected_nodes_of_a_tree_are_a_count():
    tree = Round(17, 2, ("I ", "see ", "a "), ("it ", "the ", "so "), depth=4)
    line = Round(4, 2, ("I ", "see ", "a "), ("it ", "the "), depth=4)
    texts = lambda one, mode: [text for text, *_ in token_run(ShownReply(rounds=(one,), mode=mode))]  # noqa: E731
    assert texts(tree, "mc-dsd") == ["I ", "see ", "[3]", "a "]
    assert texts(line, "dsd") == texts(line, "mc-dsd") == ["I ", "see ", "it ", "the ", "a "]
    assert texts(tree, "stream") == ["I ", "see ", "it ", "the ", "so ", "a "]  # its depth is another thing


def test_a_verifier_that_is_waited_for_is_not_lost_yet():
    run = RunState()

    def report(level: int, message: str, name: str = "draft_node") -> tuple[bool | None, bool]:
        run.on_health(SimpleNamespace(status=[SimpleNamespace(name=name, level=level, message=message)]), 1.0)
        run.show_link(1.0)
        ((_, link),) = run.news
        run.news.clear()
        return link["ok"], link["waits"]

    assert report(0, "session open") == (True, False)
    assert report(1, f"{WAITING}: no answer to round 3 within 1.0 s") == (False, True)
    assert report(2, "the link broke", "bridge_node") == (False, False)
    assert report(0, "connected", "bridge_node") == (False, True)
    run.show_link(20.0)
    assert run.news[-1][1]["gone"] and not run.news[-1][1]["waits"]


def test_figures_sum_up_a_run():
    figures = Figures()
    figures.add_reply(ReplyFigures("fsd", "dds", 30, 6, 5.0, 0.3, miss_rate=0.5, bytes_up=1500, predrafts_used=1))
    figures.add_reply(ReplyFigures("fsd", "dds", 10, 4, 2.5, 0.1, miss_rate=0.0, bytes_up=2_500_000))
    figures.add_step(2.0)
    figures.add_step(0.0)  # a first action has none in front of it
    rows = {name: (newest, run) for name, newest, run in figures.rows()}
    assert rows["tokens per round (tau)"] == ("2.50", "4.00")
    assert rows["seconds per reply"] == ("0.10", "0.20")
    assert rows["miss rate"] == ("0 %", "25 %")
    assert rows["seconds per action"][1] == "2.00"
    assert rows["bytes up"] == ("2.50 MB", "2.50 MB")
    assert "T_c, one way" in rows and "T_q, one round in the target" in rows
    assert [size(n) for n in (0, 999, 1500)] == ["0 B", "999 B", "1.5 kB"]
