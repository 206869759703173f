"""A Go2's state as the drivers' interface tells it."""

from __future__ import annotations

import math

from dsd_ros.robot.driver import Posture, RobotState
from dsd_ros.robot.go2.protocol import SportState

_LYING_HEIGHT = 0.15  # m; a standing Go2 has its body at about 0.3
_POSTURES = {0: Posture.STANDING, 1: Posture.STANDING, 2: Posture.STANDING, 3: Posture.MOVING,
             5: Posture.LYING, 6: Posture.LOCKED, 7: Posture.DAMPED}  # fmt: skip


def robot_state(sport: SportState, now: float, velocity_frame: str = "body") -> RobotState:
    """The state that arrived at ``now`` (monotonic, s).

    :param velocity_frame: "body" or "odom", the frame of the velocity that the robot sends.
    """
    posture = _POSTURES.get(sport.mode, Posture.BUSY)
    if sport.mode == 0 and 0.0 < sport.body_height < _LYING_HEIGHT:
        posture = Posture.LYING
    vx, vy, vz = sport.velocity
    if velocity_frame == "odom":
        c, s = math.cos(sport.rpy[2]), math.sin(sport.rpy[2])
        vx, vy = c * vx + s * vy, c * vy - s * vx
    return RobotState(
        received=now,
        stamp=sport.stamp,
        position=sport.position,
        orientation=sport.quaternion,
        rpy=sport.rpy,
        velocity=(vx, vy, vz),
        yaw_rate=sport.yaw_speed,
        gyroscope=sport.gyroscope,
        accelerometer=sport.accelerometer,
        posture=posture,
        mode=sport.mode,
        error_code=sport.error_code,
        body_height=sport.body_height,
    )
