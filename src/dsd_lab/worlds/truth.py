# SPDX-License-Identifier: Apache-2.0
"""Whether what a reply says about a picture is true, by what the simulator knows.

The words are read loosely, so that other models can be judged; the expert's own clauses on the other thing word for
word.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dsd_lab.worlds.guide import View
from dsd_ros.robot.sim.world import COLOURS, KINDS, WHICH, Goal

FIGURES = ("object", "colour", "side", "distance", "other")
SIDE_SLACK = math.radians(3.0)  # tolerance at the border between two sides
METRES_SLACK = 0.25  # the smallest step, and the expert's coarsest rounding
_AHEAD = math.radians(10.0)  # the expert says "straight ahead" up to here
_PICTURE_SIDE = 0.2  # rad from the camera's axis: where its words for the other thing begin
_BESIDE, _DEPTH = 0.12, 0.35  # rad and metres of its words for where the other thing stands
_ANGLE_SLACK, _DEPTH_SLACK = 0.03, 0.1

_COLOUR = "|".join(COLOURS)
_KIND = "|".join(KINDS)
_THING = re.compile(rf"\b(?:({_COLOUR})\s+)?({_KIND})(?:s|es)?\b")
_WHICH_OF = {word: which for which, words in WHICH.items() for word in words}
_GOAL = re.compile(rf"\b(?:({'|'.join(_WHICH_OF)})\s+)?({_COLOUR})\s+({_KIND})(?:s|es)?\b")
_UNSEEN = re.compile(
    rf"\b(?:no|not any)\b[^.;,]{{0,40}}\b(?:{_KIND})\b|\bnone\b|\bnot (?:in view|visible|in sight|seen|here|in the)"
    r"|(?:n't|not|cannot) see\b|\bnowhere\b|\bout of (?:view|sight)\b"
)
_SIDES = re.compile(r"\b(?:(?P<ahead>ahead|in front|centre|center|middle)|(?P<left>left)|(?P<right>right))\b")
# The word for which of two says nothing about where the thing stands.
_WHICH = re.compile(rf"\b(?:left|right)(?:most)?\s+(?=(?:{_COLOUR})\s+(?:{_KIND})\b|one\b)")
_METRES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:m|metres?|meters?)\b")
_RELATION = re.compile(
    rf"\b(?:not the|with the) ({_COLOUR}) ({_KIND}) (left of|right of|in line with) it"
    r" and (behind|before|level)\b"
)
_ONLY = re.compile(rf"\bonly an? ({_COLOUR}) ({_KIND}) (?:on|in) the (left|right|middle)\b")
_NOTHING = re.compile(r"\bnothing (?:else|but the room)\b")


@dataclass(frozen=True)
class Claims:
    """What a reply says about the goal, and of other things (colour, kind); None where it says nothing."""

    seen: bool
    kind: str | None
    colour: str | None
    side: str | None = None
    metres: float | None = None
    mentioned: tuple[tuple[str | None, str], ...] = ()
    relation: tuple[str, ...] = ()
    nothing_else: bool = False


def claims_of(text: str) -> Claims:
    """What the words of a reply say before its action; never raises."""
    words = " ".join(text.lower().split()).partition("action:")[0]
    clause, _, rest = words.partition(";")
    if not rest:
        # Without the expert's semicolon, the first side and distance are the goal's.
        clause = rest = words
    things = [(m[1], m[2]) for m in _THING.finditer(words)]
    colour, kind = things[0] if things else (None, None)
    seen = kind is not None and _UNSEEN.search(clause.partition(",")[0]) is None
    relation, only = _RELATION.search(rest), _ONLY.search(rest)
    said: tuple[str, ...] = ()
    others = [thing for thing in dict.fromkeys(things[1:]) if thing != (colour, kind)]
    if relation is not None:
        others, said = [(relation[1], relation[2])], (relation[3], relation[4])
    elif only is not None:
        others, said = [(only[1], only[2])], (only[3],)
    elif _NOTHING.search(rest):
        others = []
    side = _SIDES.search(_WHICH.sub("", clause)) if seen else None
    metres = _METRES.search(clause) if seen else None
    where = None if side is None else str(side.lastgroup)
    far = None if metres is None else float(metres[1])
    return Claims(seen, kind, colour, where, far, tuple(others), said, _NOTHING.search(rest) is not None)


def truths(text: str, view: View, goal: str) -> dict[str, bool | None]:
    """Which of ``FIGURES`` a reply tells truly about a goal; None where there is nothing to tell.

    Side and distance are asked for where the goal is in view, within 3 degrees and 0.25 m. other: the other thing that
    it names is where it says; "nothing else" is true when there is nothing.
    """
    claims = claims_of(text)
    *_, colour, kind = goal.split()
    index = view.index_of(goal)
    found: dict[str, bool | None] = {
        "object": claims.kind == kind and claims.seen == (index is not None),
        "colour": claims.colour == colour,
        "side": None,
        "distance": None,
        "other": _other(claims, view, index),
    }
    if index is not None:
        sides = {side_of(view.bearing(index) + slack) for slack in (-SIDE_SLACK, 0.0, SIDE_SLACK)}
        found["side"] = claims.side is not None and claims.side in sides
        gap = max(view.gap(index), 0.0)
        found["distance"] = claims.metres is not None and (abs(claims.metres - gap) <= METRES_SLACK + 1e-9)
    return found


def names_goal(text: str, goal: str) -> bool:
    """Whether the first thing that a reply names is its goal, such as "red chair" or "left red chair"."""
    named = _GOAL.search(text.lower())
    if named is None:
        return False
    return Goal(named[3], named[2], _WHICH_OF.get(named[1] or "", "")).name == goal


def truthful(found: dict[str, bool | None]) -> bool:
    """Whether nothing that a reply has to tell is wrong."""
    return all(value is not False for value in found.values())


def side_of(bearing: float) -> str:
    """The expert's word for a bearing in radians: left, ahead or right."""
    return "ahead" if abs(bearing) <= _AHEAD else "left" if bearing > 0 else "right"


