# SPDX-License-Identifier: Apache-2.0
"""What the front camera would show of a world, by rays through scene.py's primitives at half the picture's size."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from dsd_ros.robot.sim.scene import CAMERA_AHEAD, CAMERA_FOVY, IMAGE_HEIGHT, IMAGE_WIDTH, Part, parts_of
from dsd_ros.robot.sim.world import HEIGHT, RADIUS, World

_WIDTH, _HEIGHT = IMAGE_WIDTH // 2, IMAGE_HEIGHT // 2
_FOCAL = _HEIGHT / 2 / math.tan(CAMERA_FOVY / 2)  # pixels
_NEAR = 0.02  # metres

Window = tuple[slice, slice]  # rows and columns


def visible_pixels(world: World, pose: tuple[float, float, float], alone: int | None = None) -> dict[int, int]:
    """Pixels that show each thing, {index: count}, like `Simulator.visible_pixels`; `alone`: it, unobstructed."""
    eye = Eye.of(world, pose)
    depth, owner = _blank()
    for index in range(len(world.things)):
        if alone is None or index == alone:
            eye.draw_thing(world, index, depth, owner)
    if alone is None:
        eye.draw_furniture(world, depth, owner)
    counts = np.bincount(owner[owner >= 0], minlength=len(world.things)) * 4
    return {int(i): int(n) for i, n in enumerate(counts) if n > 0}


def pixels_of(world: World, pose: tuple[float, float, float], index: int) -> int:
    """The same for one thing; faster, because only its part of the picture is computed."""
    eye = Eye.of(world, pose)
    thing = world.things[index]
    window = eye.span(eye.seen_at(thing.x, thing.y), _reach(thing.kind), HEIGHT[thing.kind])
    if window is None:
        return 0
    depth, owner = _blank()
    for other in range(len(world.things)):
        eye.draw_thing(world, other, depth, owner, window)
    eye.draw_furniture(world, depth, owner, window)
    return int((owner[window] == index).sum()) * 4


def _blank() -> tuple[np.ndarray, np.ndarray]:
    return np.full((_HEIGHT, _WIDTH), np.inf), np.full((_HEIGHT, _WIDTH), -1)


def _reach(kind: str) -> float:
    """Radius in metres around all of a thing: a chair's corners are beyond its collision radius."""
    return 0.28 if kind == "chair" else RADIUS[kind] + 0.01


def column_of(world: World, pose: tuple[float, float, float], index: int) -> float:
    """Column of a thing's middle in the picture: 0 left edge, 1 right edge; infinite for one behind the camera."""
    eye, thing = Eye.of(world, pose), world.things[index]
    ahead, left = eye.seen_at(thing.x, thing.y)
    low = HEIGHT[thing.kind] / 2 - eye.height
    depth = ahead * math.cos(eye.pitch) - low * math.sin(eye.pitch)
    if depth <= _NEAR:
        return math.copysign(math.inf, -left)
    return 0.5 - left / depth * _FOCAL / _WIDTH


class Eye:
    """The front camera at a pose, which draws into depth and owner pictures."""

    def __init__(self, x: float, y: float, yaw: float, height: float, pitch: float) -> None:
        self.x = x + CAMERA_AHEAD * math.cos(yaw)
        self.y = y + CAMERA_AHEAD * math.sin(yaw)
        self.yaw, self.height, self.pitch = yaw, height, pitch

    @classmethod
    def of(cls, world: World, pose: tuple[float, float, float]) -> Eye:
        return cls(*pose, *world.camera)

    def seen_at(self, x: float, y: float) -> tuple[float, float]:
        """A point on the floor as metres ahead of the camera and to its left."""
        c, s = math.cos(self.yaw), math.sin(self.yaw)
        dx, dy = x - self.x, y - self.y
        return dx * c + dy * s, dy * c - dx * s

    def draw_thing(
        self, world: World, index: int, depth: np.ndarray, owner: np.ndarray, window: Window | None = None
    ) -> None:
        """Draw a thing over whatever is farther away."""
        thing = world.things[index]
        middle, turn = self.seen_at(thing.x, thing.y), thing.yaw - self.yaw
        span = self.span(middle, _reach(thing.kind), HEIGHT[thing.kind], window)
        self.draw(parts_of(thing.kind), middle, turn, span, index, depth, owner)

    def draw_furniture(self, world: World, depth: np.ndarray, owner: np.ndarray, window: Window | None = None) -> None:
        """Draw the cabinets, which own no pixels, over whatever is farther away."""
        for cabinet in world.furniture:
            size = (cabinet.half_x, cabinet.half_y, cabinet.height / 2)
            part = Part("box", size, (0.0, 0.0, cabinet.height / 2))
            middle = self.seen_at(cabinet.x, cabinet.y)
            span = self.span(middle, math.hypot(*size[:2]), cabinet.height, window)
            self.draw((part,), middle, -self.yaw, span, -1, depth, owner)

    def draw(
        self,
        parts: tuple[Part, ...],
        middle: tuple[float, float],
        turn: float,
        span: Window | None,
        index: int,
        depth: np.ndarray,
        owner: np.ndarray,
    ) -> None:
        """Draw an object, turned by `turn` (rad) about its middle, into the rows and columns of a span."""
        if span is None:
            return
        rays = _rays(self.pitch)[:, span[0], span[1]]
        c, s = math.cos(turn), math.sin(turn)
        # Rays and camera in the object's own frame.
        way = np.stack((c * rays[0] + s * rays[1], c * rays[1] - s * rays[0], rays[2]))
        origin = (-(c * middle[0] + s * middle[1]), -(c * middle[1] - s * middle[0]), self.height)
        nearest = np.full(way.shape[1:], np.inf)
        for part in parts:
            start = tuple(o - p for o, p in zip(origin, part.middle, strict=True))
            np.minimum(nearest, _CUTS[part.shape](start, way, part.size), out=nearest)
        before = nearest < depth[span]
        depth[span][before] = nearest[before]
        owner[span][before] = index

    def span(
        self, middle: tuple[float, float], reach: float, high: float, window: Window | None = None
    ) -> Window | None:
        """Rows and columns (within a window) that can show an upright cylinder; None if there are none."""
        c, s = math.cos(self.pitch), math.sin(self.pitch)
        columns, rows = [], []
        nearest = math.inf
        for ahead in (middle[0] - reach, middle[0] + reach):
            for up in (-self.height, high - self.height):
                deep = ahead * c - up * s
                nearest = min(nearest, deep)
                deep = max(deep, _NEAR)
                rows.append(-(ahead * s + up * c) / deep)
                columns += [-(middle[1] - reach) / deep, -(middle[1] + reach) / deep]
        if middle[0] + reach <= 0.0:
            return None
        left, right, top, bottom = 0, _WIDTH, 0, _HEIGHT
        if nearest > _NEAR:
            left, right = _pixel(min(columns), _WIDTH), _pixel(max(columns), _WIDTH) + 1
            top, bottom = _pixel(min(rows), _HEIGHT), _pixel(max(rows), _HEIGHT) + 1
        if window is not None:
            left, right = max(left, window[1].start), min(right, window[1].stop)
            top, bottom = max(top, window[0].start), min(bottom, window[0].stop)
        if left >= right or top >= bottom:
            return None
        return slice(top, bottom), slice(left, right)


