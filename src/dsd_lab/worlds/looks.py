"""Looks of rooms by split: textures, lights and the camera's mounting. Pure numpy.

Training, validation and test draw from their own palettes, patterns and bands. The bands interleave, so validation and
test interpolate between training's values instead of extrapolating. The camera and the colours of worlds without a look
are among training's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

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


PALETTES: dict[Split, Palette] = {
    Split.TRAINING: Palette(
        floors=(
            (0.55, 0.42, 0.30), (0.42, 0.33, 0.26), (0.36, 0.38, 0.42), (0.50, 0.48, 0.42),
            (0.46, 0.38, 0.34), (0.33, 0.30, 0.27), (0.58, 0.54, 0.48), (0.40, 0.42, 0.36),
        ),
        walls=(
            (0.78, 0.74, 0.64), (0.62, 0.70, 0.72), (0.74, 0.64, 0.60), (0.66, 0.70, 0.60),
            (0.80, 0.78, 0.74), (0.58, 0.62, 0.66), (0.70, 0.70, 0.68), (0.72, 0.60, 0.50),
        ),
        woods=(
            (0.40, 0.27, 0.16), (0.50, 0.38, 0.26), (0.30, 0.22, 0.18), (0.22, 0.20, 0.19),
            (0.62, 0.50, 0.36),
        ),
        floor_patterns=(("checker", "none"), ("flat", "none"), ("flat", "edge")),
        wall_patterns=(("gradient", "none"), ("flat", "none")),
        brightness=((0.26, 0.33), (0.37, 0.41), (0.45, 0.52)),
        ambient=((0.25, 0.28), (0.295, 0.31), (0.33, 0.36)),
        light_heights=((2.5, 2.7), (2.9, 3.3)),
        camera_heights=((0.31, 0.33), (0.35, 0.37), (0.39, 0.41)),
        camera_degrees=((12.0, 13.5), (16.0, 18.0), (20.5, 22.0)),
    ),
    Split.VALIDATION: Palette(
        floors=((0.50, 0.43, 0.39), (0.38, 0.34, 0.31), (0.45, 0.45, 0.43)),
        walls=((0.77, 0.69, 0.55), (0.61, 0.66, 0.60), (0.68, 0.66, 0.73)),
        woods=((0.35, 0.25, 0.21), (0.46, 0.40, 0.34)),
        floor_patterns=(("checker", "cross"), ("checker", "edge")),
        wall_patterns=(("flat", "edge"),),
        brightness=((0.33, 0.35), (0.41, 0.43)),
        ambient=((0.28, 0.287), (0.31, 0.32)),
        light_heights=((2.7, 2.8), (3.3, 3.4)),
        camera_heights=((0.34, 0.35), (0.38, 0.39)),
        camera_degrees=((14.75, 16.0), (19.25, 20.5)),
    ),
    Split.TEST: Palette(
        floors=((0.55, 0.47, 0.36), (0.38, 0.385, 0.31), (0.47, 0.32, 0.25)),
        walls=((0.70, 0.73, 0.75), (0.66, 0.59, 0.54), (0.75, 0.74, 0.57)),
        woods=((0.45, 0.32, 0.21), (0.27, 0.25, 0.23)),
        floor_patterns=(("flat", "cross"), ("gradient", "none")),
        wall_patterns=(("checker", "none"), ("flat", "cross")),
        brightness=((0.35, 0.37), (0.43, 0.45)),
        ambient=((0.287, 0.295), (0.32, 0.33)),
        light_heights=((2.8, 2.9), (3.4, 3.5)),
        camera_heights=((0.33, 0.34), (0.37, 0.38)),
        camera_degrees=((13.5, 14.75), (18.0, 19.25)),
    ),
}  # fmt: skip


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
        wood=_jittered(rng, _one(rng, palette.woods), JITTER),
        ambient=_from_bands(rng, palette.ambient),
        lights=tuple(lights),
        camera_height=_from_bands(rng, palette.camera_heights),
        camera_pitch=math.radians(_from_bands(rng, palette.camera_degrees)),
    )


def _surface(
    rng: np.random.Generator,
    colours: tuple[Colour, ...],
    patterns: tuple[tuple[str, str], ...],
    contrast: float,
    repeat: float,
) -> Surface:
    pattern, mark = patterns[int(rng.integers(len(patterns)))]
    colour = _jittered(rng, _one(rng, colours), JITTER)
    return Surface(pattern, mark, colour, _jittered(rng, colour, contrast), float(repeat))


def _one(rng: np.random.Generator, colours: tuple[Colour, ...]) -> Colour:
    return colours[int(rng.integers(len(colours)))]


def _jittered(rng: np.random.Generator, colour: Colour, amount: float) -> Colour:
    red, green, blue = np.clip(np.asarray(colour) + rng.uniform(-amount, amount, 3), 0.02, 1.0)
    return float(red), float(green), float(blue)


def _from_bands(rng: np.random.Generator, bands: tuple[Band, ...]) -> float:
    """A number drawn uniformly from the union of the bands."""
    widths = np.array([high - low for low, high in bands])
    low, high = bands[int(rng.choice(len(bands), p=widths / widths.sum()))]
    return float(rng.uniform(low, high))
