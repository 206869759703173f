# SPDX-License-Identifier: Apache-2.0
"""Seeded indoor worlds: a room, coloured things in it, one of them the target. Pure numpy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from dsd_ros.python310 import StrEnum

Colour = tuple[float, float, float]  # red, green, blue, 0 to 1

KINDS = ("bottle", "chair", "box", "ball", "can")
COLOURS = ("red", "green", "blue", "yellow", "silver", "white", "black", "orange")

# Radius of the circle that represents a thing in collisions and distances, and its height, in metres.
RADIUS = {"bottle": 0.07, "chair": 0.26, "box": 0.19, "ball": 0.15, "can": 0.09}
HEIGHT = {"bottle": 0.42, "chair": 0.80, "box": 0.27, "ball": 0.30, "can": 0.22}

ROBOT_RADIUS = 0.3  # m, of the circle that represents the Go2 (0.70 m x 0.31 m)
REACH = 0.6  # m; the target is reached within this gap
CAMERA_HEIGHT = 0.36  # m above the floor; this and the pitch (rad, downwards) are for worlds without a look
CAMERA_PITCH = math.radians(17.0)
_CORRIDOR = ROBOT_RADIUS + 0.2  # kept free on both sides of the line from start to target

# Which of several things of one name is meant, and the words for it.
WHICH = {
    "left": ("left", "leftmost"),
    "right": ("right", "rightmost"),
    "nearer": ("nearer", "nearest", "closer", "closest"),
    "farther": ("farther", "farthest", "further", "furthest"),
}


class NoLayoutError(ValueError):
    """A seed, the one argument, that yields no suitable world."""

    def __str__(self) -> str:
        return f"No layout was found for the world's seed {self.args[0]}; take another seed."


class Split(StrEnum):
    """The purpose of a world."""

    TRAINING = "training"
    VALIDATION = "validation"
    TEST = "test"

    @property
    def number(self) -> int:
        """0, 1 or 2: part of every random seed, so that no two splits share a stream."""
        return list(Split).index(self)


@dataclass(frozen=True)
class Surface:
    """A MuJoCo texture: pattern, mark on each tile, two colours, tiles along a side."""

    pattern: str
    mark: str
    colour: Colour
    second: Colour
    repeat: float


@dataclass(frozen=True)
class Light:
    """A lamp: position in metres, brightness of each channel."""

    x: float
    y: float
    z: float
    colour: Colour


@dataclass(frozen=True)
class Look:
    """The look of a room. ``camera_height`` in metres, ``camera_pitch`` in radians downwards."""

    split: Split
    floor: Surface
    wall: Surface
    wood: Colour
    ambient: float
    lights: tuple[Light, ...]
    camera_height: float
    camera_pitch: float


@dataclass(frozen=True)
class Thing:
    """One coloured object on the floor; position in metres, yaw in radians."""

    kind: str
    colour: str
    x: float
    y: float
    yaw: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def radius(self) -> float:
        return RADIUS[self.kind]


@dataclass(frozen=True)
class Furniture:
    """An axis-aligned cabinet: centre and half sizes in metres."""

    x: float
    y: float
    half_x: float
    half_y: float
    height: float

    def distance(self, x: float, y: float) -> float:
        """Distance of a point on the floor to the cabinet's side, 0 inside."""
        dx = max(abs(x - self.x) - self.half_x, 0.0)
        dy = max(abs(y - self.y) - self.half_y, 0.0)
        return math.hypot(dx, dy)


