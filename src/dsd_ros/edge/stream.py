# SPDX-License-Identifier: Apache-2.0
"""Mode stream, the robot's half: draft all the time, and follow what the target decides meanwhile.

The target decodes by itself and never waits; a token that was drafted in time saves it a pass. So the reply is the
target's own, and no slower than without a draft.
"""

from __future__ import annotations

import threading
import time

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierClient
from dsd_ros.edge.drafters import Drafter, Worth
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.recorder import StreamRecorder
from dsd_ros.edge.reply_stream import ReplyStream
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
        self._prefill: _Prefill | None = None
        self._request: ReplyRequest | None = None  # the last

    def decode(self, request: ReplyRequest) -> DecodedReply:
        """See ``EdgeSession.decode``; TargetChanged if another target answers before anything is verified."""
        self._request, drafts = request, self._worth.begin()
        recorder = StreamRecorder(request, self._settings, self._link, self._drafter if drafts else None)
        reply = ReplyStream(self._link, self._pictures, request, self._settings.max_tokens)
        reply.begin()
        prefill = self._begin(request) if drafts else None  # both sides read the picture at the same time
        recorder.begun()
        while not reply.ended:
            drafter = prefill.drafter if prefill is not None else None  # None until it has read the prompt
            # 1. What the target has decided meanwhile; wait for it only when drafted far enough ahead.
            wait = drafter is None or drafter.far_enough
            for verified in reply.verified(wait, briefly=prefill is not None and drafter is None):
                recorder.passed(verified)
                if prefill is not None and not prefill.failed:
                    self._worth.learn(verified.accepted, len(verified.tokens))
            if drafter is not None and not reply.ended:
                drafter.follow(reply.tokens)  # 2. roll back to the first token on which both differ
                reply.draft(recorder.timed(drafter.next))  # 3. one token more, sent as it comes
        return recorder.reply(reply.tokens, prefill.seconds if prefill is not None else 0.0, self._worth.explain())

    def begin_again(self) -> Drafter:
        """The drafter, at the beginning of the reply that was decoded last."""
        assert self._drafter is not None and self._request is not None
        if self._prefill is not None:  # it may still read the prompt, and gives its memory back then
            self._prefill.join()
        self._drafter.begin(self._request, self._link.eos_token_ids)
        return self._drafter

    def reset(self) -> None:
        """Give back the memory of the reply."""
        if self._prefill is not None:
            self._prefill.give_up()

    close = reset

    def _begin(self, request: ReplyRequest) -> _Prefill | None:
        if self._drafter is None:
            return None
        self._prefill = _Prefill(self._drafter, request, self._link.eos_token_ids, self._prefill)
        self._prefill.start()
        return self._prefill


class _Prefill(threading.Thread):
    """Lets a drafter read the prompt of a reply, which may end before that has: a fast target needs no draft.

    ``seconds``: what it took; 0 while it is under way.
    """

    def __init__(
        self, drafter: Drafter, request: ReplyRequest, ends: frozenset[int], before: threading.Thread | None
    ) -> None:
        """``before``: the reply's before, which the drafter may still be reading."""
        super().__init__(name="draft prefill", daemon=True)
        self._drafter, self._request, self._ends, self._before = drafter, request, ends, before
        self._lock = threading.Lock()
        self._given_up = False
        self._error: Exception | None = None
        self._done = False
        self.seconds = 0.0

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        began = time.perf_counter()
        try:
            self._drafter.begin(self._request, self._ends)
        except Exception as error:
            self._error = error
        with self._lock:
            self.seconds, self._done = time.perf_counter() - began, True
            if self._given_up:
                self._drafter.close()

    @property
    def failed(self) -> bool:
        """Whether an engine has failed in this reply, which says nothing of what its drafts are worth."""
        return bool(self._drafter.error)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter once it can draft; raises what its ``begin`` raised."""
        done = self._done  # before the error, which is set before it
        if self._error is not None:
            raise self._error
        return self._drafter if done else None

    def give_up(self) -> None:
        """Nothing more is to be drafted of this reply."""
        with self._lock:
            self._given_up = True
            if self._done:
                self._drafter.close()
