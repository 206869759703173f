# SPDX-License-Identifier: Apache-2.0
"""The MuJoCo model of a world: geometry, textures and lights, as MJCF text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from dsd_ros.robot.sim.world import HEIGHT, RADIUS, Look, Surface, Thing, World

CAMERA_AHEAD = 0.28  # m from the base's centre to the front camera
CAMERA_FOVY = math.radians(60.0)
IMAGE_WIDTH, IMAGE_HEIGHT = 336, 224

RGB: dict[str, tuple[float, float, float]] = {
    "red": (0.85, 0.08, 0.08),
    "green": (0.08, 0.62, 0.14),
    "blue": (0.10, 0.22, 0.88),
    "yellow": (0.95, 0.85, 0.08),
    "silver": (0.56, 0.60, 0.66),
    "white": (0.98, 0.98, 0.98),
    "black": (0.06, 0.06, 0.07),
    "orange": (0.98, 0.47, 0.04),
}
_FLOORS = ((0.55, 0.42, 0.30), (0.42, 0.33, 0.26), (0.36, 0.38, 0.42), (0.50, 0.48, 0.42))
_WALLS = ((0.78, 0.74, 0.64), (0.62, 0.70, 0.72), (0.74, 0.64, 0.60), (0.66, 0.70, 0.60))
_WOOD = ((0.40, 0.27, 0.16), (0.50, 0.38, 0.26), (0.30, 0.22, 0.18))
_WALL_HEIGHT = 1.6


def build_mjcf(world: World) -> str:
    """MJCF of the world, with the robot as the mocap body ``base``; the look is the world's, or drawn from its seed."""
    if world.look is not None:
        return _with_look(world, world.look)
    rng = np.random.default_rng([world.seed, 21])
    floor = _jitter(rng, _FLOORS[rng.integers(len(_FLOORS))])
    floor2 = _jitter(rng, floor, 0.10)
    wall = _jitter(rng, _WALLS[rng.integers(len(_WALLS))])
    wood = _jitter(rng, _WOOD[rng.integers(len(_WOOD))])
    builtin = ("checker", "checker", "flat")[rng.integers(3)]
    repeat = rng.uniform(1.0, 4.0)
    lights = _lights(rng, world)
    bodies = [_thing(rng, i, thing) for i, thing in enumerate(world.things)]
    floor_look = f'builtin="{builtin}" rgb1="{_rgb(floor)}" rgb2="{_rgb(floor2)}"'
    wall_look = f'builtin="gradient" rgb1="{_rgb(wall)}" rgb2="{_rgb(_jitter(rng, wall, 0.06))}"'
    return _mjcf(world, _assets(floor_look, repeat, wall_look, wood), lights, bodies, (0.30, 0.30, 0.30))


def _with_look(world: World, look: Look) -> str:
    """MJCF of a world with a look of its own."""
    rng = np.random.default_rng([world.seed, 25, look.split.number])
    bodies = [_thing(rng, i, thing) for i, thing in enumerate(world.things)]
    lights = "\n".join(
        _light(light.x, light.y, f"{light.z:.2f}", light.colour, i == 0) for i, light in enumerate(look.lights)
    )
    assets = _assets(_texture(look.floor), look.floor.repeat, _texture(look.wall), look.wood)
    return _mjcf(world, assets, lights, bodies, (look.ambient,) * 3)


def _assets(floor: str, repeat: float, wall: str, wood: tuple[float, ...]) -> str:
    """Textures of one size for all worlds, so that one renderer draws all of them."""
    return f"""<texture name="floor" type="2d" {floor} width="128" height="128"/>
  <material name="floor" texture="floor" texrepeat="{repeat:.2f} {repeat:.2f}" specular="0.1"/>
  <texture name="wall" type="cube" {wall} width="64" height="64"/>
  <material name="wall" texture="wall" specular="0"/>
  <material name="wood" rgba="{_rgb(wood)} 1" specular="0.1"/>"""


def _light(x: float, y: float, z: str, colour: tuple[float, ...], shadow: bool) -> str:
    return (
        f'<light pos="{x:.2f} {y:.2f} {z}" dir="0 0 -1" diffuse="{_rgb(colour)}" '
        f'specular="0.2 0.2 0.2" cutoff="85" exponent="1" castshadow="{str(shadow).lower()}"/>'
    )


def _texture(surface: Surface) -> str:
    return (
        f'builtin="{surface.pattern}" mark="{surface.mark}" rgb1="{_rgb(surface.colour)}" '
        f'rgb2="{_rgb(surface.second)}" markrgb="{_rgb(surface.second)}"'
    )


def _mjcf(world: World, assets: str, lights: str, bodies: list[str], ambient: tuple[float, ...]) -> str:
    cabinets = [
        _geom("box", (f.half_x, f.half_y, f.height / 2), (f.x, f.y, f.height / 2), "wood") for f in world.furniture
    ]
    hx, hy, up = world.half_x, world.half_y, _WALL_HEIGHT / 2
    walls = [
        _geom("box", (0.05, hy + 0.1, up), (hx + 0.05, 0, up), "wall"),
        _geom("box", (0.05, hy + 0.1, up), (-hx - 0.05, 0, up), "wall"),
        _geom("box", (hx + 0.1, 0.05, up), (0, hy + 0.05, up), "wall"),
        _geom("box", (hx + 0.1, 0.05, up), (0, -hy - 0.05, up), "wall"),
    ]
    return f"""<mujoco model="room">
<visual>
  <global offwidth="1024" offheight="768"/>
  <headlight ambient="{" ".join(f"{a:.2f}" for a in ambient)}" diffuse="0.20 0.20 0.20" specular="0.1 0.1 0.1"/>
  <quality shadowsize="1024" offsamples="0"/>
  <map znear="0.01" zfar="30"/>
</visual>
<asset>
  {assets}
</asset>
<worldbody>
  {lights}
  <geom type="plane" size="{hx + 0.1:.3f} {hy + 0.1:.3f} 0.1" material="floor"/>
  {" ".join(walls)}
  {" ".join(cabinets)}
  {" ".join(bodies)}
  {_robot(*world.camera)}
</worldbody>
</mujoco>"""


