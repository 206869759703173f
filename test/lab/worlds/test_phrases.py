# SPDX-License-Identifier: Apache-2.0
"""Instructions: many, distinct, understood, and held out by split."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dsd_lab.worlds.phrases import (
    FIND,
    INTENTS,
    WORDINGS,
    all_instructions,
    fill,
    instructed,
    instruction_for,
    phrasings,
    with_unheard_words,
)
from dsd_lab.worlds.situations import NAMES, Situation, Split, world_of
from dsd_ros.robot.sim.world import World, named_goal

# Words that only one split says; the others would be easy to add by mistake.
HELD_OUT = {
    Split.VALIDATION: {"seek", "trot", "steer", "halt", "which", "lying"},
    Split.TEST: {"locate", "proceed", "discover", "stroll", "scout", "wander", "those", "us", "being"},
}


def words_of(split: Split) -> set[str]:
    words = WORDINGS[split]
    every = [t for intent in INTENTS for t in phrasings(intent, split)]
    every += [*words.tails, *words.openings, *words.endings]
    return set(re.findall(r"[a-z]+", " ".join(every).lower()))


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("intent", INTENTS)
def test_there_are_hundreds_of_ways_and_each_is_understood(intent: str, split: Split) -> None:
    templates = phrasings(intent, split)
    said = {fill(template, "red chair").lower() for template in templates}
    assert len(said) == len(templates) >= 200
    which = "" if intent == FIND else intent
    for name in ("red chair", "orange box"):
        for template in templates:
            goal = named_goal(fill(template, name))
            assert (goal.thing, goal.which) == (name, which), template


def test_splits_share_no_template_and_have_words_of_their_own() -> None:
    every = [t for split in Split for intent in INTENTS for t in phrasings(intent, split)]
    assert len(set(every)) == len(every)
    for split, own in HELD_OUT.items():
        assert own <= words_of(split)
        for other in set(Split) - {split}:
            assert not own & words_of(other)
    for text in all_instructions():
        assert not set(text.lower().split()) & (HELD_OUT[Split.VALIDATION] | HELD_OUT[Split.TEST])


def test_drawn_instructions_name_their_goal_and_vary() -> None:
    for split in Split:
        rng = np.random.default_rng(1)
        for goal in ("orange box", "left red chair", "farther white can"):
            drawn = [instruction_for(goal, rng, split) for _ in range(150)]
            assert all(named_goal(text).name == goal for text in drawn)
            assert len(set(drawn)) > 80
    first, again = np.random.default_rng(2), np.random.default_rng(2)
    assert instruction_for("red box", first) == instruction_for("red box", again)
    assert fill("look for a {}", "orange box") == "look for an orange box"
    assert fill("the nearer of the two {s}", "red box") == "the nearer of the two red boxes"


def test_unknown_words_leave_the_goal() -> None:
    known = set.union(*map(words_of, Split)) | {"red", "box", "boxes"}
    rng = np.random.default_rng(4)
    for template, telling in (
        ("go over to the {} and stop there", "red box"),
        ("the left one of the two {s}", "the left .*red boxes"),
        ("reach the {} over on the right", "red box .*the right"),
    ):
        text = fill(template, "red box")
        other = set(text.split()) - {"the", "left", "right", "red", "box", "boxes"}
        kept = made_up = 0
        for _ in range(200):
            changed = with_unheard_words(text, rng)
            assert re.search(rf"\b{telling}\b", changed)
            kept += len(other & set(changed.split()))
            made_up += len(set(changed.split()) - known)
        assert 0.3 < kept / (200 * len(other)) < 0.7
        assert made_up > 200
    drawn = [instruction_for("red box", rng, unheard=0.5).lower() for _ in range(300)]
    unheard = [text for text in drawn if not set(re.findall(r"[a-z]+", text)) <= known]
    assert 100 < len(unheard) < 200


def test_words_astray_say_nothing_of_the_goal() -> None:
    rng = np.random.default_rng(5)
    drawn = [with_unheard_words("the red box", rng) for _ in range(2000)]
    astray = [text for text in drawn if {"left", "right"} & set(text.split())]
    assert len(astray) > 200
    for text in astray:
        assert not re.search(r"(left|right) red box|(the|your|my) (left|right)\b|(left|right)$", text)


def test_strange_words_are_no_held_out_ones() -> None:
    held_out = (words_of(Split.VALIDATION) | words_of(Split.TEST)) - words_of(Split.TRAINING)
    rng = np.random.default_rng(6)
    said = {w for _ in range(3000) for w in with_unheard_words("go to the red box", rng).split()}
    assert len(said) > 3000
    assert not said & held_out


def test_a_world_is_asked_for_in_its_splits_words() -> None:
    world = world_of(2, Situation.TWO, Split.TEST)
    asked = instructed(world)
    assert asked == instructed(world) and named_goal(asked.instruction).name == world.goal
    assert "find" not in asked.instruction.lower()
    assert instructed(World.from_seed(2)) == World.from_seed(2)


def test_the_tokenizer_learns_all_names() -> None:
    assert {named_goal(text).thing for text in all_instructions()} == set(NAMES)
