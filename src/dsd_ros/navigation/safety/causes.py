# SPDX-License-Identifier: Apache-2.0
"""The safety supervisor's causes and sources (constants of SafetyState.msg), settings, and its sensors' geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from dsd_ros.navigation.run.controller import MotionSettings, unit_quaternion
from dsd_ros.options import option

STARTING = "starting"  # what a node reports before it is ready
WAITING = "waiting for the verifier"  # what the draft node reports while an answer is overdue


class Source(IntEnum):
    """Whose command goes to the robot."""

    NONE = 0
    NAVIGATION = 1
    OPERATOR = 2


class Cause(IntEnum):
    """Why navigation may not move the robot, most severe first. The numbers are SafetyState's and say nothing."""

    EMERGENCY_STOP = 1
    SUPERVISOR_FAULT = 21
    FOREIGN_PUBLISHER = 20
    DEADMAN = 2
    TILT = 3
    OPERATOR = 4
    ROBOT_FAULT = 5
    ODOMETRY_STALE = 6
    STATE_STALE = 7
    CAMERA_STALE = 8
    OBSTACLE = 9
    OBSTACLE_SENSOR_STALE = 10
    LOW_BATTERY = 11
    NODE_SILENT = 12
    LINK_LOST = 13
    UNVERIFIED_ACTION = 14
    UNPARSABLE_ACTION = 15
    STALE_REPLY = 16
    NO_ACTION = 17
    MOTION_REFUSED = 18
    COMMAND_STALE = 19


SEVERITY = {cause: rank for rank, cause in enumerate(Cause)}
# Faults in navigation's own announcements and commands, which do not pass by waiting.
REFUSALS = frozenset(
    {Cause.UNVERIFIED_ACTION, Cause.UNPARSABLE_ACTION, Cause.STALE_REPLY, Cause.NO_ACTION, Cause.MOTION_REFUSED}
)
CAMERAS, OBSTACLES = ("image", "info", "none"), ("none", "range", "scan", "depth")
FALLBACKS = ("stop", "draft_only", "return")
FALLBACK_HELP = (
    "when the link is lost: stop; draft_only: a few slow actions by the draft alone (not exact); return: back the way "
    "it came"
)
MOST_UNVERIFIED = 3  # actions in a row that draft_only allows
UNVERIFIED_SPEED = 0.4  # of the top speeds, for what the target has not verified
# These hold an operator's command at zero, too; the other causes are for an operator to solve.
BINDS_OPERATOR = frozenset({Cause.EMERGENCY_STOP, Cause.SUPERVISOR_FAULT, Cause.DEADMAN, Cause.TILT})


@dataclass(frozen=True)
class Motion:
    """A commanded velocity in the robot's frame: forward and left (m/s), turn rate (rad/s)."""

    vx: float = 0.0
    vy: float = 0.0
    wz: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether it is a motion at all; 1e308 m/s is none."""
        return plausible(self.vx, self.vy, self.wz, limit=_FASTEST)

    @property
    def moving(self) -> bool:
        return max(abs(self.vx), abs(self.vy), abs(self.wz)) > _ZERO

    def within(self, speed: float, turn_rate: float) -> Motion:
        """The same direction, at most ``speed`` (m/s) and ``turn_rate`` (rad/s)."""
        fastest = math.hypot(self.vx, self.vy)
        share = 1.0 if fastest <= speed else speed / fastest
        turn = max(-turn_rate, min(turn_rate, self.wz))
        return Motion(self.vx * share, self.vy * share, turn)


_REACTION_S = 0.2  # from a sensor's reading to the robot's reaction
_BRAKING = 0.8  # m/s^2; towards an obstacle the robot is no faster than this can stop
_APPROACH = 0.05  # m/s
_FASTEST = 100.0  # m/s, rad/s
FURTHEST = 1e7  # m; UTM coordinates reach this
_MOST_RANGES = 50_000  # readings of a scan
_ZERO = 1e-4  # a smaller command counts as zero
STILL = Motion()


@dataclass(frozen=True)
class Timeouts:
    """How long inputs stay fresh. What the robot is told and what is ahead of it holds for half a second at most."""

    input_s: float = option(
        0.4, "a command, the deadman's 'held' or a reading ahead is valid for this long, s", 0.1, 0.5
    )
    state_s: float = option(
        0.4,
        "a pose or an IMU sample is valid for this long, s; up to that long a robot tilts or slips unseen",
        0.1,
        2.0,
    )
    release_s: float = option(
        0.0, "a joystick at zero gives the robot back after this long, s; 0: when it falls silent", 0.0, 10.0
    )
    camera_s: float = option(0.4, "a picture counts as the present view for this long, s", 0.1, 5.0)
    heartbeat_s: float = option(0.4, "a node's heartbeat is valid for this long, s (one comes every 0.1 s)", 0.15, 5.0)


@dataclass(frozen=True)
class SafetyLimits:
    """Limits of motion; the first two should equal those of the navigation node's motion settings."""

    speed: float = option(MotionSettings.speed, "navigation's top speed, m/s", 0.05, 1.5)
    turn_rate: float = option(MotionSettings.turn_rate, "navigation's top turn rate, rad/s", 0.08, 2.1)
    operator_speed: float = option(1.0, "the operator's top speed, m/s", 0.05, 2.5)
    operator_turn_rate: float = option(1.0471975, "the operator's top turn rate, rad/s", 0.08, 3.2)
    action_distance: float = option(0.75, "longest drive of one action, whatever the grammar says, m", 0.05, 5.0)
    action_angle: float = option(0.7853982, "widest turn of one action, whatever the grammar says, rad", 0.087, 3.1416)
    observation_age_s: float = option(5.0, "an action may begin until its picture is this old, s", 0.1, 60.0)
    obstacle_distance: float = option(0.12, "no drive ahead with an obstacle nearer than this, m", 0.05, 3.0)
    tilt: float = option(0.4363323, "largest lean of the body's z axis, rad", 0.087, 1.4)
    battery: float = option(0.15, "least charge of the battery, 0 to 1", 0.0, 0.9)