def _rgb(colour: tuple[float, ...]) -> str:
    return " ".join(f"{c:.3f}" for c in colour)


def _jitter(rng: np.random.Generator, colour: tuple[float, ...], amount: float = 0.04) -> tuple[float, ...]:
    noisy = np.clip(np.asarray(colour) + rng.uniform(-amount, amount, 3), 0.02, 1.0)
    return tuple(float(c) for c in noisy)


def _lights(rng: np.random.Generator, world: World) -> str:
    lights = []
    for shadow in (True, False):
        x = rng.uniform(-0.6, 0.6) * world.half_x
        y = rng.uniform(-0.6, 0.6) * world.half_y
        bright = rng.uniform(0.30, 0.48)
        tint = tuple(bright * rng.uniform(0.94, 1.0) for _ in range(3))
        lights.append(_light(x, y, "3.2", tint, shadow))
    return "\n".join(lights)


def _geom(
    shape: str,
    size: tuple[float, ...],
    pos: tuple[float, float, float],
    material: str = "",
    rgba: str = "",
    extra: str = "",
) -> str:
    look = f'material="{material}"' if material else f'rgba="{rgba}"'
    sizes = " ".join(f"{s:.4f}" for s in size)
    return f'<geom type="{shape}" size="{sizes}" pos="{pos[0]:.4f} {pos[1]:.4f} {pos[2]:.4f}" {look} {extra}/>'


@dataclass(frozen=True)
class Part:
    """A primitive of a thing in the thing's frame: MuJoCo's shape, sizes and centre, in metres."""

    shape: str
    size: tuple[float, ...]
    middle: tuple[float, float, float]


@cache
def parts_of(kind: str) -> tuple[Part, ...]:
    """The primitives that make up a thing of a kind."""
    r, h = RADIUS[kind], HEIGHT[kind]
    if kind == "bottle":
        return (
            Part("cylinder", (r, 0.14), (0, 0, 0.14)),
            Part("ellipsoid", (r, r, 0.06), (0, 0, 0.28)),
            Part("cylinder", (0.026, 0.06), (0, 0, 0.36)),
        )
    if kind == "can":
        return (Part("cylinder", (r, h / 2), (0, 0, h / 2)),)
    if kind == "ball":
        return (Part("sphere", (r,), (0, 0, r)),)
    if kind == "box":
        side = r / math.sqrt(2)
        return (Part("box", (side, side, side), (0, 0, side)),)
    legs = tuple(Part("box", (0.02, 0.02, 0.2), (x, y, 0.2)) for x in (-0.17, 0.17) for y in (-0.17, 0.17))
    return (Part("box", (0.19, 0.19, 0.02), (0, 0, 0.42)), Part("box", (0.02, 0.19, 0.19), (-0.17, 0, 0.61)), *legs)


def _thing(rng: np.random.Generator, index: int, thing: Thing) -> str:
    rgba = _rgb(_jitter(rng, RGB[thing.colour], 0.03)) + " 1"
    parts = [_geom(p.shape, p.size, p.middle, rgba=rgba) for p in parts_of(thing.kind)]
    return (
        f'<body name="thing{index}" pos="{thing.x:.4f} {thing.y:.4f} 0" '
        f'euler="0 0 {math.degrees(thing.yaw):.3f}">{"".join(parts)}</body>'
    )


def _robot(camera_height: float, camera_pitch: float) -> str:
    """A Go2 made of primitives: trunk, head and four two-part legs, 0.70 m x 0.31 m x 0.40 m."""
    pale, dark = "0.80 0.81 0.83 1", "0.12 0.12 0.13 1"
    parts = [
        _geom("box", (0.19, 0.09, 0.057), (0, 0, 0.32), rgba=pale),
        _geom("box", (0.03, 0.07, 0.04), (0.22, 0, 0.335), rgba=dark),
    ]
    for x in (0.19, -0.19):
        for y in (0.13, -0.13):
            fold = x - 0.09
            parts.append(_geom("sphere", (0.045,), (x, y, 0.31), rgba=dark))
            parts.append(f'<geom type="capsule" size="0.025" rgba="{pale}" fromto="{x} {y} 0.30 {fold} {y} 0.15"/>')
            parts.append(f'<geom type="capsule" size="0.017" rgba="{dark}" fromto="{fold} {y} 0.15 {x} {y} 0.02"/>')
    # The camera looks along its own -z: level forward first, then pitched down.
    s, c = math.sin(camera_pitch), math.cos(camera_pitch)
    camera = (
        f'<camera name="front" pos="{CAMERA_AHEAD} 0 {round(camera_height, 4)}" '
        f'xyaxes="0 -1 0 {s:.5f} 0 {c:.5f}" fovy="{math.degrees(CAMERA_FOVY):.2f}"/>'
    )
    return f'<body name="base" mocap="true">{"".join(parts)}{camera}</body>'
