# SPDX-License-Identifier: Apache-2.0
"""Where a robot that knows what is truly there would go: one action per picture, without memory.

A model learns these decisions from pictures, so they must follow from pictures. An obstacle soon leaves the camera's
field while it is still in the way, so the goal's place in the picture carries the plan: to pass an obstacle the robot
turns until the goal stands "on the left" (or right), and goes forward as long as it stands there. The search turns
left, so it finds a goal again that was lost to the left; none is lost to the right. Rooms where this leads to a contact
are not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dsd_lab.worlds import sight
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import REACH, ROBOT_RADIUS, World

STOP_GAP = 0.40  # metres between the robot's circle and the goal's surface at which it stops
# The same where something blocks the way: still within reach if the goal is a little farther than it seems.
_BLOCKED_GAP = REACH - 0.05
MIN_PIXELS = 60  # of 336 x 224: things with fewer count as not seen
AHEAD = math.radians(10.0)
LITTLE = math.radians(22.5)
MUCH = math.radians(37.5)
SEARCH_TURNS = 7  # of 45 degrees: with the picture before the first, a full turn
_MARGIN = 0.04  # metres between the robot and obstacles beside its way
_LOOK_AHEAD = 1.6  # metres towards the goal that must be free, else the robot makes a detour
_FREE = 0.8  # metres that should be free on the side of a detour
_LEAST = 0.3  # the same where no side has that much
# Hysteresis, so that a small misjudgement does not end a detour: it begins farther from the goal than it goes on, and
# brings the goal farther beside the way (turns are exact to 7.5 degrees) than it must stay.
_NEAR, _NEARER = 1.0, 0.6  # metres
_BESIDE, _PASSED = math.radians(31.5), math.radians(20.0)
_SPARE = 0.04  # more metres beside a detour, for turns that are exact to 7.5 degrees
# Angles off the camera's axis: up to which a thing's nearer edge is seen, and up to which a goal's middle is kept.
_SIGHT, _KEPT = math.radians(37.0), math.radians(39.0)
_NOISE = 0.05  # standard deviation of a motion, as a share
_WALK_STEP = 0.05  # metres between places where a walk is checked for contact


@dataclass(frozen=True)
class View:
    """What the front camera shows from a pose: pixels per visible thing's index."""

    world: World
    pose: tuple[float, float, float]
    pixels: dict[int, int]
    faint: dict[int, int] = field(default_factory=dict)  # things that show too little to count as seen

    @classmethod
    def of(cls, simulator: Simulator) -> View:
        """What a simulator's camera shows now, from a rendered picture."""
        return cls.showing(simulator.world, simulator.pose, simulator.visible_pixels())

    @classmethod
    def at(cls, world: World, pose: tuple[float, float, float], name: str = "") -> View:
        """What the camera would show from a pose, by geometry; with a name, only the things of that name."""
        if not name:
            return cls.showing(world, pose, sight.visible_pixels(world, pose))
        called = [i for i, thing in enumerate(world.things) if thing.name == name]
        return cls.showing(world, pose, {i: sight.pixels_of(world, pose, i) for i in called})

    @classmethod
    def showing(cls, world: World, pose: tuple[float, float, float], shown: dict[int, int]) -> View:
        """The view in which things show these numbers of pixels: seen from MIN_PIXELS on, else faint."""
        faint = {i: n for i, n in shown.items() if n < MIN_PIXELS}
        return cls(world, pose, {i: n for i, n in shown.items() if i not in faint}, faint)

    def bearing(self, index: int) -> float:
        """Bearing of a thing's centre from the base's centre, radians, positive to the left."""
        x, y, yaw = self.pose
        thing = self.world.things[index]
        return math.remainder(math.atan2(thing.y - y, thing.x - x) - yaw, 2 * math.pi)

    def camera_bearing(self, index: int) -> float:
        """The same from the front camera."""
        x, y, yaw = self.pose
        thing = self.world.things[index]
        dx = thing.x - x - CAMERA_AHEAD * math.cos(yaw)
        dy = thing.y - y - CAMERA_AHEAD * math.sin(yaw)
        return math.remainder(math.atan2(dy, dx) - yaw, 2 * math.pi)

    def column(self, index: int) -> float:
        """Column of a thing's middle in the picture, 0 (left edge) to 1, for the camera's pitch."""
        return sight.column_of(self.world, self.pose, index)

    def gap(self, index: int) -> float:
        """Metres between the robot's circle and the thing's surface."""
        return self.world.gap(self.pose[0], self.pose[1], index)

    def named(self, name: str) -> list[int]:
        """Indices of the visible things called "colour kind"."""
        return [i for i in self.pixels if self.world.things[i].name == name]

    def index_of(self, goal: str) -> int | None:
        """Index of the visible thing that a goal means, such as "left red chair"; None when it is not seen."""
        which, name = split_goal(goal)
        found = self.named(name)
        if not found:
            return None
        if which in ("left", "right"):
            return (max if which == "left" else min)(found, key=self.camera_bearing)
        return (max if which == "farther" else min)(found, key=self.gap)


