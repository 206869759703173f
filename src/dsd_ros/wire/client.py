# SPDX-License-Identifier: Apache-2.0
"""What every client of a verifier does with its link: connect, wait within limits, back off and connect again.

``edge.client`` and ``dragon.client`` add their messages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from dsd_ros.logs import OnceAMinute
from dsd_ros.wire.channel import Backoff, Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import Message

_log = logging.getLogger(__name__)
_POLL_S = 0.05  # how soon a cancellation is noticed
_RECEIVE_S = 0.1  # how soon a receiving thread notices that it should end
_LONG_WAIT_S = 1.0  # a longer pause is logged


class LinkSilent(LinkError):
    """Nothing came from the verifier for as long as the caller has patience."""


class DeadlineExceeded(LinkError):
    """The reply was not complete at its deadline."""


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
    ) -> None:
        """Set any number of limits.

        :param deadline: a time.monotonic() instant.
        :param cancelled: polled; whether the caller gives up.
        :param patience: seconds of silence from the verifier after which the robot goes on without it.
        :param closed: whether the session has been closed, which is noticed as soon as the waiting thread is notified.
        :param what: what is waited for, as error sentences name it.
        """
        self._deadline, self._cancelled, self._patience = deadline, cancelled, patience
        self._closed, self._what = closed, what
        self._heard = time.monotonic()

    def heard(self) -> None:
        """The verifier has sent something, or has just been asked: its silence begins now."""
        self._heard = time.monotonic()

    def check(self) -> None:
        """Raise what ends the wait, if anything: LinkClosed, DecodeCancelled, DeadlineExceeded or LinkSilent."""
        if self._closed():
            raise LinkClosed("the session was closed")
        if self._cancelled is not None and self._cancelled():
            raise DecodeCancelled(f"the {self._what} was cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded(f"the {self._what} was not complete at its deadline")
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
        self._waits = OnceAMinute()
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

    def lost(self, error: LinkError) -> None:  # a subclass reports it
        """The link is down."""
        self.up = False

    def failed(self, error: LinkError, failures: int) -> None:
        """An exchange failed after ``failures`` others in a row.

        A first silence may be a lost message. After a second the link may be dead without knowing it: dial again.
        """
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
        except LinkError as error:
            self.lost(error)

    def poll(self, limits: Limits) -> Message | None:
        """A message that has come, or None. Raises LinkClosed and limits."""
        message = None
        with contextlib.suppress(LinkTimeout):
            message = self.channel.receive(0.0)
            limits.heard()
        limits.check()
        return message

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


class BackgroundConnection(Connection):
    """A connection with a thread of its own that dials and receives. A link that is down stays so until ``connect``."""

    def __init__(self, channel: Channel, on_message: Callable[[Message], None], changed: threading.Condition) -> None:
        """``on_message`` gets each message in that thread; ``changed`` is notified when the link goes up or down."""
        super().__init__(channel)
        self.failure: LinkError | None = None  # why the link is down, after ``connect``
        self._on_message, self._changed = on_message, changed
        self._dialling = self._closing = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def connect(self, limits: Limits) -> None:
        """Bring the link up if it is down, by one attempt. Raises LinkError and limits."""
        with self._changed:
            if self.up:
                return
            self.failure, self._dialling = None, True
            self._changed.notify_all()
            while not (self.up or self.failure or self._closing):
                self._changed.wait(_RECEIVE_S)
                limits.check()
            if self.failure is not None:
                raise self.failure
            if not self.up:
                raise LinkClosed("the session was closed")

    def lost(self, error: LinkError) -> None:
        with self._changed:
            if self.up:
                self.up, self.failure = False, error
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.up or self._dialling or self._closing)
                if self._closing:
                    return
                dial, self._dialling = self._dialling and not self.up, False
            if dial:
                self._dial()
                continue
            try:
                message = self.channel.receive(_RECEIVE_S)
            except LinkTimeout:
                continue
            except Exception as error:  # report it to the thread that waits for the link
                self.lost(_link_error(error))
                continue
            self._on_message(message)

    def _dial(self) -> None:
        failure: LinkError | None = None
        try:
            self.channel.reconnect()
        except Exception as error:
            failure = _link_error(error)
        with self._changed:
            self.up, self.failure = failure is None, failure
            self._changed.notify_all()


def _link_error(error: Exception) -> LinkError:
    return error if isinstance(error, LinkError) else LinkClosed(f"the link failed: {error}")