@dataclass(frozen=True)
class World:
    """A room with its origin in the middle, x forward, y left, angles counter-clockwise."""

    seed: int
    half_x: float
    half_y: float
    things: tuple[Thing, ...]
    furniture: tuple[Furniture, ...]
    target_index: int | None  # None: what is asked for is not here
    start: tuple[float, float, float]
    instruction: str
    situation: str = "plain"
    look: Look | None = None  # None: drawn from the seed, as scene.py has it
    which: str = ""  # of several things called like the target: left, right, nearer or farther
    missing: str = ""  # the name of what is asked for, where it is not here

    @property
    def target(self) -> Thing:
        """The thing to go to. Raises ValueError where what is asked for is not in the world."""
        if self.target_index is None:
            raise ValueError(f"No {self.missing} is in this world, so it has no target.")
        return self.things[self.target_index]

    @property
    def goal(self) -> str:
        """What is asked for: "red chair", "left red chair", "nearer red chair" and so on."""
        name = self.missing if self.target_index is None else self.target.name
        return f"{self.which} {name}" if self.which else name

    @property
    def camera(self) -> tuple[float, float]:
        """Height in metres and pitch in radians (downwards) of the front camera."""
        if self.look is None:
            return CAMERA_HEIGHT, CAMERA_PITCH
        return self.look.camera_height, self.look.camera_pitch

    @classmethod
    def from_seed(cls, seed: int, instruction: str | None = None) -> World:
        """The world of a seed; an instruction makes the thing it names the target.

        An instruction that says which of two ("the left red chair") gives a world with two of them in
        view at the start. Raises ValueError when the instruction names no thing that this world can hold.
        """
        if seed < 0:
            raise ValueError(f"The world's seed must not be negative, but it is {seed}.")
        rng = np.random.default_rng([seed, 20])
        kind, colour, which = str(rng.choice(KINDS)), str(rng.choice(COLOURS)), ""
        if instruction is not None:
            goal = named_goal(instruction)
            kind, colour, which = goal.kind, goal.colour, goal.which
        for _ in range(1000):
            world = _try_layout(seed, rng, kind, colour, which)
            if world is not None:
                return replace(world, instruction=instruction or f"find the {colour} {kind}")
        raise NoLayoutError(seed)

    def gap(self, x: float, y: float, index: int | None = None) -> float:
        """Distance between the robot's circle at (x, y) and a thing's surface (default: the target's), m."""
        thing = self.target if index is None else self.things[index]
        return math.hypot(thing.x - x, thing.y - y) - thing.radius - ROBOT_RADIUS

    def clearance(self, x: float, y: float, ignore: int | None = None) -> float:
        """Distance between the robot's circle at (x, y) and the nearest obstacle, m; negative inside."""
        nearest = min(self.half_x - abs(x), self.half_y - abs(y))
        for index, thing in enumerate(self.things):
            if index != ignore:
                nearest = min(nearest, math.hypot(thing.x - x, thing.y - y) - thing.radius)
        for cabinet in self.furniture:
            nearest = min(nearest, cabinet.distance(x, y))
        return nearest - ROBOT_RADIUS


@dataclass(frozen=True)
class Goal:
    """What an instruction asks for; ``which`` is a key of WHICH, "" where only one is expected."""

    kind: str
    colour: str
    which: str = ""

    @property
    def thing(self) -> str:
        return f"{self.colour} {self.kind}"

    @property
    def name(self) -> str:
        return f"{self.which} {self.thing}" if self.which else self.thing


_NAME = rf"(?P<colour>{'|'.join(COLOURS)})\s+(?P<kind>{'|'.join(KINDS)})"


def _words(*which: str) -> str:
    return "|".join(word for one in which for word in WHICH[one])


_WORD = rf"(?P<which>{_words(*WHICH)})"
_BETWEEN = r"(?:one|of|the|these|those|two|both|hand)"
_AFTER_NAME = r"(?:that|which|is|stands|it|one|the|to|on|at|your|more|being|lying|standing)"
_NO_SIDE = (  # what makes a "right" or "left" no side
    r"(?<=right)(?:\s+(?:now|away|there|here|where|by|beside|next|behind|in\s+front|this\s+(?:minute|second|instant|moment))\b|\?)"
)
_SO_FAR = rf"(?:\s+(?!(?:and|or|{'|'.join(KINDS)})\b)\w+)"  # a word that still refers to the thing
_GOALS = (
    # "the left red chair", "the nearest one of the two red chairs", not "he left the red chair"
    re.compile(rf"\b{_WORD}(?!\s+the\b)[\s-]+(?:{_BETWEEN}\s+)*{_NAME}(?:e?s)?\b"),
    # "the red chair on the left", "the red chair that is nearer", not "left of the box", "right away"
    re.compile(rf"\b{_NAME}(?:e?s)?[\s,:]+(?:{_AFTER_NAME}\s+)*{_WORD}\b(?!\s+of\s+(?!the\s+two|both))(?!{_NO_SIDE})"),
    # "the red chair that I see over there on my left", "the red chair over there that looks nearer"
    re.compile(
        rf"\b{_NAME}{_SO_FAR}{{,6}}\s+(?:the|your|my|our)\s+(?P<which>{_words('left', 'right')})\b"
        r"(?!\s+of\s+(?!the\s+two|both))"
    ),
    re.compile(rf"\b{_NAME}{_SO_FAR}{{1,4}}\s+(?P<which>{_words('nearer', 'farther')})\b"),
    re.compile(rf"\b{_NAME}(?:e?s)?\b"),
)
_ONE = (  # said apart from the name: "two red chairs: go to the left one", "... to the one on the left"
    re.compile(rf"\b{_WORD}(?:-hand)?\s+one\b"),
    re.compile(rf"\bthe\s+one\s+(?:{_AFTER_NAME}\s+)+{_WORD}\b"),
    re.compile(rf"\b(?:on|at|to)\s+(?:the|your|my)\s+{_WORD}(?:\s+side)?(?:\s+there)?(?:\s+is|'s)\s+(?:the|an?)\b"),
    re.compile(rf"\bthe\s+(?P<which>{_words('nearer', 'farther')})\s+of\b"),
)


