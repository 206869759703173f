# SPDX-License-Identifier: Apache-2.0
"""The decode request that is in force, and whether the answer to it may be carried out.

A request is handed out once, and again when the node that should answer has died. Pure; times are steady seconds.
"""

from __future__ import annotations

from dataclasses import replace

from dsd_ros.navigation.run.actions import Grammar, ParsedReply, UnparsableReply, parse_reply
from dsd_ros.navigation.run.records import STAMP_ROUNDING_S, DecodeAnswer, DecodeRequest, Moment, RunStep
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.causes import Cause, SafetyReport

DECODE_NODE = "draft_node"
_TICK_S = 0.5  # simulated clocks tick coarsely
_DEAD_S = 0.8  # a node silent for this long has lost its requests; a shorter silence is a busy machine
_RETRY_S = 0.5  # between attempts while the node is starting
_DROPPED_S = 0.1  # before a dropped request is sent again
_LEAST_S = 0.3  # with less time left, a retry cannot succeed
# What a starting node reports: no session yet, no picture yet.
_STARTING = (RunOutcome.LINK_LOST, RunOutcome.NO_OBSERVATION)


class PendingRequest:
    """At most one decode request at a time."""

    def __init__(self) -> None:
        self.request: DecodeRequest | None = None
        self._count = 0
        self._asked_at = 0.0
        self._due: float | None = None  # when to hand the request out; None: already done
        self._silent_since: float | None = None
        self._restarted = False  # the node that received the request first is gone

    def ask(
        self,
        not_before: float,
        moment: Moment,
        timeout: float,
        allow_unverified: bool = False,
        history: tuple[RunStep, ...] = (),
        ahead: bool = False,
    ) -> None:
        """Replace any earlier request by a new one."""
        self._count += 1
        self.request = DecodeRequest(self._count, not_before, timeout, allow_unverified, history, ahead)
        self._asked_at = self._due = moment.steady
        self._restarted = False

    def renew(self, moment: Moment) -> None:
        """Replace the request, if any, by one about a picture of now, with the time that is left."""
        if self.request is not None:
            self._count += 1
            self.request = replace(self.request, number=self._count, not_before=moment.stamp, ahead=False)
            self._due = moment.steady

    def withdraw(self) -> None:
        """Ignore all answers until the next request."""
        self.request, self._due = None, None

    @property
    def ahead(self) -> bool:
        """Whether the request in force was asked while the robot moved."""
        return self.request is not None and self.request.ahead

    def waited(self, now: float) -> float:
        """Seconds since the request was asked."""
        return now - self._asked_at

    def awaits(self, number: int) -> bool:
        return self.request is not None and self.request.number == number

    def overdue(self, now: float) -> bool:
        return self.request is not None and now - self._asked_at > self.request.timeout

    def asked_by(self, now: float) -> bool:
        """Whether there is a request that was asked at ``now`` or before."""
        return self.request is not None and self._asked_at <= now

    def take(self, now: float) -> DecodeRequest | None:
        """The request if it should be sent now, with the time it has left."""
        if self.request is None or self._due is None or now < self._due:
            return None
        self._due = None
        left = self.request.timeout - (now - self._asked_at)
        useless = self._restarted and left < _LEAST_S
        return None if useless else replace(self.request, timeout=left)

    def on_report(self, report: SafetyReport, now: float) -> None:
        """Send the request again once the node that received it has died and come back."""
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

    def resend(self, now: float) -> None:
        """Send the request again: the node dropped it for one that has been withdrawn since."""
        if self.request is not None and not self.overdue(now):
            self._due = now + _DROPPED_S

    def recovers(self, outcome: RunOutcome, now: float) -> bool:
        """Whether a failure may pass, because the node died or is just starting again: the request is sent again."""
        if outcome not in _STARTING or self.request is None or self.overdue(now):
            return False
        if self._silent_since is not None:
            return True  # sent again when the node is back
        if self._restarted:
            self._due = now + _RETRY_S
        return self._restarted


class ReplyRefused(Exception):
    """The reply must not be carried out: the run ends with ``outcome``."""

    def __init__(self, outcome: RunOutcome, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome = outcome


def check_reply(
    answer: DecodeAnswer, request: DecodeRequest, age: float, limit: float, grammar: Grammar | None = None
) -> ParsedReply:
    """Parse an answer that is fresh, verified where that is required, and in the grammar.

    :param age: of its picture, s.
    :param limit: the greatest age that is carried out, s.
    :raises ReplyRefused: for any other answer.
    """
    if answer.observed_at < request.not_before - STAMP_ROUNDING_S:
        raise ReplyRefused(
            RunOutcome.STALE_OBSERVATION,
            "The reply is about a picture taken before the robot came to rest; it was not carried out.",
        )
    if age < -_TICK_S:
        raise ReplyRefused(
            RunOutcome.STALE_OBSERVATION,
            f"The reply's picture is stamped {-age:.1f} s ahead of this node's clock; it was not carried out: "
            "let the camera and every node use the same clock.",
        )
    if not age <= limit:  # NaN fails here, too
        raise ReplyRefused(
            RunOutcome.STALE_OBSERVATION,
            f"The reply came {age:.1f} s after its picture, the limit is {limit:.1f} s; it was not carried out.",
        )
    if not (answer.verified or request.allow_unverified):
        raise ReplyRefused(RunOutcome.LINK_LOST, "The target did not verify the reply; it was not carried out.")
    try:
        return parse_reply(answer.text, grammar)
    except UnparsableReply as error:
        sentence = f"The robot stays where it is: {error}"
        raise ReplyRefused(RunOutcome.UNPARSABLE_REPLY, sentence) from error
