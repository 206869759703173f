"""The decode request in force: handed out once, withdrawn, or sent again when the node that was to answer died."""

from __future__ import annotations

from dataclasses import replace

from dsd_ros.navigation.records import DecodeRequest, Moment, Step
from dsd_ros.navigation.safety import Cause, SafetyReport
from dsd_ros.navigation.settings import RunOutcome

DECODE_NODE = "draft_node"
_DEAD_S = 0.8  # a node that is silent for so long has lost what it was asked; less is a busy machine
_RETRY_S = 0.5  # between two attempts at a node that is only just coming up
_DROPPED_S = 0.1  # before a request that was dropped is sent again
_LEAST_S = 0.3  # with less time left, asking again is no use
# What a node says that is only just coming up: no session yet, no picture yet.
_COMING_UP = (RunOutcome.LINK_LOST, RunOutcome.NO_OBSERVATION)


class Asking:
    """At most one request is in force. Pure; times are steady seconds."""

    def __init__(self) -> None:
        self.request: DecodeRequest | None = None
        self._count = 0
        self._asked_at = 0.0
        self._due: float | None = None  # hand the request out from then on; None: it is out
        self._silent_since: float | None = None
        self._restarted = False  # the node that was asked first is gone

    def ask(
        self,
        not_before: float,
        moment: Moment,
        timeout: float,
        allow_unverified: bool = False,
        history: tuple[Step, ...] = (),
    ) -> None:
        """A new request, in the place of any other."""
        self._count += 1
        self.request = DecodeRequest(self._count, not_before, timeout, allow_unverified, history)
        self._asked_at = self._due = moment.steady
        self._restarted = False

    def withdraw(self) -> None:
        """Whatever is answered from now on is not heard."""
        self.request, self._due = None, None

    def awaits(self, number: int) -> bool:
        return self.request is not None and self.request.number == number

    def overdue(self, now: float) -> bool:
        return self.request is not None and now - self._asked_at > self.request.timeout

    def take(self, now: float) -> DecodeRequest | None:
        """The request, when it is to be sent now; with the time it has left."""
        if self.request is None or self._due is None or now < self._due:
            return None
        self._due = None
        left = self.request.timeout - (now - self._asked_at)
        useless = self._restarted and left < _LEAST_S
        return None if useless else replace(self.request, timeout=left)

    def on_report(self, report: SafetyReport, now: float) -> None:
        """Ask again when the node that was asked has been dead and is there again."""
        if any(
            cause is Cause.NODE_SILENT and DECODE_NODE in sentence
            for cause, sentence in zip(report.causes, report.sentences, strict=False)
        ):
            if self._silent_since is None:
                self._silent_since = now
            return
        since, self._silent_since = self._silent_since, None
        if since is not None and now - since >= _DEAD_S and self.request is not None:
            self._restarted, self._due = True, now

    def again(self, now: float) -> None:
        """The request was dropped for another, which nobody waits for any more: ask it again."""
        if self.request is not None and not self.overdue(now):
            self._due = now + _DROPPED_S

    def recovers(self, outcome: RunOutcome, now: float) -> bool:
        """Whether a failure may yet pass: the node died, or is only just coming up again.

        Then the request stays in force, within its time, and is sent again.
        """
        if outcome not in _COMING_UP or self.request is None or self.overdue(now):
            return False
        if self._silent_since is not None:
            return True  # it is sent again when the node is back
        if self._restarted:
            self._due = now + _RETRY_S
        return self._restarted
