# SPDX-License-Identifier: Apache-2.0
"""Looks of rooms by split: textures, lights and the camera's mounting. Pure numpy.

Each split draws from palettes, patterns and bands of its own (looks.toml). The bands interleave, so validation and
test interpolate between training's values. The camera and the colours of worlds without a look are among training's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsd_lab import read_data
from dsd_ros.robot.sim.world import Colour, Light, Look, Split, Surface

Band = tuple[float, float]

JITTER = 0.02  # on each channel of a palette's colour


@dataclass(frozen=True)
class Palette:
    """What a split's looks are drawn from; bands in the units of the look's fields."""

    floors: tuple[Colour, ...]
    walls: tuple[Colour, ...]
    woods: tuple[Colour, ...]
    floor_patterns: tuple[tuple[str, str], ...]  # pattern, mark
    wall_patterns: tuple[tuple[str, str], ...]
    brightness: tuple[Band, ...]
    ambient: tuple[Band, ...]
    light_heights: tuple[Band, ...]
    camera_heights: tuple[Band, ...]
    camera_degrees: tuple[Band, ...]


PALETTES = {
    Split(name): Palette(**{part: tuple(map(tuple, rows)) for part, rows in parts.items()})
    for name, parts in read_data("worlds/looks.toml").items()
}


def look_of(rng: np.random.Generator, split: Split, half_x: float, half_y: float) -> Look:
    """Draw a look of a split for a room of these half sizes (m)."""
    palette = PALETTES[split]
    lights = []
    for _ in range(int(rng.integers(1, 4))):
        bright = _from_bands(rng, palette.brightness)
        red, green, blue = (bright * rng.uniform(0.92, 1.0) for _ in range(3))
        x, y = rng.uniform(-0.6, 0.6) * half_x, rng.uniform(-0.6, 0.6) * half_y
        z = _from_bands(rng, palette.light_heights)
        lights.append(Light(float(x), float(y), z, (float(red), float(green), float(blue))))
    return Look(
        split=split,
        floor=_surface(rng, palette.floors, palette.floor_patterns, 0.10, rng.uniform(1.0, 4.0)),
        wall=_surface(rng, palette.walls, palette.wall_patterns, 0.06, 1.0),
        wood=_jittered(rng, palette.woods[int(rng.integers(len(palette.woods)))], JITTER),
        ambient=_from_bands(rng, palette.ambient),
        lights=tuple(lights),
        camera_height=_from_bands(rng, palette.camera_heights),
        camera_pitch=math.radians(_from_bands(rng, palette.camera_degrees)),
    )


def _surface(
    rng: np.random.Generator, colours: tuple[Colour, ...], patterns: tuple[tuple[str, str], ...], contrast: float,
    repeat: float,
) -> Surface:  # fmt: skip
    pattern, mark = patterns[int(rng.integers(len(patterns)))]
    colour = _jittered(rng, colours[int(rng.integers(len(colours)))], JITTER)
    return Surface(pattern, mark, colour, _jittered(rng, colour, contrast), float(repeat))


def _jittered(rng: np.random.Generator, colour: Colour, amount: float) -> Colour:
    red, green, blue = np.clip(np.asarray(colour) + rng.uniform(-amount, amount, 3), 0.02, 1.0)
    return float(red), float(green), float(blue)


def _from_bands(rng: np.random.Generator, bands: tuple[Band, ...]) -> float:
    """A number drawn uniformly from the union of the bands."""
    widths = np.array([high - low for low, high in bands])
    low, high = bands[int(rng.choice(len(bands), p=widths / widths.sum()))]
    return float(rng.uniform(low, high))
