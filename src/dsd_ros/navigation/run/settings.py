# SPDX-License-Identifier: Apache-2.0
"""Settings of a run, and its possible outcomes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from dsd_ros.limits import MAX_INSTRUCTION_CHARS
from dsd_ros.navigation.safety.causes import FALLBACK_HELP, FALLBACKS
from dsd_ros.options import option


class RunOutcome(IntEnum):
    """How a run ended. ARRIVED is the model's own claim, unless arrival_check requires a check."""

    UNKNOWN = 0
    ARRIVED = 1
    CANCELLED = 2
    STEP_BUDGET = 3
    TIME_BUDGET = 4
    UNPARSABLE_REPLY = 5
    STALE_OBSERVATION = 6
    NO_OBSERVATION = 7
    DECODE_TIMEOUT = 8
    LINK_LOST = 9
    VERIFIER_REFUSED = 10
    ODOMETRY_LOST = 11
    STUCK = 12
    BAD_GOAL = 13
    INTERNAL_ERROR = 14
    SHUTDOWN = 15
    SAFETY_STOP = 16
    OSCILLATING = 17
    NOT_THERE = 18
    NOT_KNOWN = 19
    EXECUTOR_FAILED = 20


@dataclass(frozen=True)
class RunSettings:
    """Budgets, limits and choices of a run."""

    max_steps: int = option(60, "most actions of a run", 1, 1000)
    time_limit_s: float = option(180.0, "longest time of a run, s", 1.0, 3600.0)
    max_observation_age_s: float = option(5.0, "an older picture's reply is not carried out, s", 0.1, 60.0)
    decode_timeout_s: float = option(15.0, "longest time of one reply, s", 0.1, 120.0)
    safety_patience_s: float = option(2.0, "a run ends when the supervisor holds it for this long, s", 0.5, 60.0)
    link_patience_s: float = option(10.0, "as safety_patience_s, when only the lost link holds it, s", 0.5, 60.0)
    arrival_check: str = option(
        "model", "who decides that the goal is reached; service: check_arrival must agree", choices=("model", "service")
    )
    fallback: str = option("stop", FALLBACK_HELP, choices=FALLBACKS)
    look_ahead: bool = option(False, "take and decode the next picture while an action is carried out (executor own)")
    look_ahead_turn_rate: float = option(
        0.6, "a picture taken while the robot turned faster is taken again at rest, rad/s", 0.0, 2.1
    )

    def within(self, max_steps: int, time_limit: float) -> RunSettings:
        """The same settings with a goal's own budgets; 0 keeps the default. Raises ValueError for a bad time limit."""
        if not (math.isfinite(time_limit) and time_limit >= 0.0):
            raise ValueError(f"The time limit is {time_limit} s; it must be 0 or more.")
        return replace(self, max_steps=max_steps or self.max_steps, time_limit_s=time_limit or self.time_limit_s)


def checked_instruction(instruction: str) -> str:
    """The instruction without surrounding white space; ValueError when it is empty or too long."""
    text = instruction.strip()
    if not text:
        raise ValueError("The instruction is empty: say what the robot should find.")
    if len(text) > MAX_INSTRUCTION_CHARS:
        raise ValueError(f"The instruction has {len(text)} characters; at most {MAX_INSTRUCTION_CHARS} are allowed.")
    return text


@dataclass(frozen=True)
class PointSettings:
    """How the camera is mounted, for points of its pictures."""

    camera_height: float = option(0.35, "height of the camera above the floor, m", 0.02, 2.0)
    camera_pitch: float = option(0.0, "downward pitch of the camera, rad", -0.79, 1.31)
    camera_ahead: float = option(0.33, "distance of the camera ahead of the robot's middle, m", -1.0, 1.0)
    depth: bool = option(
        False, "depth/image_raw shows what the pictures show (aligned depth); false: points are on the floor"
    )
