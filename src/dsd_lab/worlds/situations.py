# SPDX-License-Identifier: Apache-2.0
"""Worlds by situation and split, each split with its own layouts, looks and look-alikes. Pure numpy.

The guide (guide.py) solves every layout from what the front camera shows, one picture at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np

from dsd_lab.worlds import sight
from dsd_lab.worlds.guide import MIN_PIXELS, View, walk
from dsd_lab.worlds.looks import look_of
from dsd_ros.python310 import StrEnum
from dsd_ros.robot.sim.world import (  # fmt: skip
    COLOURS,
    KINDS,
    RADIUS,
    ROBOT_RADIUS,
    WHICH,
    Furniture,
    NoLayoutError,
    Split,
    Thing,
    World,
    against_wall,
)

__all__ = ["NAMES", "Situation", "Split", "may_meet", "split_of_pair", "world_of"]

NAMES = tuple(f"{colour} {kind}" for colour in COLOURS for kind in KINDS)
_PARTS = 5  # one pair of look-alikes in five belongs to validation, one to the test

_TRIES = 4000  # layouts per seed
_EASY = 150  # least pixels of a target in view
_BEHIND = (0.15, 0.70)  # visible share of a hidden target
_TELLING = 0.30  # least difference of distance between two, metres
_APART = math.radians(8.0)  # least angle between two as seen from the start
_FIELD = 0.60  # radians to each side that the camera surely shows
_LONGEST = 1.6  # longest walk, times the straight way
_MOST = 16  # most actions of a walk
_CLEAR = 0.06  # clearance of a walk in metres, a margin for robots that stray a little


class Situation(StrEnum):
    """Where the goal is when the run starts."""

    PLAIN = "plain"  # in view, with look-alikes
    SEARCH = "search"  # out of view
    HIDDEN = "hidden"  # partly behind another thing
    TWO = "two"  # two of its name in view: "left", "right", "nearer" or "farther" one
    ABSENT = "absent"  # nowhere in the world

    @property
    def number(self) -> int:
        """0 to 4: part of a world's random stream."""
        return list(Situation).index(self)


# Noisy walks in which a layout must be solved, too: more where small errors matter.
_NOISY = {Situation.PLAIN: 1, Situation.SEARCH: 1, Situation.HIDDEN: 24, Situation.TWO: 4, Situation.ABSENT: 0}


@cache
def split_of_pair(one: str, other: str) -> Split | None:
    """The split that a pair of look-alikes (same kind or same colour) belongs to; None if they are not alike."""
    (colour, kind), (colour2, kind2) = one.split(), other.split()
    if (colour == colour2) == (kind == kind2):
        return None
    if kind == kind2:
        number = COLOURS.index(colour) + COLOURS.index(colour2) + KINDS.index(kind)
    else:
        number = KINDS.index(kind) + KINDS.index(kind2) + COLOURS.index(colour)
    return {0: Split.VALIDATION, 1: Split.TEST}.get(number % _PARTS, Split.TRAINING)


def may_meet(split: Split | None, one: str, other: str) -> bool:
    """Whether two things may share a room of a split (None: of no split), or one be asked for beside the other."""
    return split is None or split_of_pair(one, other) in (None, Split.TRAINING, split)


def world_of(seed: int, situation: Situation, split: Split) -> World:
    """The world of a seed in a situation and split, equal for equal arguments; ValueError, NoLayoutError."""
    if seed < 0:
        raise ValueError(f"The world's seed must not be negative, but it is {seed}.")
    situation, split = Situation(situation), Split(split)
    rng = np.random.default_rng([seed, 26, split.number, situation.number])
    name = _one(rng, NAMES)
    which = _one(rng, tuple(WHICH)) if situation is Situation.TWO else ""
    for _ in range(_TRIES):
        room = _Room(rng, situation, name, split)
        layout = room.layout(which)
        if layout is None:
            continue
        world = replace(layout, seed=seed, look=look_of(rng, split, room.half_x, room.half_y))
        if _is_so(world, situation) and _solved(world, _NOISY[situation]):
            return world
    raise NoLayoutError(seed)


