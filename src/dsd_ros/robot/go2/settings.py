"""How a Go2 is driven: the settings of its driver, which are parameters of its node."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.options import option

AVOIDANCE = ("auto", "off", "required")
VELOCITY_FRAMES = ("body", "odom")


@dataclass(frozen=True)
class Go2Settings:
    """How the robot is driven; ValueError for an unknown choice."""

    request_timeout_s: float = option(0.4, "longest wait for an answer, s", 0.05, 5.0)
    attempts: int = option(3, "times a request is sent before it counts as unanswered", 1, 10)
    state_timeout_s: float = option(0.3, "without a state for this long there is no motion, s", 0.05, 2.0)
    command_timeout_s: float = option(
        0.5, "without a further command for this long the driver stops the robot, s", 0.05, 0.9
    )
    move_rate: float = option(20.0, "rate of Move requests while moving, Hz", 4.0, 100.0)
    posture_timeout_s: float = option(
        8.0, "a posture must show in the state this soon after it was acknowledged, s", 0.5, 30.0
    )
    avoidance: str = option(
        "auto",
        "the robot's own obstacle avoidance. auto: on where the robot has it; required: no motion "
        "without it; off: left as it is",
        choices=AVOIDANCE,
    )
    velocity_frame: str = option("body", "frame of the velocity in the robot's state", choices=VELOCITY_FRAMES)

    def __post_init__(self) -> None:
        for name, known in (("avoidance", AVOIDANCE), ("velocity_frame", VELOCITY_FRAMES)):
            if getattr(self, name) not in known:
                raise ValueError(f"'{getattr(self, name)}' is no {name}; choose from {', '.join(known)}.")