def split_goal(goal: str) -> tuple[str, str]:
    """("left", "red chair") of "left red chair", ("", "red chair") of "red chair"."""
    words = goal.split(" ")
    return ("", goal) if len(words) == 2 else (words[0], " ".join(words[1:]))


@dataclass(frozen=True)
class Decision:
    """What to do now: verb ("forward", "turn left", "turn right" or "stop"), its amount in cm or degrees, and why."""

    verb: str
    amount: int = 0
    index: int | None = None  # of the goal in view
    obstacle: str = ""  # what the robot passes, or what blocks it
    side: str = ""  # the side on which it passes the obstacle; "" where that blocks
    free: float = 0.0  # free metres ahead

    @property
    def action(self) -> str:
        """The action in the reply grammar."""
        unit = {"forward": " cm", "stop": ""}.get(self.verb, " degrees")
        return f"{self.verb} {self.amount}{unit}" if unit else self.verb


def decide(view: View, goal: str, searched: bool = False) -> Decision:
    """The action for a goal such as "nearer red chair"; `searched`: no picture of a full turn showed it."""
    index = view.index_of(goal)
    if index is None:
        return Decision("stop") if searched else Decision("turn left", 45)
    bearing, gap = view.bearing(index), view.gap(index)
    if gap <= STOP_GAP:
        return Decision("stop", 0, index)
    way, what = free_way(view, bearing, index)
    blocked = gap > _NEAR and way < min(gap, _LOOK_AHEAD)
    if gap > _NEARER and abs(bearing) > _PASSED:
        free, _ = free_way(view, 0.0, None)  # counts the goal, too: the robot must not touch it in passing
        step = _step_past(view, index, free)
        if step == 0:
            return _turn(bearing, index)
        if not blocked:
            return Decision("forward", step, index, free=free)
        return Decision("forward", step, index, what, "right" if bearing > 0 else "left", free)
    turn, side = _detour(view, index) if blocked else (0.0, "")
    if side:
        return replace(_turn(turn, index), obstacle=what, side=side)
    if abs(bearing) > AHEAD:
        return _turn(bearing, index)
    free, ahead = free_way(view, 0.0, index)
    if free < 0.27:
        if gap <= _BLOCKED_GAP:
            return Decision("stop", 0, index)
        left, right = free_way(view, 0.7, index)[0], free_way(view, -0.7, index)[0]
        return Decision("turn left" if left > right else "turn right", 30, index, ahead)
    step = 75 if gap >= 0.95 else 50 if gap >= 0.70 else 25
    while step > 25 and free < step / 100 + 0.05:
        step -= 25
    return Decision("forward", step, index, free=free)


def _turn(angle: float, index: int) -> Decision:
    size = abs(angle)
    degrees = 15 if size <= LITTLE else 30 if size <= MUCH else 45
    return Decision("turn left" if angle > 0 else "turn right", degrees, index)


def _step_past(view: View, index: int, free: float) -> int:
    """Centimetres to go with the goal beside the way; 0 where no step is free and keeps a goal on the right in view."""
    bearing = view.bearing(index)
    for step in (75, 50, 25):
        if free >= step / 100 + 0.05 and _seen_at(view, index, bearing, step) >= -_KEPT:
            return step
    return 0


def _seen_at(view: View, index: int, bearing: float, step: int) -> float:
    """Angle off the camera's axis, in radians, of a goal at a bearing from the base after some cm forward."""
    goal = view.world.things[index]
    distance = math.dist((goal.x, goal.y), view.pose[:2])
    ahead = distance * math.cos(bearing) - CAMERA_AHEAD - step / 100
    return math.atan2(distance * math.sin(bearing), ahead)


def _detour(view: View, index: int) -> tuple[float, str]:
    """The turn in radians after which the goal stands beside a free detour, preferably on the right, and its side."""
    ways = []
    for side, sign in (("right", -1), ("left", 1)):
        most = round(math.degrees(view.bearing(index) + sign * _BESIDE) / 15)
        for parts in (most, most - sign):  # better less beside the way than lost
            turn = math.radians(15.0 * parts)
            if 0 < abs(parts) <= 3 and _stays_beside(view, index, turn):
                ways.append((free_way(view, turn, index, _SPARE)[0], turn, side))
                break
    for least in (_FREE, _LEAST):
        free = [way for way in ways if way[0] >= least]
        if free:
            _, turn, side = free[0] if least == _FREE else max(free)
            return turn, side
    return 0.0, ""


def _stays_beside(view: View, index: int, turn: float) -> bool:
    """Whether after a turn the goal stands beside the way and in view; on the right also a step later."""
    bearing = view.bearing(index) - turn
    then = _seen_at(view, index, bearing, 25 if bearing < 0 else 0)
    return abs(bearing) > _PASSED and abs(then) <= _KEPT


