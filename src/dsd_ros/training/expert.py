"""The simulator's expert: from what is truly there to the reply a perfect model would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsd_ros.robot.scene import CAMERA_AHEAD
from dsd_ros.robot.simulator import Simulator
from dsd_ros.robot.world import ROBOT_RADIUS, World

STOP_GAP = 0.40  # metres between the robot's circle and the goal's surface: near enough
MIN_PIXELS = 60  # of 336 x 224: what shows less counts as not seen
_AHEAD = math.radians(10.0)
_LITTLE = math.radians(22.5)
_MUCH = math.radians(37.5)
_MARGIN = 0.04  # metres kept from obstacles beside the way
_LOOK_AHEAD = 0.6  # metres that must be free, for otherwise the robot goes round
_DETOURS = (45, 75)  # degrees beside the goal's bearing


@dataclass(frozen=True)
class View:
    """What the front camera shows from a pose: pixels per visible thing's index."""

    world: World
    pose: tuple[float, float, float]
    pixels: dict[int, int]

    @classmethod
    def of(cls, simulator: Simulator) -> View:
        pixels = {i: n for i, n in simulator.visible_pixels().items() if n >= MIN_PIXELS}
        return cls(simulator.world, simulator.pose, pixels)

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

    def gap(self, index: int) -> float:
        """Metres between the robot's circle and the thing's surface."""
        return self.world.gap(self.pose[0], self.pose[1], index)

    def index_of(self, name: str) -> int | None:
        """Index of the visible thing called "colour kind", None when it is not seen."""
        for index in self.pixels:
            if self.world.things[index].name == name:
                return index
        return None


def free_way(view: View, heading: float, ignore: int | None) -> tuple[float, str, float]:
    """Metres the robot can go along a heading (relative, radians), what then ends the way, and how far
    to the left of the way that one's middle is (metres; 0 for a wall)."""
    x, y, yaw = view.pose
    c, s = math.cos(yaw + heading), math.sin(yaw + heading)
    width = ROBOT_RADIUS + _MARGIN
    best, what, aside = 4.0, "the wall", 0.0
    for position, direction, half in ((x, c, view.world.half_x), (y, s, view.world.half_y)):
        if abs(direction) > 1e-6:
            edge = math.copysign(half - ROBOT_RADIUS, direction)
            best = min(best, max((edge - position) / direction, 0.0))
    circles = [
        (t.x, t.y, t.radius, f"the {t.name}")
        for i, t in enumerate(view.world.things)
        if i != ignore
    ]
    for f in view.world.furniture:  # a cabinet as a row of circles
        half, depth = max(f.half_x, f.half_y), min(f.half_x, f.half_y)
        for k in (-1.0, -0.5, 0.0, 0.5, 1.0):
            along = k * max(half - depth, 0.0)
            cx, cy = (f.x + along, f.y) if f.half_x >= f.half_y else (f.x, f.y + along)
            circles.append((cx, cy, depth * 1.1, "a cabinet"))
    for cx, cy, radius, name in circles:
        along = (cx - x) * c + (cy - y) * s
        across = (cy - y) * c - (cx - x) * s
        touch = radius + width
        if along > 0 and abs(across) < touch:
            distance = along - math.sqrt(touch**2 - across**2)
            if distance < best:
                best, what, aside = max(distance, 0.0), name, across
    return best, what, aside


def reply(view: View, goal: str) -> str:
    """The expert's reply (reasoning, then one action) for a goal called "colour kind"."""
    index = view.index_of(goal)
    if index is None:
        other = _other(view, None, goal)
        seen = f"only {other}" if other else "nothing but the room"
        return f"No {goal} in view, {seen}, so I look around. Action: turn left 45 degrees"
    bearing, gap = view.bearing(index), view.gap(index)
    where = f"The {goal} is {_side(bearing)}, {_metres(gap)} away"
    other = _other(view, index, goal)
    scene = f"{other}, " if other else "nothing else is near it, "
    if gap <= STOP_GAP:
        return f"{where}; {scene}and I have arrived. Action: stop"
    heading, around = _round_obstacles(view, index, bearing, min(gap, _LOOK_AHEAD))
    if abs(heading) > _AHEAD:
        side = "left" if heading > 0 else "right"
        size = abs(heading)
        degrees = 15 if size <= _LITTLE else 30 if size <= _MUCH else 45
        plan = around or f"I turn {side}"
        return f"{where}; {scene}{plan}. Action: turn {side} {degrees} degrees"
    free, what, _ = free_way(view, 0.0, index)
    step = 75 if gap >= 0.95 else 50 if gap >= 0.70 else 25
    while step > 25 and free < step / 100 + 0.05:
        step -= 25
    if free < 0.27:
        side = "left" if free_way(view, 0.7, index)[0] > free_way(view, -0.7, index)[0] else "right"
        plan = f"{what} blocks me"
        return f"{where}; {scene}{plan}. Action: turn {side} 30 degrees"
    way = "open" if free > 2.0 else "clear" if free > 1.2 else "short"
    plan = around or f"the way is {way}"
    return f"{where}; {scene}{plan}. Action: forward {step} cm"


def _round_obstacles(view: View, index: int, bearing: float, needed: float) -> tuple[float, str]:
    """Heading (relative, radians) with ``needed`` metres free, and words on what is gone round.

    Few and coarse choices, so that a picture tells which one it is: the side on which the obstacle's
    middle is not, else the other; 45 degrees beside the goal, else 75.
    """
    free, what, aside = free_way(view, bearing, index)
    if free >= needed:
        return bearing, ""
    first = -1 if aside > 0 else 1
    for degrees in _DETOURS:
        for side in (first, -first):
            heading = bearing + side * math.radians(degrees)
            if free_way(view, heading, index)[0] >= needed:
                return heading, (
                    f"{what} is in the way, so I go round its {'left' if side > 0 else 'right'}"
                )
    return bearing, ""


def _side(bearing: float) -> str:
    size = abs(bearing)
    if size <= _AHEAD:
        return "straight ahead"
    side = "left" if bearing > 0 else "right"
    if size <= _LITTLE:
        return f"a little {side}"
    return f"on the {side}" if size <= _MUCH else f"far {side}"


def _metres(gap: float) -> str:
    """Rounded as finely as a camera can tell: 0.1 m near by, then 0.2 m, then 0.5 m."""
    step = 0.1 if gap < 1.0 else 0.2 if gap < 2.0 else 0.5
    return f"{max(round(gap / step), 0) * step:.1f} m"


def _other(view: View, goal: int | None, name: str) -> str:
    """A clause on the thing that could be mistaken for the goal, else the most prominent one."""
    colour, kind = name.split()
    others = [i for i in view.pixels if i != goal]
    if not others:
        return ""

    def rank(i: int) -> tuple[bool, int]:
        return view.world.things[i].kind == kind, view.pixels[i]

    index = max(others, key=rank)
    thing = view.world.things[index]
    angle = view.camera_bearing(index)
    side = "left" if angle > 0.2 else "right" if angle < -0.2 else "middle"
    if goal is None:
        return (
            f"a {thing.name} in the {side}" if side == "middle" else f"a {thing.name} on the {side}"
        )
    apart = angle - view.camera_bearing(goal)
    beside = "left of" if apart > 0.12 else "right of" if apart < -0.12 else "in line with"
    depth = view.gap(index) - view.gap(goal)
    order = "behind" if depth > 0.35 else "before" if depth < -0.35 else "level"
    link = "not the" if thing.kind == kind else "with the"
    return f"{link} {thing.name} {beside} it and {order}"