class _Room:
    """A room being furnished for a situation."""

    def __init__(self, rng: np.random.Generator, situation: Situation, name: str, split: Split) -> None:
        self.rng, self.situation, self.name, self.split = rng, situation, name, split
        self.half_x, self.half_y = (float(half) for half in rng.uniform(2.0, 3.0, size=2))
        self.x = float(rng.uniform(-self.half_x + 0.6, self.half_x - 0.6))
        self.y = float(rng.uniform(-self.half_y + 0.6, self.half_y - 0.6))
        hidden = situation is Situation.HIDDEN  # then there must be room to go round
        self.distance = float(rng.uniform(1.8 if hidden else 1.3, 3.3 if hidden else 3.2))
        self.direction = float(rng.uniform(-math.pi, math.pi))
        turned = rng.uniform(-_FIELD, _FIELD)
        if situation is Situation.SEARCH:
            turned = rng.uniform(0.8, 2 * math.pi - 0.8)
        self.yaw = math.remainder(self.direction + float(turned), 2 * math.pi)
        self.things: list[Thing] = []

    def layout(self, which: str) -> World | None:
        """The world without seed and look; None where its things do not fit."""
        colour, kind = self.name.split()
        here = self.situation is not Situation.ABSENT
        target = self._thing(self.name, *self._at(self.distance, self.direction))
        if not self._inside(target, 0.2):
            return None
        if here:
            self.things.append(target)
        if self.situation is Situation.TWO and not self._put_in_view(self.name, 1.0, 3.3):
            return None
        if self.situation is Situation.HIDDEN and not self._put_before(target):
            return None
        for shared in (kind, colour):
            other = _one(self.rng, self._look_alikes(shared))
            if self.rng.random() < 0.8:
                self._put_in_view(other, 0.9, 3.4)
            else:
                self._put_anywhere(other)
        if self.split not in {split_of_pair(self.name, thing.name) for thing in self.things}:
            return None
        for _ in range(int(self.rng.integers(1, 5))):
            other = _one(self.rng, self._welcome())
            if other != self.name and all(t.name != other for t in self.things):
                self._put_anywhere(other)
        if len(self.things) < 3:
            return None
        furniture = self._furniture()
        order = self.rng.permutation(len(self.things))
        index = int(np.argmin(order)) if here else None
        goal = f"{which} {self.name}" if which else self.name
        return World(
            seed=0,
            half_x=self.half_x,
            half_y=self.half_y,
            things=tuple(self.things[i] for i in order),
            furniture=furniture,
            target_index=index,
            start=(self.x, self.y, self.yaw),
            instruction=f"find the {goal}",
            situation=self.situation.value,
            which=which,
            missing="" if here else self.name,
        )

    def _welcome(self) -> list[str]:
        """Names that the split allows here."""
        here = (self.name, *(thing.name for thing in self.things))
        return [name for name in NAMES if all(may_meet(self.split, name, one) for one in here)]

    def _look_alikes(self, shared: str) -> list[str]:
        """Allowed names of the goal's kind or colour: the split's own pairs, where there are any."""
        alike = [n for n in self._welcome() if n != self.name and shared in n.split()]
        own = [n for n in alike if split_of_pair(self.name, n) is self.split]
        return own or alike

    def _at(self, distance: float, direction: float) -> tuple[float, float]:
        return (self.x + distance * math.cos(direction), self.y + distance * math.sin(direction))

    def _thing(self, name: str, x: float, y: float) -> Thing:
        colour, kind = name.split()
        return Thing(kind, colour, x, y, float(self.rng.uniform(-math.pi, math.pi)))

    def _inside(self, thing: Thing, spare: float) -> bool:
        edge = thing.radius + spare
        return abs(thing.x) < self.half_x - edge and abs(thing.y) < self.half_y - edge

    def _put(self, name: str, x: float, y: float, spare: float = 0.25) -> bool:
        """Place a thing, unless something is too near."""
        thing = self._thing(name, x, y)
        free = self._inside(thing, 0.05) and all(
            math.hypot(x - t.x, y - t.y) > thing.radius + t.radius + spare for t in self.things
        )
        if free and math.hypot(x - self.x, y - self.y) > thing.radius + ROBOT_RADIUS + 0.2:
            self.things.append(thing)
            return True
        return False

    def _put_in_view(self, name: str, nearest: float, farthest: float) -> bool:
        for _ in range(30):
            distance = float(self.rng.uniform(nearest, farthest))
            direction = self.yaw + float(self.rng.uniform(-_FIELD, _FIELD))
            place = self._at(distance, direction)
            if self._off_the_way(name, *place) and self._put(name, *place):
                return True
        return False

    def _put_anywhere(self, name: str) -> None:
        for _ in range(30):
            x = float(self.rng.uniform(-self.half_x, self.half_x))
            y = float(self.rng.uniform(-self.half_y, self.half_y))
            if self._off_the_way(name, x, y) and self._put(name, x, y):
                return

    def _put_before(self, target: Thing) -> bool:
        """Place something that partly covers the target as seen from the start."""
        large = [n for n in self._welcome() if not n.endswith((" bottle", " can"))]
        name = _one(self.rng, [n for n in large if n != self.name])
        radius = RADIUS[name.split()[1]]
        for _ in range(10):
            share = float(self.rng.uniform(0.45, 0.85))
            aside = float(self.rng.uniform(0.3, 1.0)) * (radius + target.radius * share)
            aside *= 1 if self.rng.random() < 0.5 else -1
            x, y = self._at(self.distance * share, self.direction)
            x -= aside * math.sin(self.direction)
            y += aside * math.cos(self.direction)
            if self._put(name, x, y, 0.12):
                return True
        return False

    def _off_the_way(self, name: str, x: float, y: float) -> bool:
        """Whether a thing there keeps the straight way to the target free."""
        along = (x - self.x) * math.cos(self.direction) + (y - self.y) * math.sin(self.direction)
        along = min(max(along, 0.0), self.distance)
        way_x, way_y = self._at(along, self.direction)
        return math.hypot(x - way_x, y - way_y) > RADIUS[name.split()[1]] + ROBOT_RADIUS + 0.2

    def _furniture(self) -> tuple[Furniture, ...]:
        kept = []
        for _ in range(int(self.rng.integers(1, 4))):
            piece = against_wall(self.rng, self.half_x, self.half_y)
            free = all(piece.distance(t.x, t.y) > t.radius + 0.25 for t in self.things)
            way = min(piece.distance(*self._at(float(s), self.direction)) for s in np.linspace(0.0, self.distance, 12))
            if free and way > ROBOT_RADIUS + 0.25:
                kept.append(piece)
        return tuple(kept)


