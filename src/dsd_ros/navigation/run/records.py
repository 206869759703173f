# SPDX-License-Identifier: Apache-2.0
"""The records of a run: moments, requests, answers, steps, announcements; and how long the supervisor holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dsd_ros.navigation.run.actions import Action, ParsedReply
from dsd_ros.navigation.run.controller import Pose
from dsd_ros.navigation.run.settings import RunOutcome, RunSettings
from dsd_ros.navigation.safety.causes import REFUSALS, Cause, SafetyReport

_SUPERVISOR_S = 1.0  # a supervisor silent for this long counts as holding the robot
_REFUSED_S = 0.5  # waiting does not help when the supervisor refuses navigation's own commands
STAMP_ROUNDING_S = 1e-3  # stamps are converted to float64 seconds and back
_CLOCK_BACK_S = 1e-3  # for rounding
_CLOCK_SET_S = 1.0  # further ahead than this, the clock was set
_MOST_RATE = 20.0  # of a simulated clock
LINK_BACK_S = 1.0  # the link counts as back after this long without LINK_LOST


class Phase(Enum):
    """Where in its cycle a run is."""

    SETTLING = "settling"
    DECODING = "decoding"
    EXECUTING = "executing"
    CHECKING = "checking"  # whether the robot has arrived
    RETRACING = "retracing"  # the way back, while the link is lost
    ENDED = "ended"


@dataclass(frozen=True)
class Moment:
    """An instant on two clocks, in seconds, which are never compared with each other.

    ``steady``: this process's monotonic clock, for every time-out. ``stamp``: the clock of the robot's message
    stamps (wall or simulated), for the age of observations and for motion.
    """

    steady: float
    stamp: float


class ClockWatch:
    """Notices that the clock of the stamps was set, by its course against the steady clock's.

    Simulated clocks may run at another rate, stand still, and begin at 0.
    """

    def __init__(self, moment: Moment) -> None:
        self._last = moment
        self._set_at, self._ran_at = -math.inf, moment.steady

    def jump(self, moment: Moment) -> float:
        """By how much (s) the clock was set since the last call; 0 if it was not."""
        span, went = moment.steady - self._last.steady, moment.stamp - self._last.stamp
        self._last = moment
        if went:
            self._ran_at = moment.steady
        if -_CLOCK_BACK_S <= went <= _CLOCK_SET_S + _MOST_RATE * span:
            return 0.0
        self._set_at = moment.steady
        return went - span

    def stands(self, now: float) -> bool:
        """Whether the clock has stood still for some time, as a paused simulation's does."""
        return now - self._ran_at > _CLOCK_SET_S

    def set_within(self, span: float, now: float) -> bool:
        """Whether the clock was set in the last ``span`` s before ``now`` (steady)."""
        return now - self._set_at <= span


@dataclass(frozen=True)
class RunStep:
    """One action that was accepted for execution.

    ``observed_at``: stamp of its picture, s. ``details``: what the caller attached to the answer. ``seen_from``: where
    the picture was taken, in motion; None: where the action began.
    """

    number: int  # of the announcement, from 1
    reply: ParsedReply
    observation_age: float  # s, when the action began
    observed_at: float = 0.0
    verified: bool = True
    details: Any = None
    seen_from: Pose | None = None


@dataclass(frozen=True)
class DecodeRequest:
    """A request to decode a picture stamped ``not_before`` (s) or later; ``history``: earlier steps, oldest first.

    ``ahead``: asked while the robot moves.
    """

    number: int
    not_before: float
    timeout: float
    allow_unverified: bool = False
    history: tuple[RunStep, ...] = ()
    ahead: bool = False


@dataclass(frozen=True)
class DecodeAnswer:
    """The answer to a :class:`DecodeRequest`, about a picture stamped ``observed_at`` (s)."""

    text: str
    observed_at: float
    verified: bool = True
    details: Any = None


@dataclass(frozen=True)
class Failure:
    """Why a request cannot be answered, and the outcome if the run ends by it."""

    outcome: RunOutcome
    sentence: str


@dataclass(frozen=True)
class Announcement:
    """An action that begins. ``number`` counts them within the run, from 1.

    ``retracing``: a leg of the way back, which no reply asked for. ``step_seconds``: time since the last announcement
    or the run's start; the robot stood for the last ``standing_seconds`` of it.
    """

    number: int
    action: Action
    reasoning: str
    verified: bool
    retracing: bool
    step_seconds: float
    standing_seconds: float


class Announcer:
    """Counts the actions of a run and measures the time they take.

    ``waiting``: the announcement that has not been handed out yet.
    """

    def __init__(self, now: float) -> None:
        self.count = 0
        self._last = now
        self.waiting: Announcement | None = None

    def announce(
        self, action: Action, reasoning: str, verified: bool, now: float, stood: Moment | None, retracing: bool = False
    ) -> None:
        """An action begins at ``now`` (steady, s); the robot has been standing since ``stood``."""
        self.count += 1
        standing = 0.0 if stood is None else now - stood.steady
        self.waiting = Announcement(self.count, action, reasoning, verified, retracing, now - self._last, standing)
        self._last = now


class Hold:
    """Whether the supervisor holds the robot, for how long, and whether the link is lost. Times are steady seconds."""

    def __init__(self, settings: RunSettings, now: float) -> None:
        self.report = SafetyReport()
        self.settings = settings
        self._time = now
        self._since: float | None = None
        self._link_well_since = now

    @property
    def by_operator(self) -> bool:
        return Cause.OPERATOR in self.report.causes

    def on_report(self, report: SafetyReport, now: float) -> None:
        self.report, self._time = report, now
        if Cause.LINK_LOST in report.causes:
            self._link_well_since = math.inf
        elif self._link_well_since == math.inf:
            self._link_well_since = now

    def reason(self, now: float) -> str:
        """Why the robot is held; empty when it is not."""
        if now - self._time > _SUPERVISOR_S:
            return f"The safety supervisor has been silent for more than {_SUPERVISOR_S:.1f} s."
        return self.report.sentence if self.report.holds else ""

    def lasting(self, now: float, carrying_out: bool) -> str:
        """Why the robot has been held for too long; empty when it has not.

        Time counts only while there is something to carry out, because a decode fails by itself when the camera or
        the link does. While an operator drives, time always counts.
        """
        held = self.reason(now)
        if not held or not (carrying_out or self.by_operator):
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        patience = self.settings.safety_patience_s
        if self.only_by_link(now) and self.settings.fallback == "stop":
            patience = max(patience, self.settings.link_patience_s)
        if not REFUSALS.isdisjoint(self.report.causes):
            patience = min(patience, _REFUSED_S)
        return held if now - self._since > patience else ""

    def forget(self) -> None:
        """Measure the next hold from zero."""
        self._since = None

    def only_by_link(self, now: float) -> bool:
        """Whether nothing but the lost link holds the robot."""
        silent = now - self._time > _SUPERVISOR_S
        return not silent and set(self.report.causes) == {Cause.LINK_LOST}

    def link_back(self, now: float, since: float) -> bool:
        """Whether the link has been up for a second, counted from ``since`` at the earliest."""
        if now - self._time > _SUPERVISOR_S:
            return False
        return now - max(since, self._link_well_since) >= LINK_BACK_S
