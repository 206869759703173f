"""One Navigate run as a pure state machine: rest, observe and decode, check, execute, rest, ...

The caller feeds it odometry, answers, failures and the passing of time, and carries out what it
asks for. Whatever happens, a run ends in exactly one :class:`RunOutcome` with a sentence, and from
then on commands only zero.

    SETTLING --at rest--> DECODING
    DECODING --answer that parses and is fresh--> EXECUTING
    EXECUTING --at rest--> DECODING
        every phase --cancel, time-out, failure, lost odometry, safety stop--> ENDED

While the safety supervisor holds the robot, a run commands zero. A hold that lasts while there is
an action to carry out, or that is latched, ends the run; after an operator has driven the robot it
observes anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from dsd_ros.navigation.actions import (
    Action,
    ActionKind,
    Reply,
    UnparsableReply,
    format_action,
    parse_reply,
)
from dsd_ros.navigation.controller import (
    AT_REST,
    MotionController,
    MotionSettings,
    MotionStatus,
    Pose,
    Velocity,
)
from dsd_ros.navigation.safety import REFUSALS, Cause, SafetyReport

_REFUSED_S = 0.5  # a refusal of what navigation does itself does not pass by waiting longer
_STAMP_ROUNDING_S = 1e-3  # stamps go through float64 seconds and back


class RunOutcome(IntEnum):
    """How a run ended. ARRIVED is the model's own claim: it said stop."""

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


class Phase(Enum):
    """Where in its cycle a run is."""

    SETTLING = "settling"
    DECODING = "decoding"
    EXECUTING = "executing"
    ENDED = "ended"


@dataclass(frozen=True)
class Moment:
    """An instant on two clocks that are never compared with each other.

    ``steady``: this process's monotonic clock, for every time-out. ``stamp``: the clock of the
    robot's message stamps (wall or simulated), for the age of observations and for motion. Both in
    seconds.
    """

    steady: float
    stamp: float


def _option(default: Any, text: str, low: float, high: float) -> Any:
    return field(default=default, metadata={"help": text, "min": low, "max": high})


@dataclass(frozen=True)
class RunSettings:
    """Budgets and limits of a run."""

    max_steps: int = _option(60, "actions a run may take", 1, 1000)
    time_limit_s: float = _option(180.0, "time a run may take, s", 1.0, 3600.0)
    max_observation_age_s: float = _option(
        5.0, "a reply about a picture older than this is not carried out, s", 0.1, 60.0
    )
    decode_timeout_s: float = _option(15.0, "time one reply may take, s", 0.1, 120.0)
    odometry_timeout_s: float = _option(
        2.0, "a run ends when the robot has not reported its pose for this long, s", 0.1, 30.0
    )
    max_stuck: int = _option(3, "a run ends after this many blocked actions in a row", 1, 20)
    safety_patience_s: float = _option(
        2.0, "a run ends when the safety supervisor holds its action for this long, s", 0.5, 60.0
    )
    safety_timeout_s: float = _option(
        1.0, "a supervisor that is silent for this long counts as holding the robot, s", 0.3, 10.0
    )


@dataclass(frozen=True)
class DecodeRequest:
    """What the run wants decoded: a picture stamped at or after ``not_before``, answered within
    ``timeout``.
    """

    number: int
    not_before: float
    timeout: float


@dataclass(frozen=True)
class Step:
    """One action that was accepted for execution."""

    number: int
    reply: Reply
    observation_age: float  # s, when the action began