def _one(rng: np.random.Generator, names: tuple[str, ...] | list[str]) -> str:
    return names[int(rng.integers(len(names)))]


def _is_so(world: World, situation: Situation) -> bool:
    """Whether the camera's first picture fits the situation."""
    if world.target_index is None:
        return bool(View.at(world, world.start).pixels)
    seen = sight.pixels_of(world, world.start, world.target_index)
    if situation is Situation.SEARCH:
        return seen == 0
    if situation is Situation.HIDDEN:
        whole = sight.visible_pixels(world, world.start, alone=world.target_index)
        share = seen / max(whole.get(world.target_index, 0), 1)
        return seen >= 1.5 * MIN_PIXELS and _BEHIND[0] <= share <= _BEHIND[1]
    if situation is Situation.TWO:
        name = world.target.name
        return seen >= _EASY and _one_is_meant(View.at(world, world.start, name))
    return seen >= _EASY


def _one_is_meant(view: View) -> bool:
    """Whether two things of the name are in view, clearly apart, and the goal means the target."""
    world = view.world
    both = view.named(world.target.name)
    if len(both) != 2 or min(view.pixels[i] for i in both) < _EASY:
        return False
    one, other = both
    apart = abs(view.camera_bearing(one) - view.camera_bearing(other))
    telling = world.which in ("left", "right") or abs(view.gap(one) - view.gap(other)) > _TELLING
    return apart > _APART and telling and view.index_of(world.goal) == world.target_index


def _solved(world: World, noisy: int) -> bool:
    """Whether the guide reaches the target by pictures alone, without a long detour, and in `noisy` noisy walks."""
    for number in range(1 + noisy):
        rng = np.random.default_rng([world.seed, 30, number]) if number else None
        run = walk(world, _MOST, rng, _CLEAR)
        if not run.reached:
            return False
        if world.target_index is None:
            return True
        straight = math.dist((world.target.x, world.target.y), world.start[:2])
        # Nor may it take another thing of the same name for the goal on the way.
        meant = all(view.index_of(world.goal) in (None, world.target_index) for view in run.views)
        if run.length > _LONGEST * straight or not meant:
            return False
    return True
