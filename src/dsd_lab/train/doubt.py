"""Where the expert's reply is a near thing: what it would say if things stood a little elsewhere than they do.

The expert decides by sharp edges: it turns from 10 degrees on, and stops at 40 cm. From a picture nobody tells 9.9
from 10.1 degrees, and a learner that is only told which of them it was hears one bit of how far off the edge is. So
replies are asked for also where everything is misjudged a little at random, and each of their words is learned with the
share of these replies that have it: near an edge the share tells the distance to it (label distribution learning: X.
Geng, "Label Distribution Learning", 2016; why it teaches numbers better than one class does: E. Imani and M. White,
"Improving Regression Performance with Distributional Losses", 2018).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from dsd_lab.train.expert import reply
from dsd_lab.worlds.guide import View
from dsd_ros.robot.sim.world import Furniture, Thing

DRAWS = 20  # of misjudged replies
_MOST = 0.45  # share of all other tokens at a place: what the expert says stays the likeliest
ASIDE = math.radians(0.7)  # standard deviations: of bearings,
FAR = 0.03  # of distances from the robot's centre, as a share,
SIZE = 0.15  # and of the pixels that show a thing, as a share


def misjudged(view: View, rng: np.random.Generator) -> View:
    """A view in which everything stands a little elsewhere, as seen from the robot, and shows a little more or less."""
    x, y, yaw = view.pose
    world = view.world
    bodies = [*world.things, *world.furniture]
    far = np.exp(FAR * rng.standard_normal(len(bodies)))
    turned = ASIDE * rng.standard_normal(len(bodies))
    moved = [_moved(one, x, y, *by) for one, *by in zip(bodies, far, turned, strict=True)]
    walls = [
        half + FAR * noise * (half - math.copysign(place, place * heading))
        for half, place, heading, noise in zip(
            (world.half_x, world.half_y), (x, y), (math.cos(yaw), math.sin(yaw)),
            rng.standard_normal(2), strict=True,
        )
    ]  # fmt: skip
    count = len(world.things)
    elsewhere = replace(
        world, half_x=walls[0], half_y=walls[1], things=tuple(moved[:count]), furniture=tuple(moved[count:])
    )  # fmt: skip
    shown = {**view.pixels, **view.faint}
    size = np.exp(SIZE * rng.standard_normal(len(shown)))
    pixels = {i: round(n * s) for (i, n), s in zip(shown.items(), size, strict=True)}
    return View.showing(elsewhere, view.pose, pixels)


def _moved(one: Thing | Furniture, x: float, y: float, far: float, turned: float) -> Thing | Furniture:
    dx, dy = one.x - x, one.y - y
    c, s = far * math.cos(turned), far * math.sin(turned)
    return replace(one, x=x + c * dx - s * dy, y=y + s * dx + c * dy)


def doubts(view: View, replies: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[list[tuple[str, int]]]:
    """For each (goal, reply): the other replies given to it in DRAWS misjudged views, and how often."""
    views = [misjudged(view, rng) for _ in range(DRAWS)]
    return [
        [(other, n) for other, n in Counter(reply(one, goal) for one in views).items() if other != text]
        for goal, text in replies
    ]  # fmt: skip


def shares(
    ids: Sequence[int], others: Sequence[tuple[Sequence[int], int]], marks: tuple[int, int, int]
) -> list[tuple[int, int, float]]:
    """(place, token, share) of what else could follow in a reply, from its tokens and those of other replies.

    The shares at a place are of the replies that say the same up to there, this one counted once more; together at
    most _MOST. The clause on the other things, between the first `marks` (";") and the next of the second (","),
    bears on nothing behind it: what follows is compared as if it were not there.
    """
    parts = _clauses(ids, marks)
    begins = (0, len(parts[0]), len(parts[0]) + len(parts[1]))
    agreed = [DRAWS + 1] * len(parts)
    apart: list[tuple[int, int, int, int]] = []  # clause, place, token, how often
    for other, count in others:
        theirs = _clauses(other, marks)
        for k, (mine, their) in enumerate(zip(parts, theirs, strict=True)):
            place = _parting(mine, their)
            if place is None:
                continue
            apart.append((k, place, int(their[place]), count))
            if k == 0:
                agreed[1] -= count
                agreed[2] -= count
                break
    found: list[tuple[int, int, float]] = []
    for (k, place), group in groupby(sorted(apart), key=lambda one: one[:2]):
        tokens: Counter[int] = Counter()
        for _, _, token, count in group:
            tokens[token] += count
        scale = 1.0 / max(agreed[k], tokens.total() / _MOST)
        found += [(begins[k] + place, token, n * scale) for token, n in tokens.items()]
        agreed[k] -= tokens.total()
    return found


def _clauses(ids: Sequence[int], marks: tuple[int, int, int]) -> tuple[Sequence[int], ...]:
    """Where the goal is; what else there is; and the plan with its action."""
    semicolon, comma, _ = marks
    ids = list(ids)
    if semicolon not in ids:
        return ids, [], []
    first = ids.index(semicolon) + 1
    second = ids.index(comma, first) + 1 if comma in ids[first:] else first
    return ids[:first], ids[first:second], ids[second:]


def _parting(mine: Sequence[int], their: Sequence[int]) -> int | None:
    """The first place at which tokens differ; None where they do not."""
    for place, (one, other) in enumerate(zip(mine, their, strict=False)):
        if one != other:
            return place
    return None  # every clause ends in a mark of its own
