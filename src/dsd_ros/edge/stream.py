# SPDX-License-Identifier: Apache-2.0
"""Mode stream, the robot's half: draft all the time, and follow what the target decides meanwhile.

The target decodes by itself and never waits; a token that was drafted in time saves it a pass. So the reply is the
target's own, and no slower than without a draft.
"""

from __future__ import annotations

import threading
import time

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierClient, VerifierRefused
from dsd_ros.edge.drafters import Drafter, Worth
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.recorder import StreamRecorder
from dsd_ros.edge.reply_stream import ReplyStream, rest_of
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.results import DecodedReply


class StreamDecoder:
    """Decodes replies over an open session; without a ``drafter`` the target decodes alone (mode ``ar``)."""

    def __init__(
        self,
        link: VerifierClient,
        pictures: SessionPictures,
        drafter: Drafter | None,
        settings: DecodeSettings,
        worth: Worth,
    ) -> None:
        self._link, self._pictures, self._drafter = link, pictures, drafter
        self._settings, self._worth = settings, worth
        self._drafting: _Drafting | None = None
        self._request: ReplyRequest | None = None  # the last

    def decode(self, request: ReplyRequest) -> DecodedReply:
        """See ``EdgeSession.decode``; TargetChanged if another target answers before anything is verified."""
        self._request, drafts = request, self._worth.begin()
        recorder = StreamRecorder(request, self._settings, self._link, self._drafter if drafts else None)
        reply = ReplyStream(self._link, self._pictures, request, self._settings.max_tokens)
        reply.begin()
        drafting = None
        if drafts and self._drafter is not None:  # both sides read the picture at the same time
            ends = self._link.eos_token_ids
            drafting = self._drafting = _Drafting(self._drafter, request, ends, reply, recorder, self._drafting)
            drafting.start()
        recorder.begun()
        while not reply.ended:
            try:
                news = reply.verified()
            except VerifierRefused:
                if drafting is not None and (error := drafting.ended()) is not None:
                    raise error from None  # of the same input, and in the robot's own words
                raise
            if news is not None:
                recorder.passed(*news)
            if drafting is None:
                continue
            if drafting.error is not None:
                raise drafting.error
            if news is not None and not drafting.failed:
                self._worth.learn(news[0].accepted, len(news[0].tokens))
        return recorder.reply(reply.tokens, drafting.seconds if drafting is not None else 0.0, self._worth.explain())

    def begin_again(self) -> Drafter:
        """The drafter, at the beginning of the reply that was decoded last."""
        assert self._drafter is not None and self._request is not None
        if self._drafting is not None:
            self._drafting.join()
        self._drafter.begin(self._request, self._link.eos_token_ids)
        return self._drafter

    def reset(self) -> None:
        """Draft no more of the reply, and give back its memory."""
        if self._drafting is not None:
            self._drafting.reply.close()

    close = reset


class _Drafting(threading.Thread):
    """Drafts one reply until its stream is closed, and never holds up the thread that takes verified tokens.

    A fast target may end a reply before the drafter has read its prompt. Attributes: ``seconds``, what that took, 0
    until then; ``error``, what has ended the drafting.
    """

    def __init__(
        self,
        drafter: Drafter,
        request: ReplyRequest,
        ends: frozenset[int],
        reply: ReplyStream,
        recorder: StreamRecorder,
        before: threading.Thread | None,
    ) -> None:
        """``before``: the reply's before, which the drafter may still be at."""
        super().__init__(name="drafting", daemon=True)
        self.reply = reply
        self.seconds = 0.0
        self.error: Exception | None = None
        self._drafter, self._request, self._ends, self._before = drafter, request, ends, before
        self._recorder = recorder

    @property
    def failed(self) -> bool:
        """Whether an engine has failed in this reply, which says nothing of what its drafts are worth."""
        return bool(self._drafter.error)

    def ended(self) -> Exception | None:
        """Draft no more, wait for what is under way, and say what went wrong."""
        self.reply.close()
        self.join()
        return self.error

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        began = time.perf_counter()
        try:
            self._drafter.begin(self._request, self._ends)
            self.seconds = time.perf_counter() - began
            self._draft()
        except Exception as error:
            self.error = error
        self._drafter.close()

    def _draft(self) -> None:
        drafter, reply = self._drafter, self.reply
        tokens: list[int] = []  # verified
        drafted: list[int] = []  # after them
        wait, sent = -1, True
        while (now := reply.wait_beyond(wait, again=not sent)) is not None:
            drafted, tokens = rest_of(drafted, now[len(tokens) :]), now
            drafter.follow(tokens)  # roll back to the first token on which both differ
            if not drafter.far_enough:
                began, before = time.perf_counter(), len(drafted)
                drafted = drafter.next()
                self._recorder.drafted(len(drafted) - before, time.perf_counter() - began)
            sent = reply.draft(tokens, drafted)  # one token more, sent as it comes
            wait = len(tokens) if drafter.far_enough else -1
