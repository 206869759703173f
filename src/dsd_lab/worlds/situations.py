"""Worlds of a situation and a split: what training, validation and test are made of. Pure numpy.

Each split has layouts, looks and combinations of look-alikes of its own. Every layout is one that the guide
(guide.py) solves from what the front camera shows, one picture at a time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import StrEnum
from functools import cache

import numpy as np

from dsd_lab.worlds import sight
from dsd_lab.worlds.guide import MIN_PIXELS, View, walk
from dsd_ros.robot.sim.looks import Split, look_of
from dsd_ros.robot.sim.world import (  # fmt: skip
    COLOURS,
    KINDS,
    RADIUS,
    ROBOT_RADIUS,
    WHICH,
    Furniture,
    Goal,
    NoLayoutError,
    Thing,
    World,
    against_wall,
)

__all__ = ["NAMES", "Situation", "Split", "may_meet", "split_of_pair", "two_of", "world_of"]

NAMES = tuple(f"{colour} {kind}" for colour in COLOURS for kind in KINDS)
_PARTS = 5  # one in five pairs of look-alikes is validation's, one the test's

_TRIES = 4000  # layouts of a seed before it is given up
_EASY = 150  # pixels that a target in view shows at least
_BEHIND = (0.15, 0.70)  # shares of a hidden target that are still to be seen
_TELLING = 0.30  # metres by which one of two must be nearer
_APART = math.radians(8.0)  # between two as seen at the start, at least
_FIELD = 0.60  # radians to each side that the camera shows for certain
_LONGEST = 1.6  # times the straight way: what a walk may take
_MOST = 16  # actions of a walk
_CLEAR = 0.06  # metres that a walk keeps from everything, for whoever walks a little beside it


class Situation(StrEnum):
    """How a goal stands to what the camera shows at the start."""

    PLAIN = "plain"  # in view, with look-alikes
    SEARCH = "search"  # out of view
    HIDDEN = "hidden"  # partly behind another thing
    TWO = "two"  # two of its name in view: "left", "right", "nearer" or "farther" one
    ABSENT = "absent"  # nowhere in the world

    @property
    def number(self) -> int:
        """0 to 4: part of a world's random stream."""
        return list(Situation).index(self)


# Noisy walks that a layout must stand, where a little off the way can make a difference.
_NOISY = {Situation.PLAIN: 1, Situation.SEARCH: 1, Situation.HIDDEN: 24, Situation.TWO: 4, Situation.ABSENT: 0}


@cache
def split_of_pair(one: str, other: str) -> Split | None:
    """The split that two look-alikes (of one kind or one colour) are kept for; None of other things.

    Validation and test show look-alikes together that training never does, as "red can" and "red ball".
    """
    (colour, kind), (colour2, kind2) = one.split(), other.split()
    if (colour == colour2) == (kind == kind2):
        return None
    if kind == kind2:
        number = COLOURS.index(colour) + COLOURS.index(colour2) + KINDS.index(kind)
    else:
        number = KINDS.index(kind) + KINDS.index(kind2) + COLOURS.index(colour)
    return {0: Split.VALIDATION, 1: Split.TEST}.get(number % _PARTS, Split.TRAINING)


def may_meet(split: Split | None, one: str, other: str) -> bool:
    """Whether two things may stand in one room of a split (None: of none), or one be asked for beside the other."""
    return split is None or split_of_pair(one, other) in (None, Split.TRAINING, split)


def world_of(seed: int, situation: Situation, split: Split) -> World:
    """The world of a seed in a situation, of a split; equal arguments give equal worlds.

    Raises ValueError on a negative seed, NoLayoutError on the few of which no room comes.
    """
    if seed < 0:
        raise ValueError(f"The world's seed must not be negative, but it is {seed}.")
    situation, split = Situation(situation), Split(split)
    rng = np.random.default_rng([seed, 26, split.number, situation.number])
    name = _one(rng, NAMES)
    which = _one(rng, tuple(WHICH)) if situation is Situation.TWO else ""
    return _found(seed, rng, situation, name, which, split)


