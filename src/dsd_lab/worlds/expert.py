# SPDX-License-Identifier: Apache-2.0
"""The simulator's expert: the reply that a perfect model would give, from what is truly there.

Its edges are sharp (10 degrees, 40 cm), and no picture tells 9.9 from 10.1 degrees, so `misjudged` moves everything a
little at random. Training learns from the replies to such views, and the evaluation tells near misses by them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dsd_lab.worlds.guide import AHEAD, LITTLE, MUCH, View, decide, split_goal
from dsd_ros.robot.sim.world import Furniture, Thing

DRAWS = 20  # misjudged views per picture in training
# Standard deviations of the misjudgement:
ASIDE = math.radians(0.7)  # bearings
FAR = 0.03  # distances from the robot's centre, as a share
SIZE = 0.15  # pixels that show a thing, as a share


def reply(view: View, goal: str, searched: bool = False) -> str:
    """The expert's reply (reasoning, then one action) for a goal such as "red chair" or "left red chair".

    `searched`: no picture of a full turn showed the goal; then the expert says that there is none, and stops.
    """
    decision = decide(view, goal, searched)
    index = decision.index
    if index is None:
        if searched:
            return f"No {goal} anywhere here, so I stop. Action: {decision.action}"
        other = _other(view, None, goal)
        seen = f"only {other}" if other else "nothing but the room"
        return f"No {goal} in view, {seen}, so I look around. Action: {decision.action}"
    where = f"The {goal} is {_side(view.bearing(index))}, {_metres(view.gap(index))} away"
    other = _other(view, index, goal)
    scene = f"{other}, " if other else "nothing else is near it, "
    around = ""
    if decision.side:
        around = f"{decision.obstacle} is in the way, so I go round its {decision.side}"
    if decision.verb == "stop":
        plan = "and I have arrived"
    elif decision.obstacle and not decision.side:
        plan = f"{decision.obstacle} blocks me"
    elif decision.verb == "forward":
        way = "open" if decision.free > 2.0 else "clear" if decision.free > 1.2 else "short"
        plan = around or f"the way is {way}"
    else:
        plan = around or f"I {decision.verb}"
    return f"{where}; {scene}{plan}. Action: {decision.action}"


def _side(bearing: float) -> str:
    size = abs(bearing)
    if size <= AHEAD:
        return "straight ahead"
    side = "left" if bearing > 0 else "right"
    if size <= LITTLE:
        return f"a little {side}"
    return f"on the {side}" if size <= MUCH else f"far {side}"


def _metres(gap: float) -> str:
    """Rounded as finely as a camera can tell: to 0.1 m nearby, then to 0.2 m, then to 0.5 m."""
    step = 0.1 if gap < 1.0 else 0.2 if gap < 2.0 else 0.5
    return f"{max(round(gap / step), 0) * step:.1f} m"


def _other(view: View, goal: int | None, name: str) -> str:
    """A clause about the thing that could be mistaken for the goal, else about the most prominent one."""
    kind = split_goal(name)[1].split()[1]
    others = [i for i in view.pixels if i != goal]
    if not others:
        return ""
    index = max(others, key=lambda i: (view.world.things[i].kind == kind, view.pixels[i]))
    thing = view.world.things[index]
    angle = view.camera_bearing(index)
    side = "left" if angle > 0.2 else "right" if angle < -0.2 else "middle"
    if goal is None:
        return f"a {thing.name} in the {side}" if side == "middle" else f"a {thing.name} on the {side}"
    apart = angle - view.camera_bearing(goal)
    beside = "left of" if apart > 0.12 else "right of" if apart < -0.12 else "in line with"
    depth = view.gap(index) - view.gap(goal)
    order = "behind" if depth > 0.35 else "before" if depth < -0.35 else "level"
    link = "not the" if thing.kind == kind else "with the"
    return f"{link} {thing.name} {beside} it and {order}"


def misjudged(view: View, rng: np.random.Generator) -> View:
    """The view with every thing moved a little at random, as seen from the robot, and showing more or less."""
    x, y, yaw = view.pose
    world = view.world
    bodies = [*world.things, *world.furniture]
    far = np.exp(FAR * rng.standard_normal(len(bodies)))
    turned = ASIDE * rng.standard_normal(len(bodies))
    moved = [_moved(one, x, y, *by) for one, *by in zip(bodies, far, turned, strict=True)]
    axes = zip(
        (world.half_x, world.half_y), (x, y), (math.cos(yaw), math.sin(yaw)), rng.standard_normal(2), strict=True
    )
    walls = [half + FAR * noise * (half - math.copysign(at, at * heading)) for half, at, heading, noise in axes]
    count = len(world.things)
    elsewhere = replace(
        world, half_x=walls[0], half_y=walls[1], things=tuple(moved[:count]), furniture=tuple(moved[count:])
    )
    shown = {**view.pixels, **view.faint}
    size = np.exp(SIZE * rng.standard_normal(len(shown)))
    pixels = {i: round(n * s) for (i, n), s in zip(shown.items(), size, strict=True)}
    return View.showing(elsewhere, view.pose, pixels)


def _moved(one: Thing | Furniture, x: float, y: float, far: float, turned: float) -> Thing | Furniture:
    dx, dy = one.x - x, one.y - y
    c, s = far * math.cos(turned), far * math.sin(turned)
    return replace(one, x=x + c * dx - s * dy, y=y + s * dx + c * dy)


def doubts(view: View, replies: Sequence[tuple[str, str]], rng: np.random.Generator) -> list[list[tuple[str, int]]]:
    """For each (goal, reply): the different replies that DRAWS misjudged views give, with their counts."""
    views = [misjudged(view, rng) for _ in range(DRAWS)]
    counts = [Counter(reply(one, goal) for one in views) for goal, _ in replies]
    return [
        [(other, n) for other, n in count.items() if other != text]
        for (_, text), count in zip(replies, counts, strict=True)
    ]
