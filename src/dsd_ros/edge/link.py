"""A session with the verifier over a link that may lose, double, reorder, stall or break.

Everything sent may be sent again: rounds are idempotent at the verifier, and what is late or doubled on
its way back is told by its numbers and dropped here.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsd_ros.edge.errors import DeadlineExceeded, DecodeCancelled, SessionLost, VerifierRefused
from dsd_ros.wire.channel import Backoff, Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import (
    Message,
    Outcome,
    Refusal,
    RefusalCode,
    SessionClose,
    SessionReply,
    SessionRequest,
)
from dsd_ros.wire.pictures import ENCODINGS

_POLL_S = 0.05  # how soon a cancellation is noticed
_HANDSHAKE_RETRY_S = 1.0


@dataclass(frozen=True)
class LinkSettings:
    """How patient the robot's half is with link and verifier; ValueError for a value out of place."""

    response_timeout_s: float = field(
        default=5.0,
        metadata={
            "help": "seconds of silence until a round is sent again",
            "min": 0.05,
            "max": 600.0,
        },
    )
    attempts: int = field(
        default=5,
        metadata={
            "help": "times a round is sent or a link is dialled before giving up",
            "min": 1,
            "max": 100,
        },
    )
    image_encoding: str = field(
        default="png",
        metadata={"help": "how pictures travel, both lossless", "choices": ENCODINGS},
    )

    def __post_init__(self) -> None:
        if not 0.05 <= self.response_timeout_s <= 600.0:
            raise ValueError(
                f"response_timeout_s is {self.response_timeout_s}; use 0.05 to 600 seconds"
            )
        if not 1 <= self.attempts <= 100:
            raise ValueError(f"attempts is {self.attempts}; use 1 to 100")
        if self.image_encoding not in ENCODINGS:
            raise ValueError(
                f"unknown image_encoding {self.image_encoding!r}; use one of {', '.join(ENCODINGS)}"
            )


