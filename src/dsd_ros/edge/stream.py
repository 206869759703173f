# SPDX-License-Identifier: Apache-2.0
"""Mode stream, the robot's half: draft all the time, and follow what the target decides meanwhile.

The target decodes by itself and never waits; a token that was drafted in time saves it a pass. So the reply is the
target's own, and no slower than without a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierClient
from dsd_ros.edge.drafters import Drafter, Worth
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.recorder import StreamRecorder
from dsd_ros.edge.reply_stream import ReplyStream
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.results import DecodedReply


@dataclass(frozen=True)
class StreamDecoder:
    """Decodes replies over an open session; without a ``drafter`` the target decodes alone (mode ``ar``)."""

    link: VerifierClient
    pictures: SessionPictures
    drafter: Drafter | None
    settings: DecodeSettings
    worth: Worth

    def decode(self, request: ReplyRequest) -> DecodedReply:
        """See ``EdgeSession.decode``; TargetChanged if another target answers before anything is verified."""
        recorder = StreamRecorder(request, self.settings, self.link, self.drafter)
        reply = ReplyStream(self.link, self.pictures, request, self.settings.max_tokens)
        reply.begin()  # both sides read the picture at the same time
        drafter = self.drafter if self.worth.begin() else None
        if drafter is not None:
            drafter.begin(request, self.link.eos_token_ids)
        recorder.begun()
        while not reply.ended:
            # 1. What the target has decided meanwhile; wait for it only when drafted far enough ahead.
            for verified in reply.verified(wait=drafter is None or drafter.far_enough):
                recorder.passed(verified)
                if drafter is not None:
                    self.worth.learn(verified.accepted, len(verified.tokens))
            if drafter is not None and not reply.ended:
                drafter.follow(reply.tokens)  # 2. roll back to the first token on which both differ
                reply.draft(recorder.timed(drafter.next))  # 3. one token more, sent as it comes
        return recorder.reply(reply.tokens, self.worth.explain())

    def reset(self) -> None:
        """Give back the memory of the reply."""
        if self.drafter is not None:
            self.drafter.close()

    close = reset  # there are no threads
