# SPDX-License-Identifier: Apache-2.0
"""What is read from a bag, the requests of a replay, and the report of differences."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from bag_maker import REPLY, SECOND, Maker, make_bag, png

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
from dsd_ros.wire.messages import prefix_digest


def observation(session=1, reply=1, picture=b"p", verified=(), rounds=0):
    return SimpleNamespace(
        session=session, reply=reply, instruction="find it", image=picture, encoding="png",
        height=1, width=1, verified=list(verified), rounds=rounds,
    )  # fmt: skip


def draft(number, tokens, session=1, reply=1, parents=(), assumed=b"", resampled=()):
    return SimpleNamespace(
        session=session, reply=reply, round=number, tokens=tokens, parents=bytes(parents),
        assumed=assumed, resampled=list(resampled),
    )  # fmt: skip


def outcome(number, accepted, following, session=1, reply=1, final=True, distribution=b""):
    return SimpleNamespace(
        session=session, reply=reply, round=number, accepted=accepted, next_token=following,
        is_final=final, distribution=distribution,
    )  # fmt: skip


def verified(at, *tokens, session=1, reply=1):
    return SimpleNamespace(session=session, reply=reply, at=at, tokens=tokens)


def log(*messages):
    result = TrafficLog()
    for at, message in enumerate(messages):
        if hasattr(message, "image"):
            result.observation(message, at)
        elif hasattr(message, "at"):
            result.verified(message)
        elif hasattr(message, "is_final"):
            result.outcome(message)
        else:
            result.draft(message)
    return result


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ((draft(1, [5, 6, 7]), outcome(1, 2, 9), draft(2, [1]), outcome(2, 1, 3)), [5, 6, 9, 1, 3]),
        # Only the final outcome binds, and doubled messages change nothing.
        (
            (draft(1, [5, 6]), draft(1, [5, 6]), outcome(1, 1, 8, final=False), outcome(1, 2, 7), outcome(1, 2, 7)),
            [5, 6, 7],
        ),
        # A tree: 5 -> (6 -> 7 | 8); 8 holds.
        ((draft(1, [5, 6, 8, 7], parents=[0, 1, 1, 2]), outcome(1, 3, 4)), [5, 8, 4]),
        # A stream: late, doubled, and sent again as a whole; another verifier goes on with it.
        ((verified(1, 5), verified(0, 4), verified(0, 4), verified(0, 4, 5, 6)), [4, 5, 6]),
        ((verified(0, 4), observation(session=2, verified=[4, 5]), verified(2, 6, session=2)), [4, 5, 6]),
        # Sent ahead: the second draft stands, since the first one's assumption failed.
        (
            (draft(1, [5]), draft(2, [1], assumed=prefix_digest([5, 9])), outcome(1, 1, 8), draft(2, [2]),
             outcome(2, 1, 3)),
            [5, 8, 2, 3],
        ),
        (
            (draft(1, [5]), draft(2, [1], assumed=prefix_digest([5, 8])), outcome(1, 1, 8), outcome(2, 1, 3)),
            [5, 8, 1, 3],
        ),
        # Split: the robot tells what it drew with its next draft, or at the end with nothing else.
        (
            (draft(1, [5, 6]), outcome(1, 1, 0, distribution=b"p"), draft(2, [4], resampled=[7]),
             outcome(2, 0, 0, distribution=b"p"), draft(2, [], resampled=[8])),
            [5, 7, 8],
        ),
        # A restarted verifier continued after round 2 of the reply.
        (
            (draft(1, [5]), outcome(1, 1, 6), observation(session=2, verified=[5, 6, 7, 8], rounds=2),
             draft(3, [9], session=2), outcome(3, 1, 1, session=2)),
            [5, 6, 7, 8, 9, 1],
        ),
    ],
)  # fmt: skip
def test_tokens_are_read_off_the_traffic(messages, tokens):
    (reply,) = log(observation(), *messages).replies
    assert reply.tokens(len(tokens)) == tokens
    assert reply.tokens(len(tokens) + 1) is None
    # What overtakes its observation waits for it.
    if all(message.session == 1 for message in messages):
        assert log(*messages, observation()).replies[0].tokens(len(tokens)) == tokens


def test_another_picture_is_another_reply():
    replies = log(observation(), observation(session=2, picture=b"q"), observation(2, 2)).replies
    assert [reply.reply for reply in replies] == [1, 1, 2]


def test_a_run_is_read_and_made_into_questions(tmp_path):
    bag = make_bag(tmp_path / "bag")
    assert bag.namespace == "/go2_1"
    run = read_run(bag)
    assert [step.tokens for step in run.steps] == [[4, 5, 6], [4, 5, 6]]
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
    assert compare(step, ReplayReply(REPLY, [4, 5, 6], 1, 0.1)).same
    text = REPLY.replace("forward 25 cm", "stop")
    verdict = compare(step, ReplayReply(text, [4, 7], 1, 0.1))
    assert verdict.changed == ("reply", "action", "tokens")
    told = "\n".join(verdict.lines())
    for part in (REPLY, text, "51.000000007 s", "forward 25 cm -> stop", "3 -> 2, from token 2 on", "[5, 6] -> [7]"):
        assert part in told, part
    assert json.loads(json.dumps(verdict.as_json()))["replayed"]["action"] == "stop"
    step.tokens = None  # the bag lacks some of them
    assert compare(step, ReplayReply(REPLY, [4, 5, 6], 1, 0.1)).same
    assert compare(step, ReplayReply(REPLY, [4, 5, 6, 7], 1, 0.1)).changed == ("tokens",)


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
    assert report["replies"][1]["tokens"] == [4, 5, 6]
    assert report["parameters"]["/go2_1/draft_node"] == {"decode.mode": "dsd"}
    content = page(run)
    assert content.count("<img") == 1  # there is one picture
    assert "http" not in content and "2 replies, 6 tokens in 2 rounds" in content


def test_stops_that_come_back_at_once_are_one(tmp_path):
    maker, kind = Maker(), "dsd_msgs/msg/SafetyState"
    writer = BagWriter(tmp_path / "bag", definition)
    for at, causes in ((1.0, [12]), (1.1, []), (1.3, [12, 13]), (2.0, []), (4.0, [17]), (5.0, [2])):
        message = maker.make(
            kind, stopped=bool(causes), causes=np.array(causes, np.uint8),
            sentences=[f"cause {cause}" for cause in causes],
        )  # fmt: skip
        writer.write("/dsd/safety_state", kind, (), int(at * SECOND), maker.cdr(kind, message))
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