def named_goal(instruction: str) -> Goal:
    """The first goal that an instruction names, and which of several is meant.

    "find the red chair", "the left red chair", "the red chair on the left", "the nearest of the two red chairs",
    "the red chair that is farther away". Raises ValueError where it names no colour and kind.
    """
    text = instruction.lower()
    found = [match for pattern in _GOALS if (match := pattern.search(text))]
    if not found:
        shown = instruction if len(instruction) <= 60 else instruction[:57] + "..."
        raise ValueError(
            f"The instruction {shown!r} names nothing that the simulated world can hold: name a "
            f"colour ({', '.join(COLOURS)}) followed by a kind ({', '.join(KINDS)})."
        )
    first = min(found, key=lambda match: match.start("colour"))
    one = next((match for pattern in _ONE if (match := pattern.search(text))), None)
    said = first.groupdict().get("which") or (one["which"] if one else None)
    which = next((name for name, words in WHICH.items() if said in words), "")
    return Goal(first["kind"], first["colour"], which)


def _try_layout(seed: int, rng: np.random.Generator, kind: str, colour: str, which: str = "") -> World | None:
    """A room around a target, None where its things do not fit; `which` adds a second thing of the target's name."""
    half_x, half_y = rng.uniform(2.0, 3.0, size=2)
    start_x = rng.uniform(-half_x + 0.6, half_x - 0.6)
    start_y = rng.uniform(-half_y + 0.6, half_y - 0.6)
    distance = rng.uniform(1.3, 3.2)
    direction = rng.uniform(-math.pi, math.pi)
    way = [(start_x + s * math.cos(direction), start_y + s * math.sin(direction)) for s in (0.0, distance)]
    target = Thing(kind, colour, *way[1], rng.uniform(-math.pi, math.pi))
    if abs(target.x) > half_x - 0.45 or abs(target.y) > half_y - 0.45:
        return None
    # Three starts in four show the target, the others make the robot look around; one of two stands well in view.
    off = rng.uniform(-0.6, 0.6) if rng.random() < 0.75 else rng.uniform(-math.pi, math.pi)
    off = rng.uniform(-0.3, 0.3) if which else off
    start = (float(start_x), float(start_y), math.remainder(direction + off, 2 * math.pi))
    things = [target]

    def fits(thing: Thing) -> bool:
        apart = all(math.hypot(thing.x - t.x, thing.y - t.y) > thing.radius + t.radius + 0.25 for t in things)
        return apart and _beside(thing, way[0], direction, distance) > thing.radius + _CORRIDOR

    if which:
        twin = _twin(rng, target, which, start)
        if twin is None or not fits(twin) or abs(twin.x) > half_x - 0.45 or abs(twin.y) > half_y - 0.45:
            return None
        things.append(twin)
    both = tuple(things) if which else ()
    for other_kind, other_colour in _other_names(rng, kind, colour):
        for _ in range(30):
            radius = RADIUS[other_kind]
            x = rng.uniform(-half_x + radius + 0.05, half_x - radius - 0.05)
            y = rng.uniform(-half_y + radius + 0.05, half_y - radius - 0.05)
            other = Thing(other_kind, other_colour, x, y, 0.0)
            if fits(other) and not any(_hides(other, thing, start) for thing in both):
                things.append(replace(other, yaw=float(rng.uniform(-3.14, 3.14))))
                break
    if len(things) < 3:
        return None
    furniture = _cabinets(rng, half_x, half_y, things, way)
    order = rng.permutation(len(things))
    placed, target_index = tuple(things[i] for i in order), int(np.argmin(order))
    return World(seed, float(half_x), float(half_y), placed, furniture, target_index, start, "", which=which)


