# SPDX-License-Identifier: Apache-2.0
"""What every client of a verifier does with its link: connect, wait within limits, back off and connect again.

``edge.client`` and ``dragon.client`` add their messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dsd_ros.logs import LogLimit
from dsd_ros.wire.channel import Backoff, Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import Message

_log = logging.getLogger(__name__)
_POLL_S = 0.05  # how soon a cancellation is noticed
_LONG_WAIT_S = 1.0  # a longer pause is logged


class LinkSilent(LinkError):
    """Nothing came from the verifier for as long as the caller has patience."""


class DeadlineExceeded(LinkError):
    """The reply was not complete at its deadline. ``trouble``: what was wrong with the link then; empty: nothing."""

    def __init__(self, sentence: object = "", trouble: str = "") -> None:
        super().__init__(f"{sentence}: {trouble}" if trouble else sentence)
        self.trouble = trouble


class DecodeCancelled(Exception):
    """The caller asked for the decode to end."""


class Limits:
    """When a client has to stop waiting."""

    def __init__(
        self,
        deadline: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        patience: float | None = None,
        closed: Callable[[], bool] = lambda: False,
        what: str = "reply",
        on_trouble: Callable[[str], object] | None = None,
    ) -> None:
        """Set any number of limits.

        :param deadline: a time.monotonic() instant.
        :param cancelled: polled; whether the caller gives up.
        :param patience: seconds of silence from the verifier after which the robot goes on without it.
        :param closed: polled; whether the session has been closed.
        :param what: what is waited for, as error sentences name it.
        :param on_trouble: called when an answer is overdue or the link is down, with a sentence; when something has
            come after that, with "".
        """
        self._deadline, self._cancelled, self._patience = deadline, cancelled, patience
        self._closed, self._what = closed, what
        self._on_trouble, self._trouble = on_trouble, ""
        self._heard = time.monotonic()

    def heard(self) -> None:
        """The verifier has sent something, or has just been asked: its silence begins now."""
        self._heard = time.monotonic()
        if self._trouble:
            self.overdue("")

    def overdue(self, why: LinkError | str) -> None:
        """The verifier did not answer in time, or cannot be reached."""
        self._trouble = str(why)
        if self._on_trouble is not None:
            self._on_trouble(self._trouble)

    def check(self) -> None:
        """Raise what ends the wait, if anything: LinkClosed, DecodeCancelled, DeadlineExceeded or LinkSilent."""
        if self._closed():
            raise LinkClosed("the session was closed")
        if self._cancelled is not None and self._cancelled():
            raise DecodeCancelled(f"the {self._what} was cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded(f"the {self._what} was not complete at its deadline", self._trouble)
        if self._patience is not None and time.monotonic() >= self._heard + self._patience:
            raise LinkSilent(f"nothing came from the verifier for {self._patience:g} s")

    def over(self) -> bool:
        """Whether ``check`` would raise."""
        try:
            self.check()
        except (LinkError, DecodeCancelled):
            return True
        return False

    def slice(self, seconds: float) -> float:
        """How much of ``seconds`` to wait before the next ``check``."""
        if self._cancelled is not None:
            seconds = min(seconds, _POLL_S)
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        if self._patience is not None:
            seconds = min(seconds, self._heard + self._patience - time.monotonic())
        return max(0.0, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds``; raises what ``check`` raises."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(self.slice(left), _POLL_S))
        self.check()


class Connection:
    """A channel that is dialled, given up and dialled again. Any thread may send while one receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel  # the caller's to close
        self.up = False
        self.backoff = Backoff()
        self._waits = LogLimit()
        self._sending = threading.Lock()

    @property
    def doubt(self) -> str:
        """A sentence where something answers that does not hold the robot's token; else empty."""
        return str(getattr(self.channel, "doubt", ""))

    def dial(self) -> None:
        """Try once to connect, replacing a connection that may still seem to be up; LinkClosed or LinkRefused."""
        self.up = False
        self.channel.reconnect()
        self.up = True

    def pause(self, failure: Exception | None, limits: Limits) -> None:
        """Wait before the next attempt, as long as the backoff and ``failure`` say; raises limits."""
        seconds = self.backoff.next_delay(failure)
        if seconds >= _LONG_WAIT_S and self._waits.due():
            _log.warning("%s; the next attempt is in %.0f s", failure, seconds)
        limits.sleep(seconds)

    def failed(self, error: LinkError, failures: int, limits: Limits) -> None:
        """An exchange within ``limits`` failed after ``failures`` others in a row.

        A first silence may be a lost message. After a second the link may be dead without knowing it: dial again.
        """
        limits.overdue(error)
        if failures > 0 or not isinstance(error, LinkTimeout):
            self.up = False

    def send(self, message: Message) -> None:
        """Send from any thread; LinkClosed when the link is down."""
        with self._sending:
            self.channel.send(message)

    def post(self, message: Message) -> None:
        """Send from any thread if the link is up. A link found down is noted, not reported."""
        if not self.up:
            return
        try:
            self.send(message)
        except LinkError:
            self.up = False

    @property
    def busy(self) -> bool:
        """Whether the link still holds back what was sent before, as far as the transport can tell."""
        return bool(getattr(self.channel, "busy", False))

    def receive(self, until: float, limits: Limits) -> Message | None:
        """The next message; None if none comes until then (time.monotonic()). Raises LinkClosed and limits."""
        while True:
            limits.check()
            left = until - time.monotonic()
            if left <= 0:
                return None
            try:
                message = self.channel.receive(limits.slice(left))
            except LinkTimeout:
                continue
            limits.heard()
            return message
