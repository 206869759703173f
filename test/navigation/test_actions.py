# SPDX-License-Identifier: Apache-2.0
"""The reply grammar: what parses, and that nothing else moves the robot."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from dsd_ros.navigation.run.actions import (
    KINDS,
    Action,
    ActionKind,
    ParsedReply,
    UnparsableReply,
    action_of,
    all_actions,
    format_action,
    parse_reply,
)


def test_the_grammar_has_ten_actions():
    phrases = [format_action(action) for action in all_actions()]
    assert phrases == [
        "forward 25 cm",
        "forward 50 cm",
        "forward 75 cm",
        "turn left 15 degrees",
        "turn left 30 degrees",
        "turn left 45 degrees",
        "turn right 15 degrees",
        "turn right 30 degrees",
        "turn right 45 degrees",
        "stop",
    ]


@pytest.mark.parametrize("action", all_actions(), ids=format_action)
def test_every_action_parses_after_reasoning(action):
    reply = parse_reply(f"The bottle is ahead. Action: {format_action(action)}")
    assert reply.action == action
    assert reply.reasoning == "The bottle is ahead."


@pytest.mark.parametrize(
    "text", ["  I see it.\n  ACTION:  Turn   LEFT 30 degrees \n", "I see it. action: turn left 30 degrees"]
)
def test_case_and_space_are_tolerated(text):
    reply = parse_reply(text)
    assert reply.action == Action(ActionKind.TURN_LEFT, 30)
    assert reply.reasoning == "I see it."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "forward 25 cm",
        "Action:",
        "Action: ",
        "Action:stop",
        "Reaction: stop",
        "Action: stop.",
        "Action: stop now",
        "Action: forward",
        "Action: forward 100 cm",
        "Action: forward 025 cm",
        "Action: forward 25",
        "Action: forward 25cm",
        "Action: forward -25 cm",
        "Action: forward 25.0 cm",
        "Action: forward 25 m",
        "Action: forward 75 degrees",
        "Action: turn left 15 cm",
        "Action: turn 15 degrees",
        "Action: turn left 90 degrees",
        "Action: turn left 15 degree",
        "Action: backward 25 cm",
        "Action: forward 25 cm and stop",
        "Action: stop Action: stop",
        "Action: forward 25 cm. Action: stop",
        "My action: is this. Action: stop",
        "Action: forward 25 cm Action:",
        "Action: \u017ftop",
        "Action: forward \u0662\u0665 cm",
        "Action: forward 25 cm\x00",
        "A\u0441tion: forward 25 cm",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(UnparsableReply):
        parse_reply(text)


def test_reasoning_may_be_missing():
    assert parse_reply("Action: forward 25 cm") == ParsedReply("", Action(ActionKind.FORWARD, 25))


def test_a_long_reply_is_quoted_by_its_end():
    with pytest.raises(UnparsableReply, match=r"\.\.\.x+ the end'") as caught:
        parse_reply("x" * 5000 + " the end")
    assert len(str(caught.value)) < 200


_WORDS = ["Action:", "action: ", "forward", "turn left", "25 cm", "30 degrees", "stop", " ", ".", "\n", "75", "cm"]


@given(st.text() | st.lists(st.sampled_from(_WORDS), max_size=12).map(" ".join))
def test_arbitrary_text_is_refused_or_means_what_it_ends_in(text):
    try:
        reply = parse_reply(text)
    except UnparsableReply:
        return
    squeezed = " ".join(text.split()).lower()
    assert squeezed.endswith(f"action: {format_action(reply.action)}")


@given(st.text(), st.sampled_from(all_actions()), st.text(min_size=1))
def test_nothing_may_follow_the_action(before, action, after):
    text = f"{before} Action: {format_action(action)} {after}"
    if not after.strip(" \t\n\r\f\v"):
        return
    with pytest.raises(UnparsableReply):
        parse_reply(text)


@pytest.mark.parametrize(
    ("kind", "amount"),
    [(ActionKind.FORWARD, 30), (ActionKind.TURN_LEFT, 25), (ActionKind.STOP, 1), (ActionKind.FORWARD, 0)],
)
def test_an_action_outside_the_grammar_cannot_be_made(kind, amount):
    with pytest.raises(ValueError, match="takes an amount of"):
        Action(kind, amount)


def message(kind: int, distance: float = 0.0, angle: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, distance=distance, angle=angle)


@pytest.mark.parametrize("action", all_actions(), ids=format_action)
def test_a_message_in_metres_and_radians_is_an_action(action):
    number = KINDS.index(action.kind)
    assert action_of(message(number, action.metres, action.radians)) == action
    rounded = message(number, round(action.metres, 3), round(action.radians, 3))  # as other programs write it
    assert action_of(rounded) == action


@pytest.mark.parametrize(
    ("kind", "distance", "angle"),
    [
        (1, 0.6, 0.0), (1, 25.0, 0.0), (1, -0.25, 0.0), (1, 0.25, 0.5236), (1, math.nan, 0.0), (1, 0.0, 0.0),
        (2, 0.0, 30.0), (2, 0.0, -0.5236), (3, 0.0, 0.5236), (2, 0.25, 0.5236), (2, 0.0, math.inf), (0, 0.25, 0.0),
    ],
)  # fmt: skip
def test_a_message_that_the_grammar_cannot_say_is_refused(kind, distance, angle):
    with pytest.raises(ValueError, match=r"^'.*' over .* m and .* rad is not an action of the grammar; it has .*\.$"):
        action_of(message(kind, distance, angle))


@pytest.mark.parametrize("kind", [5, 9, 255])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f"kind {kind} is unknown"):
        action_of(message(kind))