class Limits:
    """When a decode has to end: at ``deadline`` (time.monotonic()), or once ``cancelled()`` says so."""

    def __init__(
        self, deadline: float | None = None, cancelled: Callable[[], bool] | None = None
    ) -> None:
        self._deadline = deadline
        self._cancelled = cancelled

    def check(self) -> None:
        """DecodeCancelled or DeadlineExceeded when it is time."""
        if self._cancelled is not None and self._cancelled():
            raise DecodeCancelled("the decode was cancelled")
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise DeadlineExceeded("the reply was not complete at its deadline")

    def slice(self, seconds: float) -> float:
        """How much of ``seconds`` may be waited before the next ``check``."""
        if self._cancelled is not None:
            seconds = min(seconds, _POLL_S)
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        return max(0.0, seconds)

    def sleep(self, seconds: float) -> None:
        """Wait, ending early (by raising) when it is time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(self.slice(left))
        self.check()


class VerifierLink:
    """One session at a time over one channel, opened, resumed and kept in step."""

    def __init__(
        self,
        channel: Channel,
        request: Callable[[int, bytes], SessionRequest],
        settings: LinkSettings,
    ) -> None:
        """``request(number, ticket)`` makes the request that opens or, with a ticket, resumes a session."""
        self.channel = channel
        self.settings = settings
        self.session = 0
        self._ticket = b""
        self.verifier: SessionReply | None = None
        self._request = request
        self._backoff = Backoff()
        self._up = False
        self._early: dict[tuple[int, int], Outcome] = {}
        self._refused: set[tuple[int, int]] = set()  # rounds that came to nothing before their turn
        self._sending = threading.Lock()  # rounds sent ahead come from other threads

    def open(self, limits: Limits) -> None:
        """Bring the link up and open or resume the session; SessionLost when it could not be resumed.

        LinkRefused, VerifierRefused, or the last LinkClosed or LinkTimeout after all attempts.
        """
        before = self.session
        failure: LinkError | None = None
        for attempt in range(self.settings.attempts):
            if attempt:
                limits.sleep(self._backoff.next_delay())
            try:
                if not self._up:
                    self.channel.reconnect()
                    self._up = True
                self._handshake(limits)
                self._backoff.reset()
                break
            except (LinkClosed, LinkTimeout) as error:
                self._up = False
                failure = error
        else:
            assert failure is not None
            raise failure
        if before and self.session != before:
            raise SessionLost

    def forget(self) -> None:
        """The verifier does not know the session any more: the next ``open`` begins a new one."""
        self.session, self._ticket = 0, b""
        self.begin_reply()

    def begin_reply(self) -> None:
        """Drop what came ahead of its turn for the reply before."""
        self._early.clear()
        self._refused.clear()

    def post(self, message: Message) -> None:
        """Send without waiting, from any thread. A link found down is not reported: ``exchange`` mends it."""
        if not self._up:
            return
        try:
            self._send(message)
        except LinkClosed:
            self._up = False

    def _send(self, message: Message) -> None:
        with self._sending:
            self.channel.send(message)

    def exchange(
        self,
        reply: int,
        number: int,
        again: list[Message],
        limits: Limits,
        on_early: Callable[[Outcome], None] | None = None,
        ahead: bool = False,
    ) -> Outcome:
        """Wait for the final outcome of round ``number`` of ``reply``, which has been posted.

        ``again`` is what is sent after silence, a broken link, or when the verifier lacks something;
        ``ahead``: the round was sent on an assumption that has come true. ``on_early`` is called with
        each early outcome of this round. Raises SessionLost, VerifierRefused, LinkError,
        DeadlineExceeded, DecodeCancelled.
        """
        if (early := self._early.pop((reply, number), None)) is not None:
            return early
        # What was said of a round sent ahead is nothing about one drafted after its outcome.
        refused = ahead and (reply, number) in self._refused
        to_send = again if refused or not self._up else []
        failures = 0
        failure: Exception | None = None
        while failures < self.settings.attempts:
            limits.check()
            try:
                if not self._up:
                    self.open(limits)
                for message in to_send:
                    self._send(message)
                return self._await_outcome(
                    reply, number, limits, on_early, ahead and to_send is not again
                )
            except LinkClosed as error:
                self._up = False
                failure = error
            except LinkTimeout as error:
                # The message may be lost, or the link dead without knowing it: next time dial anew.
                self._up = self._up and failures == 0
                failure = error
            except _SendAgain as error:
                if not error.at_once:
                    limits.sleep(self._backoff.next_delay())
                failure = error
            failures += 1
            to_send = again
        if isinstance(failure, LinkError):
            raise failure
        raise VerifierRefused(str(failure), RefusalCode.OVERLOADED)

    def close(self) -> None:
        """Tell the verifier that the session is over, if the link is up; the channel stays open."""
        if self.session:
            self.post(SessionClose(self.session))
        self.forget()

    def _handshake(self, limits: Limits) -> None:
        number = secrets.randbits(32)
        request = self._request(number, self._ticket)
        until = time.monotonic() + self.settings.response_timeout_s
        retry = 0.0
        while True:
            now = time.monotonic()
            if now >= until:
                raise LinkTimeout(
                    f"the verifier did not answer within {self.settings.response_timeout_s:g} s; "
                    "is one running at the other end?"
                )
            if now >= retry:  # doubled requests open one session
                self._send(request)
                retry = now + _HANDSHAKE_RETRY_S
            message = self._receive(min(until, retry), limits)
            if isinstance(message, SessionReply) and message.request == number:
                if message.error:
                    raise VerifierRefused(message.error, "session")
                self.session, self._ticket = message.session, message.ticket
                self.verifier = message
                return
            if isinstance(message, Refusal) and message.code == RefusalCode.MALFORMED:
                raise VerifierRefused(message.sentence, message.code)

    def _await_outcome(
        self,
        reply: int,
        number: int,
        limits: Limits,
        on_early: Callable[[Outcome], None] | None,
        ahead: bool,
    ) -> Outcome:
        until = time.monotonic() + self.settings.response_timeout_s
        while True:
            message = self._receive(until, limits)
            if message is None:
                raise LinkTimeout(
                    f"the verifier did not answer round {number} within "
                    f"{self.settings.response_timeout_s:g} s"
                )
            if isinstance(message, Refusal):
                self._heed(message, reply, number, ahead)
            elif isinstance(message, Outcome):
                if message.session != self.session or message.reply != reply:
                    continue
                if not message.is_final:
                    if on_early is not None and message.round == number:
                        on_early(message)
                    continue
                if message.round == number:
                    return message
                if message.round > number and len(self._early) < 4096:
                    self._early[reply, message.round] = message

    def _heed(self, refusal: Refusal, reply: int, number: int, ahead: bool) -> None:
        """Raise what a refusal means for the round waited for; return when it is about another."""
        if refusal.code == RefusalCode.MALFORMED:
            raise VerifierRefused(refusal.sentence, refusal.code)
        about_us = refusal.session == self.session and refusal.reply == reply
        if not about_us or refusal.round not in (0, number):
            if about_us and refusal.round > number and len(self._refused) < 4096:
                self._refused.add((reply, refusal.round))
            return
        if refusal.code == RefusalCode.ASSUMPTION_FAILED:
            if ahead:  # it overtook the round in front of it: the assumption holds
                raise _SendAgain(refusal.sentence, at_once=True)
            return  # of an assumption that was given up
        had_observation = number > 1
        if refusal.code == RefusalCode.UNKNOWN_SESSION or (
            refusal.code == RefusalCode.NO_OBSERVATION and had_observation
        ):
            self.forget()
            raise SessionLost
        if refusal.code in (RefusalCode.NO_OBSERVATION, RefusalCode.OVERLOADED):
            raise _SendAgain(refusal.sentence)
        raise VerifierRefused(refusal.sentence, refusal.code)

    def _receive(self, until: float, limits: Limits) -> Message | None:
        """The next message; None when there is none until then."""
        while True:
            limits.check()
            left = until - time.monotonic()
            if left <= 0:
                return None
            try:
                return self.channel.receive(limits.slice(left))
            except LinkTimeout:
                continue


class _SendAgain(Exception):
    """The verifier lacks something that sending again may bring."""

    def __init__(self, sentence: str, at_once: bool = False) -> None:
        super().__init__(sentence)
        self.at_once = at_once