def two_of(seed: int, goal: Goal) -> World:
    """A seed's world, of no split and look, with two of what a goal names, one of which it means.

    Raises ValueError on a negative seed.
    """
    if seed < 0:
        raise ValueError(f"The world's seed must not be negative, but it is {seed}.")
    rng = np.random.default_rng([seed, 29])
    return _found(seed, rng, Situation.TWO, goal.thing, goal.which, None)


def _found(
    seed: int, rng: np.random.Generator, situation: Situation, name: str, which: str, split: Split | None
) -> World:
    for _ in range(_TRIES):
        room = _Room(rng, situation, name, split)
        layout = room.layout(which)
        if layout is None:
            continue
        look = None if split is None else look_of(rng, split, room.half_x, room.half_y)
        world = replace(layout, seed=seed, look=look)
        if _is_so(world, situation) and _solved(world, _NOISY[situation]):
            return world
    raise NoLayoutError(seed)


class _Room:
    """A room being furnished for a situation."""

    def __init__(self, rng: np.random.Generator, situation: Situation, name: str, split: Split | None) -> None:
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
        """The world (seed and look still to be set), None where its things have no room."""
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
        if self._lacks_its_pair():
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
        """Names that may stand here, by the split."""
        here = (self.name, *(thing.name for thing in self.things))
        return [name for name in NAMES if all(may_meet(self.split, name, one) for one in here)]

    def _look_alikes(self, shared: str) -> list[str]:
        """Of them those that share the goal's kind or colour: pairs of this split's own, where there are any."""
        alike = [n for n in self._welcome() if n != self.name and shared in n.split()]
        own = [n for n in alike if split_of_pair(self.name, n) is self.split]
        return own or alike

    def _lacks_its_pair(self) -> bool:
        """Whether no look-alike here is one that only this split shows beside the goal."""
        pairs = {split_of_pair(self.name, thing.name) for thing in self.things}
        return self.split is not None and self.split not in pairs

    def _at(self, distance: float, direction: float) -> tuple[float, float]:
        return (self.x + distance * math.cos(direction), self.y + distance * math.sin(direction))

    def _thing(self, name: str, x: float, y: float) -> Thing:
        colour, kind = name.split()
        return Thing(kind, colour, x, y, float(self.rng.uniform(-math.pi, math.pi)))

    def _inside(self, thing: Thing, spare: float) -> bool:
        edge = thing.radius + spare
        return abs(thing.x) < self.half_x - edge and abs(thing.y) < self.half_y - edge

    def _put(self, name: str, x: float, y: float, spare: float = 0.25) -> bool:
        """Stand a thing somewhere, unless that is too near to something."""
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
        """Stand something that covers a part of the target as seen from the start."""
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
        """Whether a thing there leaves the straight way to the target free."""
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
    """Whether a layout is what its situation says, by what the camera shows at the start."""
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
    """Whether two of a name are in view, clearly apart, and the world's goal means its target."""
    world = view.world
    both = view.named(world.target.name)
    if len(both) != 2 or min(view.pixels[i] for i in both) < _EASY:
        return False
    one, other = both
    apart = abs(view.camera_bearing(one) - view.camera_bearing(other))
    telling = world.which in ("left", "right") or abs(view.gap(one) - view.gap(other)) > _TELLING
    return apart > _APART and telling and view.index_of(world.goal) == world.target_index


def _solved(world: World, noisy: int) -> bool:
    """Whether the guide reaches the target clear of everything, without a detour out of proportion, by pictures alone.

    `noisy`: as often it must do so with a real robot's noise, too.
    """
    for number in range(1 + noisy):
        rng = np.random.default_rng([world.seed, 30, number]) if number else None
        run = walk(world, _MOST, rng, _CLEAR)
        if not run.reached:
            return False
        if world.target_index is None:
            return True
        straight = math.dist((world.target.x, world.target.y), world.start[:2])
        # It must not go for another thing of the name on the way, either.
        meant = all(view.index_of(world.goal) in (None, world.target_index) for view in run.views)
        if run.length > _LONGEST * straight or not meant:
            return False
    return True
