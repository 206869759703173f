# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from dsd_lab.pair.scenes import SITUATIONS, scenes_of
from dsd_lab.worlds.guide import View
from dsd_lab.worlds.truth import claims_of, truthful, truths
from dsd_ros.robot.sim.world import Thing, World

# The robot at the origin looks along x: a red chair 20 degrees to the left and 1.5 m away, a red can and a
# blue chair to the right of it, the blue one farther off.
_CHAIR = (2.06 * math.cos(0.349), 2.06 * math.sin(0.349))
_THINGS = (
    Thing("chair", "red", *_CHAIR, 0.0),
    Thing("can", "red", 1.6, -0.3, 0.0),
    Thing("chair", "blue", 2.6, -1.0, 0.0),
    Thing("ball", "green", -1.0, 0.0, 0.0),
)
WORLD = World(0, 3.0, 3.0, _THINGS, (), 0, (0.0, 0.0, 0.0), "find the red chair")
VIEW = View(WORLD, (0.0, 0.0, 0.0), {0: 900, 1: 200, 2: 500})
TRUE = (
    "The red chair is a little left, 1.4 m away; not the blue chair right of it and behind, "
    "I turn left. Action: turn left 15 degrees"
)


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if name != "hidden"])
def test_the_experts_replies_are_all_true(situation: str) -> None:
    for scene in scenes_of(situation, 12):
        found = truths(scene.reply, scene.view, scene.goal)
        assert truthful(found), (found, scene.reply)


def test_a_true_reply_says_everything() -> None:
    assert truths(TRUE, VIEW, "red chair") == dict.fromkeys(("object", "colour", "side", "distance", "other"), True)


def test_a_wrong_word_is_found() -> None:
    for old, new, wrong in [
        ("The red chair", "The red can", {"object"}),
        ("The red chair", "The blue chair", {"colour"}),
        ("a little left", "a little right", {"side"}),
        ("a little left", "straight ahead", {"side"}),
        ("1.4 m", "1.8 m", {"distance"}),
        ("1.4 m away", "near by", {"distance"}),
        ("the blue chair", "the green ball", {"other"}),  # behind the robot
        ("the blue chair", "the black chair", {"other"}),
        ("right of it", "left of it", {"other"}),
        ("behind", "before", {"other"}),
        ("not the blue chair right of it and behind", "nothing else is near it", {"other"}),
    ]:
        assert old in TRUE
        found = truths(TRUE.replace(old, new), VIEW, "red chair")
        assert {name for name, value in found.items() if value is False} == wrong
        assert not truthful(found)


def test_what_is_not_in_view_has_to_be_said_so() -> None:
    seen = "No green ball in view, only a blue chair on the right, so I look around. Action: stop"
    assert truthful(truths(seen, VIEW, "green ball"))
    assert truths(seen, VIEW, "green ball")["side"] is None
    elsewhere = seen.replace("on the right", "on the left")
    assert truths(elsewhere, VIEW, "green ball")["other"] is False
    bare = "No green ball in view, nothing but the room, so I look around. Action: stop"
    assert truths(bare, VIEW, "green ball")["other"] is False
    invented = truths(TRUE.replace("red chair", "green ball"), VIEW, "green ball")
    assert invented["object"] is False and invented["side"] is None
    denied = truths(TRUE.replace("The red chair is", "No red chair in view,"), VIEW, "red chair")
    assert denied["object"] is False and denied["side"] is False and denied["distance"] is False


def test_free_words_are_read_as_well() -> None:
    for text, seen, side, metres in [
        ("I can see the red chair to my left, about 2 meters ahead.", True, "left", 2.0),
        ("The red chair is not visible. Action: turn left 45 degrees", False, None, None),
        ("I don't see a red chair here", False, None, None),
        ("There is no red chair in the image, so I turn left.", False, None, None),
        ("The red chair is in the center of the image. Action: stop", True, "ahead", None),
        ("The left red chair is far right, 1.0 m away; nothing else", True, "right", 1.0),
        ("", False, None, None),
    ]:
        claims = claims_of(text)
        assert (claims.seen, claims.side, claims.metres) == (seen, side, metres)
