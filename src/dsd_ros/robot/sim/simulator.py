# SPDX-License-Identifier: Apache-2.0
"""A simulated Go2: a kinematic base in a seeded world, with collisions, a front camera and a range finder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsd_ros.robot.sim.offscreen import Offscreen, SimulatorError, import_mujoco
from dsd_ros.robot.sim.scene import CAMERA_AHEAD, CAMERA_FOVY, IMAGE_HEIGHT, IMAGE_WIDTH, build_mjcf
from dsd_ros.robot.sim.world import COLOURS, KINDS, REACH, World, named_goal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Simulator", "SimulatorError"]

# Limits of the real robot's sport mode (m/s, m/s, rad/s), and its accelerations.
VX_MIN, VX_MAX, VY_MAX, WZ_MAX = -2.5, 3.8, 1.0, 4.0
_ACCELERATION = np.array([3.0, 3.0, 12.0])
RANGE_FIELD_OF_VIEW = math.radians(30.0)
MIN_RANGE, MAX_RANGE = 0.01, 4.0  # of the range finder, m
_RAYS = 9
_SUBSTEP = 0.01  # s; short enough not to jump over an obstacle's edge


class Simulator:
    """One robot in one world. Deterministic: the same world and commands give the same run.

    The first ``render*`` call creates the OpenGL context, which belongs to that call's thread: render and close in one
    thread only.
    """

    def __init__(
        self, world: World, width: int = IMAGE_WIDTH, height: int = IMAGE_HEIGHT, offscreen: Offscreen | None = None
    ) -> None:
        self.world = world
        self.width, self.height = width, height
        self.collisions = 0
        self.time = 0.0
        self._pose = np.array(world.start, dtype=np.float64)
        self._velocity = np.zeros(3)
        self._touching = False
        self._mujoco: Any = None
        self._model: Any = None
        self._data: Any = None
        self._scene: Any = None
        self._offscreen = offscreen
        self._own_offscreen = offscreen is None

    # -- motion ------------------------------------------------------------------------------

    @property
    def pose(self) -> tuple[float, float, float]:
        """x, y (m) and yaw (rad) of the base's centre in the room."""
        x, y, yaw = self._pose
        return float(x), float(y), float(yaw)

    @pose.setter
    def pose(self, value: tuple[float, float, float]) -> None:
        self._pose[:] = value
        self._velocity[:] = 0.0
        self._touching = False

    @property
    def velocity(self) -> tuple[float, float, float]:
        """The actual vx, vy (m/s, robot's frame) and wz (rad/s)."""
        vx, vy, wz = self._velocity
        return float(vx), float(vy), float(wz)

    def step(self, dt: float, vx: float, vy: float, wz: float) -> None:
        """Move for dt seconds under a commanded velocity (m/s, m/s, rad/s, robot's frame).

        The command is clipped to the robot's limits and approached with its acceleration. Motion into an obstacle is
        blocked and counted once per contact.

        :raises ValueError: for a command that is not finite.
        """
        command = np.array([vx, vy, wz], dtype=np.float64)
        if not np.isfinite(command).all() or not math.isfinite(dt) or dt < 0:
            raise ValueError(f"The command must be finite, but it is {vx}, {vy}, {wz} for {dt} s.")
        command = np.clip(command, [VX_MIN, -VY_MAX, -WZ_MAX], [VX_MAX, VY_MAX, WZ_MAX])
        remaining = dt
        while remaining > 1e-9:
            h = min(_SUBSTEP, remaining)
            remaining -= h
            reach = _ACCELERATION * h
            self._velocity += np.clip(command - self._velocity, -reach, reach)
            self._advance(h)
        self.time += dt

    def _advance(self, h: float) -> None:
        x, y, yaw = self._pose
        vx, vy, wz = self._velocity
        self._pose[2] = math.remainder(yaw + wz * h, 2 * math.pi)
        c, s = math.cos(yaw + wz * h / 2), math.sin(yaw + wz * h / 2)
        new_x, new_y = x + (c * vx - s * vy) * h, y + (s * vx + c * vy) * h
        before, after = self.world.clearance(x, y), self.world.clearance(new_x, new_y)
        if after >= 0 or after > before:  # free, or on the way out of a contact
            self._pose[:2] = new_x, new_y
            if after > 0.01:
                self._touching = False
            return
        self._velocity[:2] = 0.0
        if not self._touching:
            self.collisions += 1
        self._touching = True

    def distance_to_target(self) -> float:
        """Distance between the robot's circle (radius 0.3 m) and the target's surface, m; infinite without a target."""
        if self.world.target_index is None:
            return math.inf
        x, y, _ = self._pose
        return max(0.0, self.world.gap(x, y))

    def reached(self) -> bool:
        """Whether the robot stands within 0.6 m of the target's surface and has had no collision."""
        still = bool(np.abs(self._velocity).max() < 0.05)
        return self.distance_to_target() <= REACH and still and self.collisions == 0

    # -- camera ------------------------------------------------------------------------------

    @property
    def focal_length(self) -> float:
        """Focal length of the front camera in pixels (square pixels, centred)."""
        return self.height / 2 / math.tan(CAMERA_FOVY / 2)

    def render(self) -> np.ndarray:
        """The front camera's picture: uint8 (height, width, 3), RGB."""
        scene, renderer = self._front()
        return renderer.draw(scene, self.width, self.height)

    def render_with_depth(self) -> tuple[np.ndarray, np.ndarray]:
        """The picture, and each pixel's depth along the optical axis: float32 (height, width), m, NaN: unknown."""
        scene, renderer = self._front()
        return renderer.draw_with_depth(scene, self.width, self.height)

    def _front(self) -> tuple[Any, Offscreen]:
        scene, renderer = self._update("front")
        # Shadows would cost three times the frame rate on a CPU.
        scene.flags[self._mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        return scene, renderer

    def range_ahead(self) -> float:
        """Distance from the robot's front to the nearest obstacle in the field of view, m; infinite beyond MAX_RANGE.

        From the world's plan, without rendering and noise.
        """
        x, y, yaw = self.pose
        x, y = x + CAMERA_AHEAD * math.cos(yaw), y + CAMERA_AHEAD * math.sin(yaw)
        bearings = (RANGE_FIELD_OF_VIEW * (i / (_RAYS - 1) - 0.5) for i in range(_RAYS))
        nearest = min(_along(self.world, x, y, yaw + bearing) for bearing in bearings)
        return nearest if nearest <= MAX_RANGE else math.inf

    def visible_pixels(self) -> dict[int, int]:
        """How many pixels of the front camera's picture show each visible thing: {index in world.things: count}."""
        scene, renderer = self._front()
        geoms = renderer.draw_geoms(scene, self.width // 2, self.height // 2)
        owners = self._owner[geoms[geoms >= 0]]
        counts = np.bincount(owners[owners >= 0], minlength=len(self.world.things)) * 4
        return {int(i): int(n) for i, n in enumerate(counts) if n > 0}

    def _update(self, camera: str) -> tuple[Any, Offscreen]:
        """The scene for a camera at the present pose, ready to draw, and what draws it."""
        if self._model is None:
            self._mujoco = import_mujoco()
            self._model = self._mujoco.MjModel.from_xml_string(build_mjcf(self.world))
            self._data = self._mujoco.MjData(self._model)
            self._scene = self._mujoco.MjvScene(self._model, maxgeom=2000)
            self._owner = np.full(self._model.ngeom, -1, dtype=np.int64)
            for index in range(len(self.world.things)):
                body = self._model.body(f"thing{index}").id
                self._owner[self._model.geom_bodyid == body] = index
        if self._offscreen is None:
            self._offscreen = Offscreen(self._model)
        self._offscreen.use(self._model)
        x, y, yaw = self._pose
        self._data.mocap_pos[0] = (x, y, 0.0)
        self._data.mocap_quat[0] = (math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2))
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_camlight(self._model, self._data)
        view = self._mujoco.MjvCamera()
        view.type = self._mujoco.mjtCamera.mjCAMERA_FIXED
        view.fixedcamid = self._model.camera(camera).id
        self._mujoco.mjv_updateScene(
            self._model, self._data, self._mujoco.MjvOption(), None, view, self._mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        return self._scene, self._offscreen

    def close(self) -> None:
        """Free the renderer; call it in the thread that rendered. May be called twice."""
        if self._own_offscreen and self._offscreen is not None:
            self._offscreen.close()
            self._offscreen = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Arrival:
    """The result of :func:`check_arrival`. ``distance``: to the target's surface, m; -1 for an unknown target."""

    arrived: bool
    distance: float
    message: str


def check_arrival(simulator: Simulator, instruction: str) -> Arrival:
    """Check by ground truth whether the robot has reached the thing that an instruction names.

    The instruction must name the world's target, and say which one if the world has two of that name. If it has only
    one, "the left one" is that one. See :meth:`Simulator.reached`.
    """
    world = simulator.world
    try:
        goal = named_goal(instruction)
    except ValueError:
        how = f"name a colour ({', '.join(COLOURS)}) and a kind ({', '.join(KINDS)})"
        return Arrival(False, -1.0, f"The instruction names no target: {how}.")
    named = f"The instruction names the {goal.name}, but"
    if world.target_index is None:
        return Arrival(False, -1.0, f"{named} no {world.missing} is here to go to.")
    if goal.thing != world.target.name or (world.which and goal.which != world.which):
        return Arrival(False, -1.0, f"{named} this world's target is the {world.goal}.")
    distance = simulator.distance_to_target()
    where = f"The robot is {distance:.2f} m from the {world.goal}"
    if distance > REACH:
        return Arrival(False, distance, f"{where}; it must be within {REACH} m.")
    if simulator.collisions:
        return Arrival(False, distance, f"{where}, but it has run into something on the way.")
    if not simulator.reached():
        return Arrival(False, distance, f"{where}, but it still moves.")
    return Arrival(True, distance, f"{where} and stands still.")


def _along(world: World, x: float, y: float, heading: float) -> float:
    """Distance to the nearest obstacle along one ray, m."""
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
