# SPDX-License-Identifier: Apache-2.0
"""Grammars as data: what they read, which are refused, and that the safety limits hold whatever they say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from bag_maker import make_bag
from run_bench import Bench

from dsd_ros.navigation.run.actions import (
    ANY,
    KINDS,
    SHIPPED,
    Action,
    ActionKind,
    Grammar,
    GrammarError,
    UnparsableReply,
    action_of,
    all_actions,
    format_action,
    format_actions,
    parse_reply,
    read_grammar,
)
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause, Motion, SafetyLimits
from dsd_ros.navigation.safety.guard import ActionGuard
from dsd_ros.observe.bag.run import read_run
from dsd_ros.ros.settings import ReplyGrammar

NAVILA = read_grammar("navila")
OWN = {
    "marks": ["<go>"],
    "forward": {"phrases": ["ahead {} m", "go {} m"], "amounts": {"0.5": 50, "1.0": 100}},
    "turn_left": {"phrases": ["left {}"], "amounts": list(range(5, 91, 5))},
    "turn_right": {"phrases": ["right {}"], "amounts": {"little": 10, "much": 60}},
    "stop": {"phrases": ["Arrived", "done"]},
    "end": "!",
}


def changed(**changes):
    return {name: value for name, value in (OWN | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("The next action is move forward 25 cm.", ActionKind.FORWARD, 25),
        ("I see a door. the next action is move  forward 75 cm", ActionKind.FORWARD, 75),
        ("The next action is turn left 15 degree.", ActionKind.TURN_LEFT, 15),
        ("The next action is turn right 30 degrees.", ActionKind.TURN_RIGHT, 30),
        ("The next action is stop.", ActionKind.STOP, 0),
        ("I think I should stop because I have finished the instruction.", ActionKind.STOP, 0),
    ],
)
def test_navilas_replies_are_read(text, kind, amount):
    action = parse_reply(text, NAVILA).action
    assert (action.kind, action.amount, action.grammar) == (kind, amount, NAVILA)


@pytest.mark.parametrize(
    "text",
    [
        "Action: forward 25 cm", "move forward 25 cm", "The next action is move forward 100 cm.",
        "The next action is move forward 25 cm and stop.", "The next action is to stop.", "The next action is stop..",
        "The next action is stop. The next action is stop.", "Is the next action is-stop", "The next action isstop",
    ],
)  # fmt: skip
def test_what_navila_does_not_say_is_refused(text):
    with pytest.raises(UnparsableReply):
        parse_reply(text, NAVILA)


def test_an_own_grammar_has_its_own_words_units_and_amounts(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(OWN))
    grammar = read_grammar(str(path))
    said = {
        "<go> ahead 0.5 m": (ActionKind.FORWARD, 50),
        "Free way. <GO> go 1.0 m!": (ActionKind.FORWARD, 100),
        "<go> left 85": (ActionKind.TURN_LEFT, 85),
        "<go> right much": (ActionKind.TURN_RIGHT, 60),
        "<go> ARRIVED!": (ActionKind.STOP, 0),
    }
    for text, (kind, amount) in said.items():
        action = parse_reply(text, grammar).action
        assert (action.kind, action.amount) == (kind, amount), text
    assert format_action(parse_reply("<go> go 1.0 m", grammar).action) == "ahead 1.0 m"
    with pytest.raises(UnparsableReply):
        parse_reply("<go> left 7", grammar)
    with pytest.raises(ValueError, match="takes an amount of"):
        Action(ActionKind.FORWARD, 75, grammar)


@pytest.mark.parametrize("data", [SHIPPED.data, NAVILA.data, OWN])
def test_a_grammar_survives_being_recorded(data):
    grammar = Grammar.of(data, "g")
    again = read_grammar(json.dumps(grammar.data))
    assert again == replace(grammar, name=again.name)
    for action in all_actions(grammar):
        assert parse_reply(f"{grammar.marks[0]} {format_action(action)}{grammar.end}", again).action == action


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "damaged"),
        ([1], "it must hold no more"),
        (changed(backward={}), "it must hold no more"),
        (changed(marks=[]), "marks must be a list of texts"),
        (changed(marks="<go>"), "marks must be a list of texts"),
        (changed(marks=["two  spaces"]), "cannot be read"),
        (changed(marks=["ahead"]), "cannot be read"),
        (changed(end=1), "damaged"),
        (changed(stop=None), "it must have stop"),
        (changed(forward=None, turn_left=None, turn_right=None), "an action that moves"),
        (changed(stop={"phrases": ["LEFT 5"]}), "reads as"),
        (changed(stop={"phrases": "stop"}), "stop.phrases must be a list of texts"),
        (changed(stop={"phrases": ["stop {}"]}), "nowhere"),
        (changed(forward={"phrases": ["on"], "amounts": [25]}), "once"),
        (changed(forward={"phrases": ["on {}", "on {}!"], "amounts": {"a": 25, "a!": 50}}), "reads as"),
        (changed(forward={"phrases": ["on {}"], "amounts": [501]}), "from 1 to 500"),
        (changed(forward={"phrases": ["on {}"], "amounts": [0.5]}), "from 1 to 500"),
        (changed(forward={"phrases": ["on {}"], "amounts": [-25]}), "from 1 to 500"),
        (changed(forward={"phrases": ["on {}"], "amounts": [True]}), "from 1 to 500"),
        (changed(forward={"phrases": ["on {}"], "amounts": [math.nan]}), "from 1 to 500"),
        (changed(forward={"phrases": ["on {}"], "amounts": [25], "unit": "m"}), "no more"),
        (changed(turn_left={"phrases": ["on {}"], "amounts": [181]}), "from 1 to 180"),
        (changed(turn_left={"phrases": ["on {}"]}), "from 1 to 180"),
    ],
)
def test_a_malformed_grammar_is_refused_by_one_sentence(data, why):
    with pytest.raises(GrammarError, match=r"^The grammar mine cannot be used: .*\.$") as caught:
        Grammar.of(data, "mine")
    assert why in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


REACHES = {
    "marks": ["<go>"],
    "forward": {"phrases": ["ahead {} cm"], "amounts": "20..300"},
    "turn_left": {"phrases": ["left {}"], "amounts": "5..180"},
    "go_to": {"phrases": ["to ({x}, {y})"], "picture": [640, 480]},
    "stop": {"phrases": ["stop"]},
    "most": 4,
    "between": " then ",
}


def test_numbers_in_a_range_points_and_several_actions_are_read():
    grammar = Grammar.of(REACHES, "mine")
    reply = parse_reply("Free. <go> Ahead  120 cm then LEFT 7 then to (639, 0)", grammar)
    read = [(each.kind, each.amount, each.point) for each in (reply.action, *reply.then)]
    assert read == [(ActionKind.FORWARD, 120, None), (ActionKind.TURN_LEFT, 7, None), (ActionKind.GO_TO, 0, (639, 0))]
    assert reply.reasoning == "Free."
    assert format_actions((reply.action, *reply.then)) == "ahead 120 cm then left 7 then to (639, 0)"


@pytest.mark.parametrize(
    "words",
    [
        "ahead 19 cm", "ahead 301 cm", "ahead 020 cm", "ahead 20.5 cm", "ahead +20 cm", "ahead ٢٠ cm", "left 181",
        "to (640, 0)", "to (0, 480)", "to (-1, 0)", "to (0,0)", "to (1, 2) then stop", "stop then left 5",
        "left 5 then", "left 5 left 5", "left 5 then left 5 then left 5 then left 5 then left 5",
    ],
)  # fmt: skip
def test_numbers_beyond_the_range_and_actions_beyond_the_count_are_refused(words):
    with pytest.raises(UnparsableReply):
        parse_reply(f"<go> {words}", Grammar.of(REACHES, "mine"))


def test_words_that_read_in_two_ways_are_not_carried_out():
    data = {"forward": {"phrases": ["a{}"], "amounts": {"": 25, "a": 50}}, "stop": {"phrases": ["s"]}, "most": 3}
    with pytest.raises(GrammarError, match=r"'aa' cannot be read, since it reads as 2 different things"):
        Grammar.of(data, "mine")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"most": 5}, "must be 1 to 4"),
        ({"most": True}, "must be 1 to 4"),
        ({"between": " then"}, "must end in a space"),
        ({"forward": {"phrases": ["on {}"], "amounts": "0..300"}}, "a range within 1..500"),
        ({"forward": {"phrases": ["on {}"], "amounts": "20..501"}}, "a range within 1..500"),
        ({"forward": {"phrases": ["on {}"], "amounts": "30..20"}}, "a range within 1..500"),
        ({"forward": {"phrases": ["on {20..300}"], "amounts": [25]}}, "must stand in its amounts"),
        ({"go_to": {"phrases": ["to ({x}, {y})"]}}, "a width and a height"),
        ({"go_to": {"phrases": ["to ({x}, {y})"], "picture": [640]}}, "a width and a height"),
        ({"go_to": {"phrases": ["to ({x}, {y})"], "picture": [640, 9999]}}, "a width and a height"),
        ({"go_to": {"phrases": ["to ({x})"], "picture": [640, 480]}}, "{x} and {y} once"),
        ({"stop": {"phrases": ["stop"], "amounts": [1]}}, "stop must hold phrases, no more"),
        ({"parser": "nobodys"}, "0 installed packages offer the parser 'nobodys'"),
    ],
)
def test_malformed_ranges_points_and_sequences_are_refused(change, why):
    with pytest.raises(GrammarError, match=r"^The grammar mine cannot be used: .*\.$") as caught:
        Grammar.of(REACHES | change, "mine")
    assert why in str(caught.value)


def test_a_message_of_a_range_or_a_goal_is_read():
    grammar = Grammar.of(REACHES, "mine")

    def said(kind: ActionKind, distance: float = 0.0, angle: float = 0.0) -> SimpleNamespace:
        return SimpleNamespace(kind=KINDS.index(kind), distance=distance, angle=angle)

    assert action_of(said(ActionKind.FORWARD, 1.2), grammar) == Action(ActionKind.FORWARD, 120, grammar)
    with pytest.raises(ValueError, match="it has 20 to 300 cm"):
        action_of(said(ActionKind.FORWARD, 3.2), grammar)
    goal = action_of(said(ActionKind.GO_TO, 1.5, -0.5), grammar)
    assert (goal.metres, goal.radians) == (1.5, -0.5) and format_action(goal) == "go 1.50 m, 29 degrees to the right"
    for wrong in (said(ActionKind.GO_TO, -1.0), said(ActionKind.GO_TO, 1.0, 4.0), said(ActionKind.GO_TO, math.nan)):
        with pytest.raises(ValueError, match="not an action of the grammar"):
            action_of(wrong, grammar)
    with pytest.raises(ValueError, match="no such action"):
        action_of(said(ActionKind.GO_TO, 1.0), SHIPPED)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package with three parsers."""
    (tmp_path / "robot_words.py").write_text(
        "import json\n"
        "def of_json(text):\n    return f'<go> ahead {json.loads(text)[\"cm\"]} cm'\n"
        "def nothing(text):\n    return None\n"
    )
    info = tmp_path / "robot_words-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: robot-words\nVersion: 1.0\n")
    names = ("of_json", "nothing", "missing")
    (info / "entry_points.txt").write_text(
        "[dsd_ros.reply_parsers]\n" + "".join(f"{name} = robot_words:{name}\n" for name in names)
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_installed_parser_reads_what_no_grammar_describes(installed):
    grammar = Grammar.of(REACHES | {"parser": "of_json"}, "mine")
    assert parse_reply('{"cm": 120}', grammar).action == Action(ActionKind.FORWARD, 120, grammar)
    for text in ('{"cm": 301}', '{"cm": "20 cm then stop"}', "{}", "<go> ahead 120 cm"):  # its own bounds hold
        with pytest.raises(UnparsableReply):
            parse_reply(text, grammar)
    with pytest.raises(UnparsableReply, match="'nothing' gave no text"):
        parse_reply("<go> stop", Grammar.of(REACHES | {"parser": "nothing"}, "mine"))
    with pytest.raises(GrammarError, match="'missing' cannot be loaded"):
        Grammar.of(REACHES | {"parser": "missing"}, "mine")
    with pytest.raises(ValueError, match="set constrain to none"):
        ReplyGrammar(json.dumps(REACHES | {"parser": "of_json"}), "grammar").form(96)


def test_files_that_hold_no_grammar_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    for content in (b"\xff", b"a: ["):
        path.write_bytes(content)
        with pytest.raises(GrammarError, match="cannot be read"):
            read_grammar(str(path))
    with pytest.raises(GrammarError, match=r"There is no grammar 'navilla': name dsd, navila, .*, or a file\."):
        read_grammar("navilla")


def test_a_message_is_read_by_the_grammar_that_it_is_for():
    half = SimpleNamespace(kind=KINDS.index(ActionKind.FORWARD), distance=0.6, angle=0.0)
    with pytest.raises(ValueError, match="not an action of the grammar"):
        action_of(half)
    with pytest.raises(ValueError, match="not an action of the grammar"):
        action_of(half, NAVILA)
    assert format_action(action_of(half, ANY)) == "forward 60 cm"
    far = SimpleNamespace(kind=KINDS.index(ActionKind.FORWARD), distance=5.5, angle=0.0)
    with pytest.raises(ValueError, match=r"it has 1 to 500 cm\.$"):
        action_of(far, ANY)


@pytest.mark.parametrize(
    ("limit", "action"), [("distance", (ActionKind.FORWARD, 100)), ("angle", (ActionKind.TURN_LEFT, 90))]
)
def test_the_supervisor_bounds_an_action_whatever_the_grammar_says(limit, action):
    def refused(limits: SafetyLimits) -> bool:
        guard = ActionGuard(limits, "stop")
        guard.pose(Pose(0.0, 0.0, 0.0))
        guard.announce(Action(*action, Grammar.of(OWN, "mine")), True, 10.0, 10.1, 5.0)
        if guard.action is None:
            cause, sentence = guard.refusal
            assert cause is Cause.MOTION_REFUSED and f"limit.action_{limit}" in sentence
        guard.judge(Motion(0.4) if limit == "distance" else Motion(wz=0.4), 5.1)
        return guard.refusal is not None

    assert refused(SafetyLimits())
    assert not refused(SafetyLimits(action_distance=1.0, action_angle=1.58))


def test_a_run_obeys_its_grammar_and_no_other():
    bench = Bench(grammar=NAVILA)
    bench.until_request()
    bench.answer("I see it. The next action is move forward 25 cm.")
    bench.until_request()
    assert bench.pose.x == pytest.approx(0.25, abs=0.02)
    assert [format_action(step.reply.action) for step in bench.run.steps] == ["move forward 25 cm"]
    bench.answer("I see it. Action: forward 25 cm")
    assert bench.run.outcome is RunOutcome.UNPARSABLE_REPLY


def test_a_bag_is_read_by_the_grammar_of_its_run(tmp_path):
    said = "I see it. The next action is move forward 25 cm."
    run = read_run(make_bag(tmp_path / "bag", reply_text=said, grammar=json.dumps(NAVILA.data)))
    assert [(step.action, step.executed) for step in run.steps] == [("move forward 25 cm",) * 2] * 2
    elsewhere = tmp_path / "mine.yaml"
    elsewhere.write_text(json.dumps(OWN))
    other = read_run(make_bag(tmp_path / "other", reply_text=said, grammar=str(Path(elsewhere))))
    assert other.grammar is None and other.bag.notes  # a bag cannot have a file of this machine read
    assert [(step.action, step.executed) for step in other.steps] == [("", "forward 25 cm")] * 2
