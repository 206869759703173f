"""A range finder at the simulated robot's front, from the world's plan: no rendering, no noise."""

from __future__ import annotations

import math

from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.world import World

FIELD_OF_VIEW = math.radians(30.0)
MIN_RANGE, MAX_RANGE = 0.01, 4.0  # m
_RAYS = 9


def range_ahead(world: World, pose: tuple[float, float, float]) -> float:
    """Metres from the robot's front to the nearest thing in the field of view; infinite beyond MAX_RANGE.

    :param pose: x, y (m) and yaw (rad) of the base's centre.
    """
    x, y, yaw = pose
    x, y = x + CAMERA_AHEAD * math.cos(yaw), y + CAMERA_AHEAD * math.sin(yaw)
    nearest = min(_along(world, x, y, yaw + FIELD_OF_VIEW * (i / (_RAYS - 1) - 0.5)) for i in range(_RAYS))
    return nearest if nearest <= MAX_RANGE else math.inf


def _along(world: World, x: float, y: float, heading: float) -> float:
    """Metres along one ray."""
    c, s = math.cos(heading), math.sin(heading)
    found = [_to_wall(x, c, world.half_x), _to_wall(y, s, world.half_y)]
    for thing in world.things:
        along = (thing.x - x) * c + (thing.y - y) * s
        across = (thing.y - y) * c - (thing.x - x) * s
        inside = thing.radius**2 - across**2
        if inside >= 0.0 and along + math.sqrt(inside) > 0.0:
            found.append(max(0.0, along - math.sqrt(inside)))
    for cabinet in world.furniture:
        near, far = 0.0, math.inf
        for at, middle, half, step in ((x, cabinet.x, cabinet.half_x, c), (y, cabinet.y, cabinet.half_y, s)):
            if abs(step) < 1e-12:
                if abs(at - middle) > half:
                    far = -math.inf
                continue
            sides = sorted(((middle - half - at) / step, (middle + half - at) / step))
            near, far = max(near, sides[0]), min(far, sides[1])
        if near <= far:
            found.append(near)
    return min(found)


def _to_wall(position: float, step: float, half: float) -> float:
    if abs(step) < 1e-12:
        return math.inf
    return max(0.0, (math.copysign(half, step) - position) / step)