class NavigationRun:
    """See the module. Not thread-safe: the caller serialises the calls."""

    def __init__(self, settings: RunSettings, motion: MotionSettings, moment: Moment) -> None:
        self.phase = Phase.SETTLING
        self.outcome = RunOutcome.UNKNOWN
        self.sentence = ""
        self.steps: list[Step] = []
        self.distance = 0.0  # m travelled by finished actions
        self._settings = settings
        self._motion_settings = motion
        self._began = moment.steady
        self._odometry_time = moment.steady
        self._motion: MotionController | None = None
        self._pending: DecodeRequest | None = None
        self._handed_out = False
        self._requested_at = moment.steady
        self._requests = 0
        self._stuck_in_a_row = 0
        self._safety = SafetyReport()
        self._safety_time = moment.steady
        self._held_since: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def distance_travelled(self) -> float:
        """Metres of path since the start, the action under way included."""
        return self.distance + (self._motion.travelled if self._motion else 0.0)

    @property
    def action(self) -> Action | None:
        """What is being carried out now."""
        executing = self.phase is Phase.EXECUTING
        return self.steps[-1].reply.action if executing and self.steps else None

    def on_odometry(self, pose: Pose, measured: Velocity, moment: Moment) -> Velocity:
        """Take the robot's newest pose; returns the command for it."""
        self._odometry_time = moment.steady
        if self.phase is Phase.SETTLING and Cause.OPERATOR in self._safety.causes:
            self._motion = None  # nothing is observed before the operator lets go
            return AT_REST
        if self._motion is None:
            if self.phase is Phase.SETTLING:
                wanted = Action(ActionKind.STOP)
            elif self.phase is Phase.EXECUTING:
                wanted = self.steps[-1].reply.action
            else:
                return AT_REST
            self._motion = MotionController(wanted, self._motion_settings, pose, moment.stamp)
        command = self._motion.update(pose, measured, moment.stamp)
        if self._motion.finished:
            self._end_motion(moment)
            return AT_REST
        if self._hold(moment.steady):
            self._motion.pause(moment.stamp)
            return AT_REST
        return command

    def on_safety(self, report: SafetyReport, steady: float) -> None:
        """The supervisor's newest verdict, which came at ``steady``."""
        self._safety, self._safety_time = report, steady
        if report.latched:
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {report.sentence}")
        elif Cause.OPERATOR in report.causes and self.phase in (Phase.DECODING, Phase.EXECUTING):
            # Moved by hand, the robot no longer is where picture and action belong.
            self.distance = self.distance_travelled
            self._motion, self._pending = None, None
            self.phase = Phase.SETTLING

    def take_request(self) -> DecodeRequest | None:
        """The decode that the run waits for, handed out once."""
        if self.phase is not Phase.DECODING or self._handed_out:
            return None
        self._handed_out = True
        return self._pending

    def on_answer(self, number: int, text: str, observed_at: float, moment: Moment) -> None:
        """The verified reply to request ``number``, about a picture stamped ``observed_at``.

        Answers to any but the newest request are ignored: what they saw is past.
        """
        if not self._awaits(number):
            return
        assert self._pending is not None
        age = moment.stamp - observed_at
        limit = self._settings.max_observation_age_s
        if observed_at < self._pending.not_before - _STAMP_ROUNDING_S:
            self.end(
                RunOutcome.STALE_OBSERVATION,
                "The reply is about a picture taken before the robot came to rest; "
                "it was not carried out.",
            )
        elif (
            not -0.5 <= age <= limit
        ):  # NaN fails here, too; -0.5: clocks of simulated time tick coarsely
            self.end(
                RunOutcome.STALE_OBSERVATION,
                f"The reply came {age:.1f} s after its picture, the limit is {limit:.1f} s; "
                "it was not carried out.",
            )
        else:
            self._accept(text, age)

    def on_failure(self, number: int, outcome: RunOutcome, sentence: str) -> None:
        """Request ``number`` can't be answered."""
        if self._awaits(number):
            self.end(outcome, sentence)

    def on_time(self, moment: Moment) -> None:
        """Let the time-outs act. Call a few times a second at least."""
        if self.ended:
            return
        settings = self._settings
        held = self._lasting_hold(moment.steady)
        if held:
            self.end(RunOutcome.SAFETY_STOP, f"Safety stop: {held}")
        elif moment.steady - self._odometry_time > settings.odometry_timeout_s:
            self.end(
                RunOutcome.ODOMETRY_LOST,
                f"The robot has not reported its pose for {settings.odometry_timeout_s:.1f} s.",
            )
        elif moment.steady - self._began > settings.time_limit_s:
            self.end(
                RunOutcome.TIME_BUDGET,
                f"The run took longer than its {settings.time_limit_s:.0f} s.",
            )
        elif (
            self.phase is Phase.DECODING
            and moment.steady - self._requested_at > settings.decode_timeout_s
        ):
            self.end(
                RunOutcome.DECODE_TIMEOUT,
                f"No verified reply came within {settings.decode_timeout_s:.1f} s.",
            )

    def cancel(self) -> None:
        """End at once by the operator's wish."""
        self.end(RunOutcome.CANCELLED, "Cancelled by the operator.")

    def end(self, outcome: RunOutcome, sentence: str) -> None:
        """End with ``outcome``; the first end is the one that counts."""
        if self.ended:
            return
        self.distance = self.distance_travelled
        self._motion = None
        self._pending = None
        self.phase = Phase.ENDED
        self.outcome, self.sentence = outcome, sentence

    def _hold(self, now: float) -> str:
        """Why the robot is being held; empty when it is not."""
        limit = self._settings.safety_timeout_s
        if now - self._safety_time > limit:
            return f"The safety supervisor has been silent for more than {limit:.1f} s."
        return self._safety.sentence if self._safety.holds else ""

    def _lasting_hold(self, now: float) -> str:
        """Why the robot has been held for too long. Only while there is something to carry out: a
        decode fails by itself when camera or link do. Under an operator's hands it counts throughout.
        """
        causes = set(self._safety.causes)
        held = self._hold(now)
        if not held or not (self.phase is Phase.EXECUTING or Cause.OPERATOR in causes):
            self._held_since = None
            return ""
        if self._held_since is None:
            self._held_since = now
        patience = self._settings.safety_patience_s
        if not REFUSALS.isdisjoint(causes):
            patience = min(patience, _REFUSED_S)
        return held if now - self._held_since > patience else ""

    def _awaits(self, number: int) -> bool:
        pending = self._pending
        return self.phase is Phase.DECODING and pending is not None and pending.number == number

    def _accept(self, text: str, age: float) -> None:
        try:
            reply = parse_reply(text)
        except UnparsableReply as error:
            self.end(RunOutcome.UNPARSABLE_REPLY, f"The robot stays where it is: {error}")
            return
        self.steps.append(Step(len(self.steps) + 1, reply, age))
        self._pending = None
        self.phase = Phase.EXECUTING

    def _end_motion(self, moment: Moment) -> None:
        assert self._motion is not None
        stuck = self._motion.status is MotionStatus.STUCK
        action = self._motion.action
        self.distance += self._motion.travelled
        self._motion = None
        if self.phase is Phase.EXECUTING and action.kind is ActionKind.STOP and not stuck:
            self.end(
                RunOutcome.ARRIVED, "The model says that the target is reached; the robot stands."
            )
            return
        self._stuck_in_a_row = self._stuck_in_a_row + 1 if stuck else 0
        if self._stuck_in_a_row >= self._settings.max_stuck:
            self.end(
                RunOutcome.STUCK,
                f"'{format_action(action)}' did not move the robot as it should: blocked "
                f"{self._stuck_in_a_row} times in a row.",
            )
        elif len(self.steps) >= self._settings.max_steps:
            self.end(
                RunOutcome.STEP_BUDGET,
                f"The target was not reached within {self._settings.max_steps} actions.",
            )
        else:
            self._requests += 1
            self._pending = DecodeRequest(
                self._requests, moment.stamp, self._settings.decode_timeout_s
            )
            self._handed_out = False
            self._requested_at = moment.steady
            self.phase = Phase.DECODING
