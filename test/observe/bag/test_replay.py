# SPDX-License-Identifier: Apache-2.0
"""What is read from a bag, the requests of a replay, and the report of differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from bag_maker import REPLY, SECOND, make_bag, png, put

from dsd_msgs.msg import SafetyState
from dsd_ros.cli.main import main
from dsd_ros.observe.bag.html_report import page
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.replay import ReplayOptions, ReplayReply, compare, history_of, prepare
from dsd_ros.observe.bag.replay_tokens import TrafficLog
from dsd_ros.observe.bag.report import as_json, round_lines, step_lines, summary_lines
from dsd_ros.observe.bag.run import picture_sent, read_run
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.observe.ros.message_types import definition
from dsd_ros.paths import models_directory
from dsd_ros.pictures import read_picture


def observation(session=1, reply=1, picture=b"p", verified=()):
    return SimpleNamespace(
        session=session, reply=reply, instruction="find it", image=picture, encoding="png", height=1, width=1,
        verified=list(verified),
    )  # fmt: skip


def verified(at, *tokens, session=1, reply=1):
    return SimpleNamespace(session=session, reply=reply, at=at, tokens=tokens)


def log(*messages):
    result = TrafficLog()
    for at, message in enumerate(messages):
        if hasattr(message, "image"):
            result.observation(message, at)
        else:
            result.verified(message)
    return result


@pytest.mark.parametrize(
    "messages",
    [
        (verified(1, 5), verified(0, 4), verified(0, 4), verified(0, 4, 5, 6)),  # late, doubled, and again as a whole
        # Another verifier goes on with it.
        (verified(0, 4), observation(session=2, verified=[4, 5]), verified(2, 6, session=2)),
    ],
)
def test_tokens_of_a_stream_are_read_off_the_traffic(messages):
    (reply,) = log(observation(), *messages).replies
    assert reply.tokens(3) == [4, 5, 6] and reply.tokens(4) is None
    # What overtakes its observation waits for it.
    assert log(messages[0], observation(), *messages[1:]).replies[0].tokens(3) == [4, 5, 6]


def test_another_picture_is_another_reply():
    replies = log(observation(), observation(session=2, picture=b"q"), observation(2, 2)).replies
    assert [reply.reply for reply in replies] == [1, 1, 2]


def test_a_reply_says_where_its_picture_was_taken_and_where_its_action_began():
    run = read_run(open_bag(Path(__file__).parents[2] / "bags" / "straight"))
    before, after = run.steps[1:3]
    assert before.executed == "forward 75 cm"
    assert math.dist(before.begun_at[:2], after.taken_at[:2]) == pytest.approx(0.75, abs=0.03)
    assert as_json(run)["replies"][1]["taken_at"] == before.taken_at == before.begun_at  # recorded at rest


def test_a_run_is_read_and_made_into_questions(tmp_path):
    bag = make_bag(tmp_path / "bag")
    assert bag.namespace == "/go2_1"
    run = read_run(bag)
    step = run.steps[0]
    assert (step.action, step.executed) == ("forward 25 cm", "forward 25 cm")
    assert step.stamp == 51 * SECOND + 7 and step.rounds[0]["bytes_up"] == 11
    task = prepare(bag, run, ReplayOptions())
    assert task.steps == [(step, png(1)[1])] and step.instruction == "find it" and history_of(run, step) == ()
    assert "step 2 is left out: the bag lacks its picture" in task.notes
    step.seen.encoding, step.seen.height, step.seen.width = "rgb8", 28, 42
    step.seen.picture = png(1)[0].tobytes()
    assert np.array_equal(read_picture(picture_sent(step)), png(1)[0])
    assert picture_sent(run.steps[1]) is None
    assert (task.settings.mode, task.settings.seed, task.settings.proof, task.settings.draft_length) == (
        "dsd",
        3,
        "full",
        4,
    )
    shipped = models_directory()
    assert (task.draft.path, task.target.path) == (str(shipped / "draft"), str(shipped / "target"))
    other = prepare(bag, run, ReplayOptions(mode="stream", draft_model="d", target_model="t"))
    assert (other.settings.mode, other.draft.path, other.target.path) == ("stream", "d", "t")


def test_differences_are_reported_by_step(tmp_path):
    step = read_run(make_bag(tmp_path / "bag")).steps[0]
    assert step.tokens is None and step.stats["tokens"] == 3  # of rounds, the count alone is compared
    assert compare(step, ReplayReply(REPLY, [4, 5, 6], 1, 0.1)).same
    assert compare(step, ReplayReply(REPLY, [4, 5, 6, 7], 1, 0.1)).changed == ("tokens",)
    step.tokens = [4, 5, 6]
    assert compare(step, ReplayReply(REPLY, [4, 5, 6], 1, 0.1)).same
    text = REPLY.replace("forward 25 cm", "stop")
    verdict = compare(step, ReplayReply(text, [4, 7], 1, 0.1))
    assert verdict.changed == ("reply", "action", "tokens")
    told = "\n".join(verdict.lines())
    for part in (REPLY, text, "51.000000007 s", "forward 25 cm -> stop", "3 -> 2, from token 2 on", "[5, 6] -> [7]"):
        assert part in told, part
    assert json.loads(json.dumps(verdict.as_json()))["replayed"]["action"] == "stop"


@pytest.mark.parametrize(
    ("parameters", "wishes", "sentence"),
    [
        ({"decode.temperature": 1.0}, ReplayOptions(), ""),
        ({"decode.temperature": 1.0}, ReplayOptions(mode="fsd"), ""),
        ({"decode.temperature": 1.0}, ReplayOptions(mode="dssd"), "draws others of the same distribution"),
        ({"decode.temperature": 1.0, "decode.mode": "coupled"}, ReplayOptions(mode="stream"), ""),
        ({"decode.temperature": 0.0}, ReplayOptions(mode="stream"), ""),
        ({"decode.temperature": -1.0}, ReplayOptions(), "settings this version does not accept"),
    ],
)
def test_sampled_replies_are_replayed_where_they_would_be_drawn_again(tmp_path, parameters, wishes, sentence):
    bag = make_bag(tmp_path / "bag", {"decode.mode": "dsd"} | parameters)
    if not sentence:
        assert prepare(bag, read_run(bag), wishes).steps
        return
    with pytest.raises(BagError, match=sentence):
        prepare(bag, read_run(bag), wishes)


def test_a_bag_of_another_protocol_is_refused_in_a_sentence(tmp_path, capsys):
    make_bag(tmp_path / "bag", protocol=9)
    for command in ("inspect", "replay"):
        assert main([command, str(tmp_path / "bag")]) == 2
        said = capsys.readouterr().err
        assert "was recorded by dsd_ros of another version with protocol 9; this release has protocol 10" in said
        assert said.count("\n") == 1


def test_sampled_replies_whose_numbers_are_missing_are_refused(tmp_path):
    bag = make_bag(tmp_path / "bag", temperature=1.0, replies=(2, 3))
    with pytest.raises(BagError, match="depend on the number of earlier replies"):
        prepare(bag, read_run(bag), ReplayOptions())


def test_a_report_has_every_reply_and_round(tmp_path):
    run = read_run(make_bag(tmp_path / "bag", {"decode.mode": "dsd"}))
    text = "\n".join([*summary_lines(run), *step_lines(run), *round_lines(run)])
    assert "2 replies, 6 tokens in 2 rounds, tau 3.00, 67 % from drafts; 2 end in an action" in text
    assert "target big" in text
    assert text.count("forward 25 cm") == 2
    report = json.loads(json.dumps(as_json(run)))
    assert report["replies"][1]["stats"]["tokens"] == 3
    assert report["parameters"]["/go2_1/draft_node"] == {"decode.mode": "dsd"}
    content = page(run)
    assert content.count("<img") == 1  # there is one picture
    assert "http" not in content and "2 replies, 6 tokens in 2 rounds" in content


def test_stops_that_come_back_at_once_are_one(tmp_path):
    writer = BagWriter(tmp_path / "bag", definition)
    for at, causes in ((1.0, [12]), (1.1, []), (1.3, [12, 13]), (2.0, []), (4.0, [17]), (5.0, [2])):
        sentences = [f"cause {cause}" for cause in causes]
        state = SafetyState(stopped=bool(causes), causes=causes, sentences=sentences)
        put(writer, "/dsd/safety_state", int(at * SECOND), state)
    writer.close()
    stops = read_run(open_bag(tmp_path / "bag")).stops
    assert [(s.began / SECOND, s.ended / SECOND, s.causes) for s in stops] == [
        (1.0, 2.0, ["NODE_SILENT", "LINK_LOST"]),
        (5.0, 5.0, ["DEADMAN"]),  # standing without an action is no stop
    ]
    assert stops[0].sentences == ["cause 12", "cause 13"]


def test_the_history_is_that_of_the_same_run(tmp_path):
    run = read_run(make_bag(tmp_path / "bag"))
    actions = [(1, 10), (2, 20), (1, 30), (2, 40), (3, 0), (4, 50)]  # (number, stamp in s); 3 is a way back
    run.actions = [
        SimpleNamespace(
            observation_stamp=SimpleNamespace(sec=stamp, nanosec=0), step=number, kind=1, distance=0.25, angle=0.0,
            retracing=stamp == 0,
        )
        for number, stamp in actions
    ]  # fmt: skip

    def before(stamp):
        step = SimpleNamespace(stamp=stamp * SECOND)
        return [at // SECOND for at, action in history_of(run, step) if action == "forward 25 cm"]

    assert [before(stamp) for stamp in (10, 20, 30, 40, 50, 60)] == [
        [], [10], [], [30], [30, 40], [30, 40, 50],
    ]  # fmt: skip
