# SPDX-License-Identifier: Apache-2.0
"""Decoding in rounds: draft, have the draft verified, keep what is accepted, until the reply ends."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.decoding.methods import Method, Result, ResultError
from dsd_ros.decoding.settings import DecodeSettings
from dsd_ros.edge.client import VerifierRefused
from dsd_ros.edge.draft_model import Proposer, RoundDraft
from dsd_ros.edge.recorder import Recorder
from dsd_ros.edge.reply_client import ReplyClient
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.edge.results import DecodedReply


class GrowingReply:
    """The verified tokens of one reply, up to the token that ends it."""

    def __init__(self, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.ended = False  # by one of its end tokens
        # The last of ``tokens``, if the robot drew them itself, so that the verifier does not know them yet.
        self.recovered: list[int] = []
        self._max_tokens = max_tokens
        self._eos = eos_token_ids

    @property
    def finished(self) -> bool:
        """Whether it has ended or reached its longest length."""
        return self.ended or len(self.tokens) >= self._max_tokens

    def extend(self, draft: RoundDraft, result: Result) -> None:
        """Add a round's accepted tokens and the token that follows them, up to the reply's end."""
        tree = draft.tree
        gained = [*tree.tokens_of(tree.path_to(result.accepted - 1)), result.next_token]
        end = next((count for count, token in enumerate(gained, 1) if token in self._eos), None)
        self.ended = end is not None
        self.recovered = gained[len(gained) - len(result.recovered) : end]
        self.tokens += gained[:end]


@dataclass(frozen=True)
class DecodeLoop:
    """Decodes replies over an open session, drafted in turn or ahead, with any method."""

    proposer: Proposer
    client: ReplyClient
    method: Method
    settings: DecodeSettings

    def decode(self, request: ReplyRequest) -> DecodedReply:
        """See ``EdgeSession.decode``; TargetChanged if another target answers before anything is verified."""
        client, proposer = self.client, self.proposer
        recorder = Recorder(request, self.settings, proposer, client)
        # Both sides read the picture at the same time.
        client.begin(request)
        proposer.begin(request, client.eos_token_ids)
        recorder.begun()
        reply = GrowingReply(self.settings.max_tokens, client.eos_token_ids)
        try:
            self._run(reply, recorder)
        except ResultError as error:
            raise VerifierRefused(str(error), error.code) from error
        client.end(reply.tokens, reply.recovered)
        return recorder.reply(reply.tokens, reply.ended)

    def _run(self, reply: GrowingReply, recorder: Recorder) -> None:
        proposer, client, method = self.proposer, self.client, self.method
        while not reply.finished:
            draft = proposer.propose()  # 1. draft gamma tokens, or take those drafted ahead
            client.send(draft, reply.recovered)  # 2. they travel with their evidence
            proposer.draft_ahead(draft)  # 3. the target verifies; meanwhile the proposer drafts ahead
            result = client.wait(draft, on_early=proposer.on_early)
            result = method.finish(draft, result)  # 4. DSSD: the robot draws what follows a rejection
            reply.extend(draft, result)
            proposer.update(draft, result)
            recorder.round_ended(draft, result, reply.tokens)

    def reset(self) -> None:
        """Give back the memory of the reply."""
        self.proposer.reset()
        self.client.reset()

    def close(self) -> None:
        """End worker threads."""
        self.proposer.close()