def _pixel(slope: float, size: int) -> int:
    return min(max(math.floor(slope * _FOCAL + size / 2), 0), size)


@lru_cache(maxsize=64)
def _rays(pitch: float) -> np.ndarray:
    """Directions (3, rows, columns) ahead, left, up of a level robot; one metre along the optical axis each."""
    right = (np.arange(_WIDTH) + 0.5 - _WIDTH / 2) / _FOCAL
    down = (np.arange(_HEIGHT) + 0.5 - _HEIGHT / 2) / _FOCAL
    c, s = math.cos(pitch), math.sin(pitch)
    shape = (_HEIGHT, _WIDTH)
    ahead = np.broadcast_to((c - down * s)[:, None], shape)
    up = np.broadcast_to((-s - down * c)[:, None], shape)
    return np.stack((ahead, np.broadcast_to(-right[None], shape), up))


def _cut_box(start: tuple[float, ...], way: np.ndarray, size: tuple[float, ...]) -> np.ndarray:
    """Distance along rays to a box with given half sizes; infinite where they miss it."""
    near, far = np.zeros(way.shape[1:]), np.full(way.shape[1:], np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        for axis in range(3):
            one = (-size[axis] - start[axis]) / way[axis]
            two = (size[axis] - start[axis]) / way[axis]
            near = np.fmax(near, np.fmin(one, two))
            far = np.fmin(far, np.fmax(one, two))
    return np.where((near <= far) & (near > 0.0), near, np.inf)


def _cut_ellipsoid(start: tuple[float, ...], way: np.ndarray, size: tuple[float, ...]) -> np.ndarray:
    radii = size if len(size) == 3 else size * 3
    a, b, c = np.zeros(way.shape[1:]), np.zeros(way.shape[1:]), -1.0
    for axis in range(3):
        w, o = way[axis] / radii[axis], start[axis] / radii[axis]
        a, b, c = a + w * w, b + w * o, c + o * o
    return _first_root(a, b, c)


def _cut_cylinder(start: tuple[float, ...], way: np.ndarray, size: tuple[float, ...]) -> np.ndarray:
    radius, half = size
    a = way[0] ** 2 + way[1] ** 2
    b = way[0] * start[0] + way[1] * start[1]
    side = _first_root(a, b, start[0] ** 2 + start[1] ** 2 - radius**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        on_side = np.abs(start[2] + side * way[2]) <= half
        found = np.where(on_side, side, np.inf)
        for level in (-half, half):
            lid = (level - start[2]) / way[2]
            across = (start[0] + lid * way[0]) ** 2 + (start[1] + lid * way[1]) ** 2
            found = np.fmin(found, np.where((across <= radius**2) & (lid > 0.0), lid, np.inf))
    return found


def _first_root(a: np.ndarray, b: np.ndarray, c: float) -> np.ndarray:
    """The first positive root of a t^2 + 2 b t + c; infinite where there is none."""
    inside = b * b - a * c
    with np.errstate(divide="ignore", invalid="ignore"):
        root = (-b - np.sqrt(np.maximum(inside, 0.0))) / a
    return np.where((inside >= 0.0) & (root > 0.0), root, np.inf)


_CUTS = {"box": _cut_box, "sphere": _cut_ellipsoid, "ellipsoid": _cut_ellipsoid, "cylinder": _cut_cylinder}
