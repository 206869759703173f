# SPDX-License-Identifier: Apache-2.0
"""One reply of mode stream on its way: the verified tokens come down, drafted ones go up.

Tokens go by their position in the reply, so anything may be lost, doubled, reordered or sent again. After a lost link
or a silence the robot says how many tokens it has, and the same verifier, or any other, goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.client import SessionLost, VerifierClient, VerifierRefused
from dsd_ros.edge.drafters import common_length
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import DraftTokens, Message, Observation, Refusal, RefusalCode, VerifiedTokens

_log = logging.getLogger(__name__)
_POLL_S = 0.002  # how soon a link that was busy is tried again


class ReplyStream:
    """The robot's end of one reply: one thread takes what the target decides, another may send drafts.

    Attributes: ``tokens``, the verified ones; ``ended``, whether the reply has all of its own.
    """

    def __init__(self, link: VerifierClient, pictures: SessionPictures, request: ReplyRequest, longest: int) -> None:
        """``longest``: tokens of a reply that does not end before."""
        self.tokens: list[int] = []
        self.ended = False
        self._link, self._pictures, self._request, self._longest = link, pictures, request, longest
        self._target = link.verifier
        self._news = threading.Condition()  # guards what both threads use: tokens, _sent, _stream, _closed
        self._sent: list[int] = []  # the drafted tokens after the verified ones that this stream has carried
        self._stream = 1
        self._closed = False
        self._observed = 0  # the stream at which the observation was sent last
        self._asked = -1  # how many tokens there were when the robot last asked for those after them
        self._failures = 0
        self._cause: LinkError = LinkClosed("the link is down")  # why it was not up again
        self._heard = time.monotonic()

    def begin(self) -> None:
        """Send the observation: the target begins with it."""
        self._link.post(self._observation())
        self._heard = time.monotonic()
        self._request.limits.heard()

    def verified(self) -> tuple[VerifiedTokens, list[int]] | None:
        """Wait for what the target decides next: what is new of a pass, and the drafted tokens that it did not take.

        None if the reply ends without more. VerifierRefused, LinkError, DeadlineExceeded, DecodeCancelled;
        TargetChanged before there are tokens.
        """
        while not self.ended:
            try:
                message = self._next()
            except (LinkClosed, LinkTimeout) as error:
                self._recover(error)
                continue
            if isinstance(message, Refusal):
                self._refused(message)
            elif isinstance(message, VerifiedTokens) and (new := self._new_of(message)) is not None:
                return new
        return None

    def draft(self, verified: Sequence[int], drafted: Sequence[int]) -> bool:
        """Send of what was drafted after ``verified`` what this stream has not carried; False if the link can't now.

        More may be verified by now; a draft that does not go on from there is not sent.
        """
        with self._news:
            tokens = rest_of(drafted, self.tokens[len(verified) :])
            if not tokens or self.ended:
                return True
            held = common_length(self._sent, tokens)
            if held < len(self._sent):
                self._correct()
                held = 0
            if held == len(tokens):
                return True
            session = self._link.session
            if not (self._link.up and session) or self._link.busy:
                return False
            start = len(self.tokens) + held
            new = tokens[held : held + MAX_DRAFT_LENGTH]
            self._link.post(DraftTokens(session, self._request.number, self._stream, start, new))
            self._sent = tokens[: held + MAX_DRAFT_LENGTH]
            return True

    def wait_beyond(self, count: int, again: bool) -> list[int] | None:
        """The verified tokens, as soon as they are more than ``count``, or after a moment, to send ``again``.

        None when the stream is closed.
        """
        with self._news:
            self._news.wait_for(lambda: self._closed or len(self.tokens) > count, _POLL_S if again else None)
            return None if self._closed else list(self.tokens)

    def close(self) -> None:
        """Nothing more is to be drafted."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    # ----------------------------------------------------------------------- what comes down

    def _next(self) -> Message:
        """The next message. LinkTimeout after a silence, LinkClosed if the link is down."""
        link = self._link
        if not (link.up and link.session):
            raise self._cause
        message = link.receive(self._heard + link.settings.response_timeout_s, self._request.limits)
        if message is None:
            what = f"after token {len(self.tokens)} for {link.settings.response_timeout_s:g} s"
            raise LinkTimeout(f"the verifier sent nothing {what}")
        return message

    def _new_of(self, message: VerifiedTokens) -> tuple[VerifiedTokens, list[int]] | None:
        """What of a message is new, which the reply has from now on, and what it rejects; None if nothing is new."""
        if message.session != self._link.session or message.reply != self._request.number:
            return None
        known = len(self.tokens)
        if message.at > known:  # what comes before was lost, or is late
            self._ask()
            return None
        skipped = known - message.at
        held, new = message.tokens[:skipped], message.tokens[skipped:]
        verifier = self._link.verifier
        assert verifier is not None
        ends = [place for place, token in enumerate(new, 1) if token in verifier.eos_token_ids]
        sound = held == self.tokens[message.at : message.at + len(held)] and known + len(new) <= self._longest
        sound = sound and message.accepted <= min(message.drafted, len(message.tokens))
        if not sound or max(new, default=0) >= verifier.vocab_size or (ends and ends[0] < len(new)):
            raise VerifierRefused(
                f"the verifier sent tokens that cannot follow the reply's {known}; it does not follow the protocol",
                RefusalCode.OUT_OF_STEP,
            )
        if new:
            self._heard, self._failures = time.monotonic(), 0
        self._pictures.arrived(self._link.session)
        self.ended = bool(ends) or message.ended or known + len(new) >= self._longest
        if not new:
            return None
        accepted = max(0, message.accepted - skipped)
        with self._news:
            rejected = self._sent[accepted : max(0, message.drafted - skipped)]
            self.tokens += new
            if new[: len(self._sent)] != self._sent[: len(new)]:
                self._correct()
            else:
                self._sent = self._sent[len(new) :]
            self._news.notify_all()
        return msgspec.structs.replace(message, at=known, tokens=new, accepted=accepted), rejected

    def _correct(self) -> None:
        """What was sent no longer holds: the next draft begins a new stream."""
        self._stream += 1
        self._sent = []

    # ------------------------------------------------------------------------- what goes wrong

    def _refused(self, refusal: Refusal) -> None:
        """Act on a refusal, or return if it is about something else."""
        if refusal.code == RefusalCode.MALFORMED:
            raise VerifierRefused(refusal.sentence, refusal.code)
        if refusal.session != self._link.session or refusal.reply != self._request.number:
            return
        match refusal.code:
            case RefusalCode.UNKNOWN_SESSION:
                self._link.forget()
                self._recover(LinkClosed("the verifier keeps forgetting the session; is it being restarted?"))
            case RefusalCode.NO_OBSERVATION | RefusalCode.UNKNOWN_PICTURE:
                if refusal.round > self._observed or (refusal.round == 0 and not self.tokens):
                    self._failed(VerifierRefused(refusal.sentence, refusal.code))
                    self._send_observation(everything=True)
            case RefusalCode.OVERLOADED:
                self._failed(VerifierRefused(refusal.sentence, refusal.code))
                self._link.pause(None, self._request.limits)
                self._ask(again=True)
            case _:
                raise VerifierRefused(refusal.sentence, refusal.code)

    def _recover(self, why: LinkClosed | LinkTimeout) -> None:
        """After a silence or a lost link: ask again, over a new link or in a new session if need be."""
        self._link.failed(why, self._failures, self._request.limits)
        self._failed(why)
        where = {"session": self._link.session, "reply": self._request.number, "attempt": self._failures}
        _log.info("the reply goes on after a silence or a lost link", extra=where)
        self._heard = time.monotonic()
        if self._link.up and self._link.session:
            self._ask(again=True)
            return
        session = self._link.session
        try:
            with contextlib.suppress(SessionLost):
                self._link.open(self._request.limits)
        except (LinkClosed, LinkTimeout) as error:
            self._cause = error
            return
        self._link.check_same(self._target, begun=bool(self.tokens))
        self._heard = time.monotonic()
        if self._link.session == session:
            self._ask(again=True)
        else:
            self._send_observation(everything=True)

    def _failed(self, error: LinkError) -> None:
        self._failures += 1
        if self._failures > self._link.settings.attempts:
            raise error

    def _ask(self, again: bool = False) -> None:
        """Ask for the tokens after those there are, once for each number of them, or ``again``."""
        if self._asked == len(self.tokens) and not again:
            return
        self._asked = len(self.tokens)
        with self._news:
            self._correct()  # what was sent may be lost, too
            self._link.post(DraftTokens(self._link.session, self._request.number, self._stream, len(self.tokens)))

    def _send_observation(self, everything: bool) -> None:
        """Let a verifier that does not know the reply go on with it."""
        with self._news:
            self._observed = self._stream
            self._correct()
        self._link.post(self._observation(everything))

    def _observation(self, everything: bool = False) -> Observation:
        request = self._request
        found = self._pictures.observation(self._link.session, request.number, request.instruction, everything)
        return msgspec.structs.replace(found, verified=list(self.tokens)) if self.tokens else found


def rest_of(drafted: Sequence[int], verified: Sequence[int]) -> list[int]:
    """What a draft says after tokens that have been verified since; nothing if it said others."""
    return list(drafted[len(verified) :]) if common_length(drafted, verified) == len(verified) else []