def _beside(thing: Thing, start: tuple[float, float], direction: float, distance: float) -> float:
    """Distance from a thing's centre to the straight line from start to target, m."""
    along = (thing.x - start[0]) * math.cos(direction) + (thing.y - start[1]) * math.sin(direction)
    along = min(max(along, 0.0), distance)
    return math.hypot(
        thing.x - (start[0] + along * math.cos(direction)), thing.y - (start[1] + along * math.sin(direction))
    )


def _twin(rng: np.random.Generator, target: Thing, which: str, start: tuple[float, float, float]) -> Thing | None:
    """A second thing of the target's name, in view at the start; None where `which` does not clearly mean the first."""
    distance, bearing = rng.uniform(0.9, 3.6), rng.uniform(-0.6, 0.6)
    farther, to_the_left = (b - a for a, b in zip(_seen_from(start, target), (distance, bearing), strict=True))
    apart = {"left": -to_the_left, "right": to_the_left, "nearer": farther - 0.15, "farther": -farther - 0.15}[which]
    if apart < 0.25 or abs(to_the_left) < 0.2:
        return None
    angle = start[2] + bearing
    x, y = start[0] + distance * math.cos(angle), start[1] + distance * math.sin(angle)
    return replace(target, x=x, y=y, yaw=float(rng.uniform(-3.14, 3.14)))


def _seen_from(start: tuple[float, float, float], thing: Thing) -> tuple[float, float]:
    """Distance in metres and bearing in radians, positive to the left."""
    dx, dy = thing.x - start[0], thing.y - start[1]
    return math.hypot(dx, dy), math.remainder(math.atan2(dy, dx) - start[2], 2 * math.pi)


def _hides(other: Thing, thing: Thing, start: tuple[float, float, float]) -> bool:
    """Whether one thing could cover a part of another at the start."""
    (near, one), (far, two) = _seen_from(start, other), _seen_from(start, thing)
    return near < far and abs(math.remainder(one - two, 2 * math.pi)) < 0.1 + other.radius / near + thing.radius / far


def _cabinets(
    rng: np.random.Generator, half_x: float, half_y: float, things: list[Thing], way: list[tuple[float, float]]
) -> tuple[Furniture, ...]:
    """One to three cabinets against the walls, without those that block the way."""
    kept = []
    steps = list(zip(*(np.linspace(a, b, 12) for a, b in zip(*way, strict=True)), strict=True))
    for _ in range(int(rng.integers(1, 4))):
        piece = against_wall(rng, half_x, half_y)
        free = all(piece.distance(t.x, t.y) > t.radius + 0.25 for t in things)
        if free and min(piece.distance(x, y) for x, y in steps) > _CORRIDOR + 0.05:
            kept.append(piece)
    return tuple(kept)


def _other_names(rng: np.random.Generator, kind: str, colour: str) -> list[tuple[str, str]]:
    """Names of the other things: a look-alike by shape, one by colour, and two to five more."""
    kinds = [k for k in KINDS if k != kind]
    colours = [c for c in COLOURS if c != colour]
    names = [(kind, str(rng.choice(colours))), (str(rng.choice(kinds)), colour)]
    for _ in range(int(rng.integers(2, 6))):
        name = (str(rng.choice(KINDS)), str(rng.choice(COLOURS)))
        if name not in names and name != (kind, colour):
            names.append(name)
    return names


def against_wall(rng: np.random.Generator, half_x: float, half_y: float) -> Furniture:
    length, depth = rng.uniform(0.2, 0.5), rng.uniform(0.12, 0.22)
    height = rng.uniform(0.4, 1.1)
    side = int(rng.integers(4))
    if side < 2:
        x = (half_x - depth) * (1 if side == 0 else -1)
        return Furniture(x, rng.uniform(-half_y + length, half_y - length), depth, length, height)
    y = (half_y - depth) * (1 if side == 2 else -1)
    return Furniture(rng.uniform(-half_x + length, half_x - length), y, length, depth, height)