def _other(claims: Claims, view: View, goal: int | None) -> bool | None:
    others = {index for index in view.pixels if index != goal}
    if claims.nothing_else:
        return not others
    if not claims.mentioned:
        return None
    return all(
        any(_is_so(claims, view, goal, index) for index in others if _named(view, index, name))
        for name in claims.mentioned
    )


def _named(view: View, index: int, name: tuple[str | None, str]) -> bool:
    thing = view.world.things[index]
    return thing.kind == name[1] and name[0] in (None, thing.colour)


def _is_so(claims: Claims, view: View, goal: int | None, index: int) -> bool:
    """Whether ``index`` is the other thing, as far as the reply tells its place."""
    angle = view.camera_bearing(index)
    if len(claims.relation) == 1:
        return _around(claims.relation[0], angle, _PICTURE_SIDE, ("left", "middle", "right"))
    if len(claims.relation) == 2:
        if goal is None:
            return False  # it stands in relation to a goal that is not there
        beside, order = claims.relation
        apart = angle - view.camera_bearing(goal)
        depth = view.gap(index) - view.gap(goal)
        return _around(beside, apart, _BESIDE, ("left of", "in line with", "right of")) and _around(
            order, depth, _DEPTH, ("behind", "level", "before"), _DEPTH_SLACK
        )
    return True


def _around(said: str, value: float, edge: float, words: tuple[str, str, str], slack: float = _ANGLE_SLACK) -> bool:
    """Whether a word for above ``edge``, within it, or below ``-edge`` is true, give or take ``slack``."""
    high, middle, low = words
    if said == high:
        return value > edge - slack
    if said == low:
        return value < slack - edge
    return said == middle and abs(value) <= edge + slack
