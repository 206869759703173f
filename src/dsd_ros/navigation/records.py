"""What a run takes and gives: moments, requests, steps, announcements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from dsd_ros.navigation.actions import Action, Reply
from dsd_ros.navigation.settings import RunOutcome


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
    """An instant on two clocks that are never compared with each other.

    ``steady``: this process's monotonic clock, for every time-out. ``stamp``: the clock of the
    robot's message stamps (wall or simulated), for the age of observations and for motion. Both in
    seconds.
    """

    steady: float
    stamp: float


@dataclass(frozen=True)
class Step:
    """One action that was accepted for execution. ``observed_at``: stamp of its picture, s.

    ``details`` is what the caller gave with the answer.
    """

    number: int  # of the announcement, from 1
    reply: Reply
    observation_age: float  # s, when the action began
    observed_at: float = 0.0
    verified: bool = True
    details: Any = None


@dataclass(frozen=True)
class DecodeRequest:
    """What the run wants decoded: a picture stamped at or after ``not_before``, answered within
    ``timeout``. ``history``: steps carried out before, oldest first.
    """

    number: int
    not_before: float
    timeout: float
    allow_unverified: bool = False
    history: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A reply to the run's request, about a picture stamped ``observed_at`` (s)."""

    text: str
    observed_at: float
    verified: bool = True
    details: Any = None


@dataclass(frozen=True)
class Failure:
    """The run's request can't be answered: how the run would end by it, and why."""

    outcome: RunOutcome
    sentence: str


@dataclass(frozen=True)
class Announcement:
    """An action that begins. ``number`` counts them within the run, from 1.

    ``retracing``: a leg of the way back, by nobody's reply. ``step_seconds``: since the announcement
    before, or the run's beginning; of these the robot stood for ``standing_seconds`` at the end.
    """

    number: int
    action: Action
    reasoning: str
    verified: bool
    retracing: bool
    step_seconds: float
    standing_seconds: float


class Announcer:
    """Counts the actions of a run and the time they take."""

    def __init__(self, now: float) -> None:
        self.count = 0
        self._last = now
        self._waiting: Announcement | None = None

    def announce(
        self, action: Action, reasoning: str, verified: bool, now: float, stood: Moment | None,
        retracing: bool = False,
    ) -> None:  # fmt: skip
        """An action begins at ``now`` (steady, s), after the robot has stood since ``stood``."""
        self.count += 1
        standing = 0.0 if stood is None else now - stood.steady
        self._waiting = Announcement(self.count, action, reasoning, verified, retracing, now - self._last, standing)
        self._last = now

    def take(self) -> Announcement | None:
        """The announcement that was not handed out yet."""
        waiting, self._waiting = self._waiting, None
        return waiting