def free_way(view: View, heading: float, ignore: int | None, spare: float = 0.0) -> tuple[float, str]:
    """Free metres along a heading (relative, radians) by what is in view but `ignore`, and what ends the way."""
    x, y, yaw = view.pose
    c, s = math.cos(yaw + heading), math.sin(yaw + heading)
    width = ROBOT_RADIUS + _MARGIN + spare
    best, what = 4.0, "the wall"
    for position, direction, half in ((x, c, view.world.half_x), (y, s, view.world.half_y)):
        if abs(direction) > 1e-6:
            edge = math.copysign(half - ROBOT_RADIUS, direction)
            best = min(best, max((edge - position) / direction, 0.0))
    circles = [(t.x, t.y, t.radius, f"the {t.name}") for i, t in enumerate(view.world.things) if i != ignore]
    for f in view.world.furniture:  # a cabinet as a row of circles
        half, depth = max(f.half_x, f.half_y), min(f.half_x, f.half_y)
        for k in (-1.0, -0.5, 0.0, 0.5, 1.0):
            along = k * max(half - depth, 0.0)
            cx, cy = (f.x + along, f.y) if f.half_x >= f.half_y else (f.x, f.y + along)
            circles.append((cx, cy, depth * 1.1, "a cabinet"))
    for cx, cy, radius, name in circles:
        if not _in_sight(view.pose, cx, cy, radius):
            continue
        along = (cx - x) * c + (cy - y) * s
        across = (cy - y) * c - (cx - x) * s
        touch = radius + width
        if along > 0 and abs(across) < touch:
            distance = along - math.sqrt(touch**2 - across**2)
            if distance < best:
                best, what = max(distance, 0.0), name
    return best, what


def _in_sight(pose: tuple[float, float, float], cx: float, cy: float, radius: float) -> bool:
    """Whether a circle reaches far enough into the camera's field to be recognized, whatever stands before it."""
    x, y, yaw = pose
    dx, dy = cx - x - CAMERA_AHEAD * math.cos(yaw), cy - y - CAMERA_AHEAD * math.sin(yaw)
    far = math.hypot(dx, dy)
    angle = abs(math.remainder(math.atan2(dy, dx) - yaw, 2 * math.pi))
    return far <= radius or angle - math.asin(radius / far) <= _SIGHT


def full_round(actions: Sequence[str], seen: Sequence[bool]) -> bool:
    """Whether the last turns add up to 315 degrees without the goal in any picture.

    `seen`: whether the goal was in the picture before each action, and in the one after the last.
    """
    degrees = 0
    if seen[-1]:
        return False
    for action, had in zip(reversed(actions), reversed(seen[:-1]), strict=True):
        words = action.split()
        if words[0] != "turn" or had:
            return False
        degrees += int(words[2]) * (1 if words[1] == "left" else -1)
        if abs(degrees) >= 45 * SEARCH_TURNS:
            return True
    return False


@dataclass(frozen=True)
class Walk:
    """A run from a world's start by the guide's decisions."""

    reached: bool  # stopped by itself, near enough to the target, and touched nothing
    collided: bool
    actions: tuple[str, ...]
    path: tuple[tuple[float, float], ...]  # metres; the start first, a place per action
    views: tuple[View, ...]  # what was seen of the goal's name before each action

    @property
    def length(self) -> float:
        """Length of the path in metres."""
        return sum(math.dist(a, b) for a, b in zip(self.path, self.path[1:], strict=False))


def walk(world: World, max_steps: int = 25, rng: np.random.Generator | None = None, clear: float = 0.0) -> Walk:
    """The guide's own run in a world, by geometry alone; with a generator, as noisy as a real robot.

    Where the goal is absent, reached means that it stopped after a full turn. `clear`: the least clearance, metres.
    """
    x, y, yaw = world.start
    actions: list[str] = []
    views: list[View] = []
    seen: list[bool] = []
    path = [(x, y)]
    stopped = collided = False
    while len(actions) < max_steps and not stopped and not collided:
        view = View.at(world, (x, y, yaw), split_goal(world.goal)[1])
        views.append(view)
        seen.append(view.index_of(world.goal) is not None)
        decision = decide(view, world.goal, full_round(actions, seen))
        actions.append(decision.action)
        done = decision.amount * (1.0 + (_NOISE * rng.standard_normal() if rng is not None else 0.0))
        if decision.verb == "stop":
            stopped = True
        elif decision.verb == "forward":
            steps = math.ceil(done / 100 / _WALK_STEP)
            step = done / 100 / steps
            for _ in range(steps):
                x, y = x + step * math.cos(yaw), y + step * math.sin(yaw)
                collided = collided or world.clearance(x, y) < clear
        else:
            turn = math.radians(done)
            turn = turn if decision.verb == "turn left" else -turn
            yaw = math.remainder(yaw + turn, 2 * math.pi)
        path.append((x, y))
    near = world.target_index is None or world.gap(x, y) <= REACH
    return Walk(stopped and near and not collided, collided, tuple(actions), tuple(path), tuple(views))
