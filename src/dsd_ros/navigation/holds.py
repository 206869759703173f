"""What the safety supervisor's reports mean for a run: whether the robot is held, for how long, and the link."""

from __future__ import annotations

import math

from dsd_ros.navigation.safety import REFUSALS, Cause, SafetyReport
from dsd_ros.navigation.settings import RunSettings

_REFUSED_S = 0.5  # a refusal of what navigation does itself does not pass by waiting longer
LINK_BACK_S = 1.0  # without LINK_LOST for so long, the link counts as back


class Hold:
    """Pure; times are steady seconds."""

    def __init__(self, settings: RunSettings, now: float) -> None:
        self.report = SafetyReport()
        self._settings = settings
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
        """Why the robot is being held; empty when it is not."""
        limit = self._settings.safety_timeout_s
        if now - self._time > limit:
            return f"The safety supervisor has been silent for more than {limit:.1f} s."
        return self.report.sentence if self.report.holds else ""

    def lasting(self, now: float, carrying_out: bool) -> str:
        """Why the robot has been held for too long; empty when it has not.

        Counts only while there is something to carry out: a decode fails by itself when camera or
        link do. Under an operator's hands it counts throughout.
        """
        held = self.reason(now)
        if not held or not (carrying_out or self.by_operator):
            self._since = None
            return ""
        if self._since is None:
            self._since = now
        patience = self._settings.safety_patience_s
        if self.only_by_link(now) and self._settings.fallback == "stop":
            patience = max(patience, self._settings.link_patience_s)
        if not REFUSALS.isdisjoint(self.report.causes):
            patience = min(patience, _REFUSED_S)
        return held if now - self._since > patience else ""

    def forget(self) -> None:
        """What is held from now on is something else."""
        self._since = None

    def only_by_link(self, now: float) -> bool:
        """Whether the robot is held by nothing but the lost link."""
        silent = now - self._time > self._settings.safety_timeout_s
        return not silent and set(self.report.causes) == {Cause.LINK_LOST}

    def link_back(self, now: float, since: float) -> bool:
        """Whether the link has been well for a second, all of it after ``since``."""
        if now - self._time > self._settings.safety_timeout_s:
            return False
        return now - max(since, self._link_well_since) >= LINK_BACK_S