@dataclass(frozen=True)
class Requirements:
    """What navigation needs before it may move the robot."""

    camera: str = option(
        "image", "pictures that must come: image, info (camera_info, for large ones) or none", choices=CAMERAS
    )
    imu: bool = option(True, "IMU samples must come; without any, the odometry tells the tilt")
    deadman: bool = option(False, "nothing moves, by anybody, unless the deadman is held")
    obstacle: str = option("none", "sensor that looks ahead: none, range, scan or depth (an image)", choices=OBSTACLES)
    heartbeats: str = option("navigation_node,draft_node", "nodes whose heartbeats must come, comma-separated")
    link: str = option("draft_node,bridge_node", "nodes whose warnings mean that the link is lost, comma-separated")
    robot: str = option("go2_node", "nodes whose warnings mean that the robot has a fault, comma-separated")
    commands: str = option(
        "navigation_node", "nodes that may publish cmd_vel_dsd and dsd/nav_action, comma-separated; empty: any"
    )
    outcomes: str = option("verifier_node,bridge_node", "nodes that may publish outcome, comma-separated; empty: any")


@dataclass(frozen=True)
class DepthView:
    """How the depth camera is mounted, and the corridor that the robot's body needs."""

    camera_height: float = option(0.36, "height of the depth camera above the floor, m", 0.02, 2.0)
    camera_pitch: float = option(0.296706, "downward pitch of the depth camera, rad", -0.79, 1.31)
    corridor_width: float = option(0.5, "the robot's width plus the clearance on both sides, m", 0.1, 2.0)
    corridor_height: float = option(0.5, "things that hang higher are passed below, m", 0.1, 2.0)


@dataclass(frozen=True)
class SafetyReport:
    """The supervisor's state as navigation receives it; one of ``sentences`` for each of ``causes``.

    ``waived``: the causes that do not hold the action under way. A lost link does not hold an unverified action.
    """

    causes: tuple[Cause, ...] = ()
    sentences: tuple[str, ...] = ()
    waived: tuple[Cause, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the robot is held at zero for navigation."""
        return not set(self.causes) <= set(self.waived)

    @property
    def latched(self) -> bool:
        """Whether the stop stays until it is reset."""
        return Cause.EMERGENCY_STOP in self.causes

    @property
    def sentence(self) -> str:
        return " ".join(self.sentences)


def plausible(*values: float, limit: float = FURTHEST) -> bool:
    """Whether these can be measurements: finite, and not beyond ``limit`` either way."""
    return all(abs(value) <= limit for value in values)  # NaN compares as false


def names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def tilt_of(x: float, y: float, z: float, w: float) -> float | None:
    """Angle (rad) between the body's z axis and the vertical; None for an invalid quaternion."""
    unit = unit_quaternion(x, y, z, w)
    if unit is None:
        return None
    up = 1.0 - 2.0 * (unit[0] ** 2 + unit[1] ** 2)
    return math.acos(max(-1.0, min(1.0, up)))


def nearest_ahead(
    ranges: Sequence[float], angle_min: float, angle_increment: float, nearest: float, furthest: float, cone: float
) -> float | None:
    """Distance (m) to the nearest return within ``cone`` (rad) around a scan's x axis.

    Readings below ``nearest`` and NaN are invalid; those above ``furthest`` mean a free path. None when the cone has
    no valid reading: a covered sensor must not pass for a free path.
    """
    if len(ranges) > _MOST_RANGES or not plausible(angle_min, angle_increment, limit=_FASTEST):
        return None
    found: list[float] = []
    for index, distance in enumerate(ranges):
        bearing = math.remainder(angle_min + index * angle_increment, math.tau)
        if abs(bearing) > cone / 2 or math.isnan(distance) or distance < nearest:
            continue
        found.append(_bounded(distance, nearest, furthest))
    return min(found, default=None)


def range_reading(distance: float, nearest: float, furthest: float) -> float | None:
    """The distance (m) that a range sensor with these limits reports; None when it is invalid.

    A reading below ``nearest`` means an obstacle right in front, one above ``furthest`` none.
    """
    if math.isnan(distance) or math.isnan(nearest) or math.isnan(furthest):
        return None
    return 0.0 if distance < nearest else _bounded(distance, nearest, furthest)


def approach_speed(distance: float, limits: SafetyLimits) -> float:
    """Greatest speed (m/s) towards an obstacle ``distance`` (m) ahead from which the robot can still stop in time.

    Solves v t + v^2 / 2a = free distance, for reaction time t and braking a. A minimum is always allowed, so that an
    action that ends near an obstacle can be completed.
    """
    free = max(0.0, distance - limits.obstacle_distance)
    a, t = _BRAKING, _REACTION_S
    return max(_APPROACH, a * (math.sqrt(t * t + 2.0 * free / a) - t))


def _bounded(distance: float, nearest: float, furthest: float) -> float:
    """Infinite beyond ``furthest``, unless the sensor does not report its limits (both 0)."""
    return math.inf if furthest > nearest and distance > furthest else distance
