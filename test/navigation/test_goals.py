# SPDX-License-Identifier: Apache-2.0
"""Which instructions are put to memory first, and how its answers are used."""

from __future__ import annotations

import pytest

from dsd_ros.navigation.run.goals import instruction_in, needs_memory, question_about, resolve_answer
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.robot.sim.world import COLOURS, KINDS

OF_THE_SPEAKER = [
    "bring me to the chair I like",
    "go to my chair",
    "Take me to the ball my daughter hid!",
    "find the box that belongs to me",
    "walk to OUR table",
    "where we met yesterday",
    "find a chair of mine",
    "show us the box that is ours",
    "I want you to find the chair I like",
    "I\u2019d like to go to my chair",
    "go to what I'm looking for",
    "go to the box between me and the door",
]
PLAIN = [
    "find the silver bottle",
    "bring me to the red chair",
    "Show us the green ball, please.",
    "I want to go to the red chair",
    "I'd like to go to the red chair",
    "I\u2019d like you to find the blue box",
    "We need to find the blue box",
    "get to the bus",
    "take the iron chair",
]


@pytest.mark.parametrize("instruction", OF_THE_SPEAKER)
def test_who_speaks_of_himself_needs_memory(instruction):
    assert needs_memory(instruction, "auto")
    assert needs_memory(instruction.lower(), "auto") and needs_memory(instruction.upper(), "auto")
    assert needs_memory(instruction, "always") and not needs_memory(instruction, "never")


@pytest.mark.parametrize("instruction", PLAIN)
def test_what_names_its_thing_needs_none(instruction):
    assert not needs_memory(instruction, "auto")
    assert needs_memory(instruction, "always") and not needs_memory(instruction, "never")


def test_no_instruction_of_the_simulator_needs_memory():
    for kind in KINDS:
        for colour in COLOURS:
            assert not needs_memory(f"find the {colour} {kind}", "auto")


@pytest.mark.parametrize(
    ("answer", "instruction"),
    [
        ("The chair you like is the Viola. The Viola is red. Go: find the red chair", "find the red chair"),
        ("Go: find the red chair.", "find the red chair"),
        ("  It is red.\nGo:  find   the red chair\n", "find the red chair"),
        ("The Viola is of a colour I do not know.", ""),
        ("I do not know. Go: find the red chair", ""),
        ("Go: find the red chair Go: find the blue chair", ""),
        ("The chair you like is the Viola. Go:", ""),
        ("The Viola stands in the kitchen.", ""),
        ("Ergo: find the red chair", ""),
        ("Go: " + "x" * 2001, ""),
        ("", ""),
    ],
)  # fmt: skip
def test_only_an_answer_that_ends_in_one_instruction_moves_the_robot(answer, instruction):
    assert instruction_in(answer) == instruction


@pytest.mark.parametrize(
    ("goal", "unclear"),
    [
        ("bring me to the chair I like", "which chair you like"),
        ("go where my guest's box is", "which box is your guest's"),
        ("Please take me to the chair that my mother made.", "which chair your mother made"),
        ("I want you to go to the chair we sit on", "which chair you sit on"),
        ("go to the chair I am sitting on", "which chair you are sitting on"),
        ("find my little daughter\u2019s ball!", "which ball is your little daughter's"),
        ("bring me to my chair", "which chair is yours"),
        ("where we met yesterday", "what 'where we met yesterday' means"),
    ],
)
def test_a_robot_that_does_not_know_asks_about_the_thing(goal, unclear):
    asked = f"I do not know {unclear}. Say it by its colour, or add a document that tells it."
    assert question_about(goal) == asked
    found = resolve_answer(goal, True, "", "I do not know.", ["a source"])
    assert found.outcome is RunOutcome.NOT_KNOWN and found.instruction == "" and found.question == asked
    assert asked in found.sentence and found.answer == "I do not know." and found.sources == ["a source"]


def test_it_asks_nothing_where_it_knows_and_asks_where_memory_failed():
    known = resolve_answer("go to my chair", True, "", "The Viola is red. Go: find the red chair", ["a source"])
    assert known.instruction == "find the red chair" and known.question == "" and known.sources == ["a source"]
    lost = resolve_answer("go to my chair", False, "The cloud is away.", "")
    assert "The cloud is away." in lost.sentence and lost.outcome is RunOutcome.NOT_KNOWN
    assert lost.question == question_about("go to my chair") and lost.question in lost.sentence
