# SPDX-License-Identifier: Apache-2.0
"""Where a point of the picture is: through depth, or on the floor where the ray through it meets it. Pure geometry."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dsd_ros.navigation.run.actions import Point
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.settings import PointSettings
from dsd_ros.navigation.safety.depth import Intrinsics

STANDOFF_M = 0.6  # from the robot's middle to a thing that a point is on
_FLOOR_M, _SLOPE = 0.06, math.tan(math.radians(3.0))  # what is lower is the floor; a walking body pitches
REACH_M = 5.0  # no goal is further away; the supervisor's limit.action_distance is nearer
_AROUND = 1  # pixels on each side of a point whose depths are looked at
# A point, the size of the picture it counts in, and the picture's stamp -> metres and radians to the left, from where
# the robot was then. PointUnknown.
Locate = Callable[[Point, Point, float], tuple[float, float]]


class PointUnknown(ValueError):
    """A point of the picture of which is not known where it is; one sentence."""


def locate(
    point: Point, picture: Point, camera: Intrinsics, mounted: PointSettings, depths: np.ndarray | None = None
) -> tuple[float, float]:
    """Metres and radians to the left, from the robot's middle to a point on the floor, or to before a thing.

    :param picture: width and height of the picture that the point counts in; it shows what the camera does.
    :param depths: float32 (height, width) of the same view, m along the optical axis; 0, NaN and inf: unknown.
    :raises PointUnknown: where neither depth nor floor is there, or further away than REACH_M.
    """
    if not camera.known:
        raise PointUnknown(f"where the point {point} is cannot be told, since the camera's info has no focal length.")
    right, down = ((at + 0.5) / size for at, size in zip(point, picture, strict=True))
    across = (right * camera.width - 0.5 - camera.cx) / camera.fx
    below = (down * camera.height - 0.5 - camera.cy) / camera.fy
    c, s = math.cos(mounted.camera_pitch), math.sin(mounted.camera_pitch)
    depth = _depth_at(right, down, depths)
    sinks = s + c * below  # m below the camera per m of depth
    stops = 0.0
    if depth is not None:
        if mounted.camera_height - depth * sinks > _FLOOR_M + _SLOPE * depth:
            stops = STANDOFF_M
    else:
        if sinks <= 0.0:
            raise PointUnknown(f"the point {point} is above the horizon, and its depth is not known.")
        depth = mounted.camera_height / sinks
    ahead, left = mounted.camera_ahead + depth * (c - s * below), -depth * across
    distance = math.hypot(ahead, left)
    if distance > REACH_M:
        raise PointUnknown(f"the point {point} is {distance:.1f} m away, and at most {REACH_M:.0f} m are possible.")
    if distance <= stops:
        raise PointUnknown(f"the point {point} is on something {distance:.1f} m away, before which the robot stands.")
    return distance - stops, math.atan2(left, ahead)


def _depth_at(right: float, down: float, depths: np.ndarray | None) -> float | None:
    """The middle one of the known depths around a place (shares of the width and height)."""
    if depths is None:
        return None
    row, column = int(down * depths.shape[0]), int(right * depths.shape[1])
    rows, columns = (slice(max(0, at - _AROUND), at + _AROUND + 1) for at in (row, column))
    around = depths[rows, columns]
    known = around[np.isfinite(around) & (around > 0.0)]
    return float(np.median(known)) if len(known) else None


def moved(pose: Pose, goal: tuple[float, float]) -> Pose:
    """The place ``goal`` (m, rad to the left) of a robot at ``pose``; it looks there from the robot."""
    distance, heading = goal[0], pose.yaw + goal[1]
    return Pose(pose.x + distance * math.cos(heading), pose.y + distance * math.sin(heading), heading)


def goal_from(pose: Pose, place: Pose) -> tuple[float, float]:
    """Metres and radians to the left of a place, for a robot at ``pose``."""
    ahead, aside = place.x - pose.x, place.y - pose.y
    return math.hypot(ahead, aside), math.remainder(math.atan2(aside, ahead) - pose.yaw, math.tau)
