# SPDX-License-Identifier: Apache-2.0
"""One reply of mode stream on its way: the verified tokens come down, drafted ones go up.

Tokens go by their position in the reply, so anything may be lost, doubled, reordered or sent again. After a lost link
or a silence the robot says how many tokens it has, and the same verifier, or any other, goes on from there.
"""

from __future__ import annotations

import contextlib
import logging
import time

import msgspec

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH
from dsd_ros.edge.client import SessionLost, VerifierClient, VerifierRefused
from dsd_ros.edge.drafters import common_length
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.wire.channel import LinkClosed, LinkError, LinkTimeout
from dsd_ros.wire.messages import DraftTokens, Message, Observation, Refusal, RefusalCode, VerifiedTokens

_log = logging.getLogger(__name__)
_POLL_S = 0.002  # how soon what the robot waits for besides is noticed: a link that is free, a draft that can begin


class ReplyStream:
    """The robot's end of one reply.

    Attributes: ``tokens``, the verified ones; ``ended``, whether the reply has all of its own.
    """

    def __init__(self, link: VerifierClient, pictures: SessionPictures, request: ReplyRequest, longest: int) -> None:
        """``longest``: tokens of a reply that does not end before."""
        self.tokens: list[int] = []
        self.ended = False
        self._link, self._pictures, self._request, self._longest = link, pictures, request, longest
        self._target = link.verifier
        self._sent: list[int] = []  # the drafted tokens after the verified ones that this stream has carried
        self._waiting = False  # whether drafted tokens wait for a busy link
        self._stream = 1
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

    def verified(self, wait: bool, briefly: bool = False) -> list[VerifiedTokens]:
        """Take what the target has decided meanwhile, pass by pass; ``wait`` for something if nothing is there, or
        only a moment (``briefly``).

        Each pass is cut to what is new of it. VerifierRefused, LinkError, DeadlineExceeded, DecodeCancelled;
        TargetChanged before there are tokens.
        """
        news: list[VerifiedTokens] = []
        while not self.ended:
            try:
                message = self._next(wait and not news, briefly)
            except (LinkClosed, LinkTimeout) as error:
                self._recover(error)
                continue
            if message is None:
                break
            if isinstance(message, Refusal):
                self._refused(message)
            elif isinstance(message, VerifiedTokens) and (new := self._new_of(message)) is not None:
                news.append(new)
        return news

    def draft(self, tokens: list[int]) -> None:
        """Send of the draft after the verified tokens what this stream has not carried, unless the link is busy."""
        held = common_length(self._sent, tokens)
        if held < len(self._sent):
            self._correct()
            held = 0
        self._waiting = False
        if held == len(tokens):
            return
        if self._link.busy:
            self._waiting = True
            return
        start = len(self.tokens) + held
        new = tokens[held : held + MAX_DRAFT_LENGTH]
        self._link.post(DraftTokens(self._link.session, self._request.number, self._stream, start, new))
        self._sent = tokens[: held + MAX_DRAFT_LENGTH]

    # ----------------------------------------------------------------------- what comes down

    def _next(self, wait: bool, briefly: bool) -> Message | None:
        """The next message; None if none has come. LinkTimeout after a silence, LinkClosed if the link is down."""
        link = self._link
        if not (link.up and link.session):
            raise self._cause
        if not wait:
            return link.poll(self._request.limits)
        until = self._heard + link.settings.response_timeout_s
        pause = time.monotonic() + _POLL_S if self._waiting or briefly else until
        message = link.receive(min(until, pause), self._request.limits)
        if message is None and time.monotonic() >= until:
            what = f"after token {len(self.tokens)} for {link.settings.response_timeout_s:g} s"
            raise LinkTimeout(f"the verifier sent nothing {what}")
        return message

    def _new_of(self, message: VerifiedTokens) -> VerifiedTokens | None:
        """What of a message is new, which the reply has from now on; None if nothing is."""
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
        self.tokens += new
        self.ended = bool(ends) or message.ended or len(self.tokens) >= self._longest
        if not new:
            return None
        if new[: len(self._sent)] != self._sent[: len(new)]:
            self._correct()
        else:
            self._sent = self._sent[len(new) :]
        return msgspec.structs.replace(message, at=known, tokens=new, accepted=max(0, message.accepted - skipped))

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
        self._correct()  # what was sent may be lost, too
        self._link.post(DraftTokens(self._link.session, self._request.number, self._stream, len(self.tokens)))

    def _send_observation(self, everything: bool) -> None:
        """Let a verifier that does not know the reply go on with it."""
        self._observed = self._stream
        self._correct()
        self._link.post(self._observation(everything))

    def _observation(self, everything: bool = False) -> Observation:
        request = self._request
        found = self._pictures.observation(self._link.session, request.number, request.instruction, everything)
        return msgspec.structs.replace(found, verified=list(self.tokens)) if self.tokens else found
