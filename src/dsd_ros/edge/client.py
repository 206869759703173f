# SPDX-License-Identifier: Apache-2.0
"""A session with the verifier over a link that may lose, duplicate, reorder, delay or break.

Anything may be sent again: rounds are idempotent at the verifier, and late or duplicate results are recognised by their
numbers and dropped here.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from dsd_ros.edge.settings import LinkSettings
from dsd_ros.limits import largest_vocabulary
from dsd_ros.wire.channel import Channel, LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.client import Connection, Limits
from dsd_ros.wire.messages import (
    MAX_VOCABULARY,
    Draft,
    Message,
    Outcome,
    Refusal,
    RefusalCode,
    SessionClose,
    SessionReply,
    SessionRequest,
)

_log = logging.getLogger(__name__)
_HANDSHAKE_RETRY_S = 1.0


class VerifierRefused(LinkError):
    """The verifier refuses to serve this; one sentence. ``code`` is a RefusalCode or "session"."""

    def __init__(self, sentence: str, code: str) -> None:
        super().__init__(sentence)
        self.code = code


class SessionLost(Exception):
    """The verifier has forgotten the session; the reply goes on in another. Not raised outside this room."""


class TargetChanged(Exception):
    """Another target answers before anything is verified; the reply starts over. Not raised outside this room."""


class VerifierClient(Connection):
    """One session at a time over one channel, opened, resumed and kept in step."""

    def __init__(
        self, channel: Channel, request: Callable[[int, bytes], SessionRequest], settings: LinkSettings
    ) -> None:
        """``request(number, ticket)`` makes the request that opens or, with a ticket, resumes a session."""
        super().__init__(channel)
        self.settings = settings
        self.session = 0
        self._ticket = b""
        self.verifier: SessionReply | None = None
        self._request = request
        self._early: dict[tuple[int, int], Outcome] = {}
        self._refused: set[tuple[int, int]] = set()  # rounds refused before their turn
        self._epoch = 0  # how often a session was opened or resumed
        self._flights: dict[tuple[int, int], int] = {}  # rounds sent ahead -> the epoch they were sent in

    def open(self, limits: Limits) -> None:
        """Bring the link up and open or resume the session; SessionLost if a new session replaced the old one.

        LinkRefused, VerifierRefused, or the last LinkClosed or LinkTimeout after all attempts.
        """
        before = self.session
        self._open(limits, self.settings.attempts)
        if before and self.session != before:
            self.begin_reply()
            raise SessionLost

    def reconnect(self, limits: Limits) -> None:
        """Dial again, once, and resume the session or open another; raises what ``open`` raises but SessionLost."""
        before, self.up = self.session, False
        self._open(limits, 1)
        if self.session != before:
            self.begin_reply()

    def _open(self, limits: Limits, attempts: int) -> None:
        failure: LinkError | None = None
        for attempt in range(attempts):
            if attempt:
                self.pause(failure, limits)
            try:
                if not self.up:
                    self.dial()
                self._handshake(limits)
                self._epoch += 1
                self.backoff.reset()
                return
            except (LinkClosed, LinkTimeout) as error:
                self.up = False
                limits.overdue(error)
                failure = error
        assert failure is not None
        raise failure

    def forget(self) -> None:
        """Forget the session: the next ``open`` begins a new one."""
        self.session, self._ticket = 0, b""
        self.begin_reply()

    def begin_reply(self) -> None:
        """Drop what arrived ahead of its turn for the previous reply."""
        self._early.clear()
        self._refused.clear()
        self._flights.clear()

    def post_ahead(self, draft: Draft) -> None:
        """``post`` a round drafted ahead. If it is lost with the link, ``exchange`` sends it again."""
        in_session = bool(draft.session) and draft.session == self.session
        self._flights[draft.reply, draft.round] = self._epoch if in_session and self.up else -1
        if in_session:
            self.post(draft)

    def exchange(
        self,
        reply: int,
        number: int,
        again: Callable[[bool], list[Message]],
        limits: Limits,
        on_early: Callable[[Outcome], None] | None = None,
        ahead: bool = False,
    ) -> Outcome:
        """Wait for the final outcome of round ``number`` of ``reply``, which has been posted.

        ``again(whole)`` makes the messages to send after silence, after a broken link, or when the verifier lacks
        something; ``whole``: it lacks the observation and everything verified for it. ``ahead``: the round was sent on
        an assumption that came true. ``on_early`` is called with each early outcome of this round. VerifierRefused,
        LinkError, DeadlineExceeded, DecodeCancelled; TargetChanged in round 1 if the verifier has another target now.
        """
        if (early := self._early.pop((reply, number), None)) is not None:
            return early
        # A refusal of a round sent ahead does not concern one drafted after the outcome.
        refused = ahead and (reply, number) in self._refused
        lost = ahead and self._flights.get((reply, number), self._epoch) != self._epoch
        resend = refused or lost
        whole = False
        target = self.verifier
        failures = 0
        failure: Exception | None = None
        limits.heard()
        while failures < self.settings.attempts:
            limits.check()
            try:
                if not (self.up and self.session):
                    resend = True
                    self.open(limits)
                self.check_same(target, begun=number > 1)
                if resend:
                    for message in again(whole):
                        self.send(message)
                return self._await_outcome(reply, number, limits, on_early, ahead and not resend)
            except SessionLost:
                whole = True
                failure = LinkClosed("the verifier keeps forgetting the session; is it being restarted?")
            except (LinkClosed, LinkTimeout) as error:
                self.failed(error, failures, limits)
                failure = error
            except _SendAgain as error:
                if not error.at_once:
                    self.pause(error, limits)
                whole = whole or error.whole
                failure = error
            failures, resend = failures + 1, True
            where = {"session": self.session, "reply": reply, "round": number, "attempt": failures}
            _log.info("round to be sent again", extra=where)
        if isinstance(failure, LinkError):
            raise failure
        raise VerifierRefused(str(failure), RefusalCode.OVERLOADED)

    def close(self) -> None:
        """Tell the verifier that the session is over, if the link is up; the channel stays open."""
        if self.session:
            self.post(SessionClose(self.session))
        self.forget()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a reply of the target."""
        assert self.verifier is not None
        return frozenset(self.verifier.eos_token_ids)

    def check_same(self, before: SessionReply | None, begun: bool) -> None:
        """Raise unless the verifier still has the same target: no other can go on with a reply that has begun.

        VerifierRefused; TargetChanged for a reply that has not.
        """
        now = self.verifier
        if before is None or now is None or before.target_fingerprint == now.target_fingerprint:
            return
        if not begun:
            raise TargetChanged
        raise VerifierRefused(
            f"the verifier came back with the target {now.target_name}, which cannot go on with a reply of "
            f"{before.target_name}; decode again",
            "other-target",
        )

    def _handshake(self, limits: Limits) -> None:
        number = secrets.randbits(32)
        request = self._request(number, self._ticket)
        until = time.monotonic() + self.settings.response_timeout_s
        retry = 0.0
        while True:
            now = time.monotonic()
            if now >= until:
                raise LinkTimeout(
                    self.doubt
                    or f"the verifier did not answer within {self.settings.response_timeout_s:g} s; "
                    "is one running at the other end?"
                )
            if now >= retry:  # doubled requests open one session
                self.send(request)
                retry = now + _HANDSHAKE_RETRY_S
            message = self.receive(min(until, retry), limits)
            if isinstance(message, SessionReply) and message.request == number:
                if message.error:
                    raise VerifierRefused(message.error, "session")
                most = largest_vocabulary(request.vocab_size) if request.vocab_size else MAX_VOCABULARY
                if not 1 <= message.vocab_size <= most:
                    raise VerifierRefused(
                        f"the verifier's target has a vocabulary of {message.vocab_size}, and this robot's model "
                        f"allows 1 to {most}; use a target and a draft that share a tokenizer",
                        "session",
                    )
                how = "resumed" if message.session == self.session else "opened"
                _log.info("session %s", how, extra={"session": message.session})
                self.session, self._ticket = message.session, message.ticket
                self.verifier = message
                return
            if isinstance(message, Refusal) and message.code == RefusalCode.MALFORMED:
                raise VerifierRefused(message.sentence, message.code)

    def _await_outcome(
        self, reply: int, number: int, limits: Limits, on_early: Callable[[Outcome], None] | None, ahead: bool
    ) -> Outcome:
        until = time.monotonic() + self.settings.response_timeout_s
        while True:
            message = self.receive(until, limits)
            if message is None:
                raise LinkTimeout(
                    f"the verifier did not answer round {number} within {self.settings.response_timeout_s:g} s"
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
        """Raise what a refusal means for this round; return if it is about another."""
        if refusal.code == RefusalCode.MALFORMED:
            raise VerifierRefused(refusal.sentence, refusal.code)
        about_us = refusal.session == self.session and refusal.reply == reply
        if about_us and refusal.code == RefusalCode.UNKNOWN_SESSION and (refusal.round == 0 or refusal.round >= number):
            self.forget()
            raise SessionLost
        if not about_us or refusal.round not in (0, number):
            if about_us and refusal.round > number and len(self._refused) < 4096:
                self._refused.add((reply, refusal.round))
            return
        if refusal.code == RefusalCode.ASSUMPTION_FAILED:
            if ahead:  # the round overtook the one before it; its assumption is right
                raise _SendAgain(refusal.sentence, at_once=True)
            return  # about an assumption that was dropped
        if refusal.code == RefusalCode.UNKNOWN_PICTURE:
            if number > 1:  # a late duplicate: the observation has been read since
                return
            raise _SendAgain(refusal.sentence, at_once=True, whole=True)
        if refusal.code == RefusalCode.NO_OBSERVATION:
            # After round 1 nothing is on its way: the verifier has dropped it to make room.
            raise _SendAgain(refusal.sentence, at_once=number > 1, whole=True)
        if refusal.code == RefusalCode.OVERLOADED:
            raise _SendAgain(refusal.sentence)
        raise VerifierRefused(refusal.sentence, refusal.code)


class _SendAgain(Exception):
    """The verifier lacks something that sending again may supply."""

    def __init__(self, sentence: str, at_once: bool = False, whole: bool = False) -> None:
        super().__init__(sentence)
        self.at_once = at_once
        self.whole = whole  # even the observation
