# SPDX-License-Identifier: Apache-2.0
"""Turns the rounds of a reply into messages, and the verifier's outcomes into results."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from dsd_ros.decoding.methods import Method, Result, ResultError
from dsd_ros.edge.client import VerifierClient
from dsd_ros.edge.draft_model import RoundDraft
from dsd_ros.edge.observation import SessionPictures
from dsd_ros.edge.request import ReplyRequest
from dsd_ros.wire.messages import Draft, Message, Observation, Outcome, prefix_digest


class ReplyClient:
    """Sends a session's drafts, one reply at a time, and waits for their results.

    Attributes about the last round are for the recorder: ``send_began``, ``sent_at`` and ``received_at`` are
    time.perf_counter() instants, ``early`` holds the early outcomes with their seconds since ``sent_at``.
    """

    def __init__(self, link: VerifierClient, pictures: SessionPictures, method: Method) -> None:
        self._link = link
        self._pictures = pictures
        self._method = method
        self._request: ReplyRequest | None = None
        self._recovered: list[int] = []
        self._ahead: dict[int, RoundDraft] = {}  # rounds sent ahead, by number
        self._in_flight = False
        self._rounds = 0
        self.send_began = self.sent_at = self.received_at = 0.0
        self.early: list[tuple[Outcome, float]] = []
        self.outcome: Outcome | None = None

    @property
    def session(self) -> int:
        """The session's number."""
        return self._link.session

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a reply of the target."""
        return self._link.eos_token_ids

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received over the link so far."""
        return self._link.channel.bytes_up, self._link.channel.bytes_down

    def begin(self, request: ReplyRequest) -> None:
        """Send the observation of a reply."""
        self._request = request
        self._rounds, self._recovered = 0, []
        self._ahead.clear()
        self._link.begin_reply()
        self._link.post(self._observation())

    def send(self, draft: RoundDraft, recovered: Sequence[int]) -> None:
        """Send a round, unless it was sent ahead.

        ``recovered``: what the robot drew after the last round's rejection, which the verifier does not know yet.
        DecodeCancelled, DeadlineExceeded.
        """
        assert self._request is not None
        self._request.limits.check()
        self.send_began = time.perf_counter()
        self._recovered = list(recovered)
        self._in_flight = self._ahead.get(draft.number) is draft
        if not self._in_flight:
            self._link.post(self._message(draft, self._recovered))
        self.sent_at = time.perf_counter()

    def send_ahead(self, draft: RoundDraft) -> None:
        """Send a round before the previous outcome is known; from any thread."""
        self._ahead[draft.number] = draft
        self._link.post_ahead(self._message(draft, [], ahead=True))

    def wait(self, draft: RoundDraft, on_early: Callable[[Outcome], None]) -> Result:
        """The target's result for the round that was sent.

        VerifierRefused, LinkError, DeadlineExceeded, DecodeCancelled; TargetChanged in round 1; ResultError for a
        result that contradicts the draft.
        """
        request = self._request
        assert request is not None
        self.early = []

        def heard(outcome: Outcome) -> None:
            self.early.append((outcome, time.perf_counter() - self.sent_at))
            on_early(outcome)

        self.outcome = outcome = self._link.exchange(
            request.number,
            draft.number,
            lambda whole: self._again(draft, whole),
            request.limits,
            heard,
            self._in_flight,
        )
        self.received_at = time.perf_counter()
        self._rounds = draft.number
        self._pictures.arrived(self._link.session)
        if outcome.accepted > len(draft.tree):
            raise ResultError(
                f"the verifier accepted {outcome.accepted} of {len(draft.tree)} drafted tokens; "
                "it does not follow the protocol",
                "out-of-step",
            )
        assert self._link.verifier is not None
        size = self._link.verifier.vocab_size
        accepted = draft.tree.tokens
        if max(accepted, default=0) >= size:  # drafted, but perhaps rejected
            accepted = draft.tree.tokens_of(draft.tree.path_to(outcome.accepted - 1))
        highest = max(outcome.next_token, *accepted, 0)
        if highest >= size:
            raise ResultError(
                f"the verifier gave token {highest} and its target has {size} tokens; it does not follow the protocol",
                "out-of-step",
            )
        return Result(outcome.accepted, outcome.next_token, outcome.distribution, size)

    def end(self, tokens: list[int], recovered: Sequence[int]) -> None:
        """The reply is over: send the verifier the ``recovered`` tokens, since no further round will."""
        if recovered:
            assert self._request is not None
            self._link.post(
                Draft(self.session, self._request.number, self._rounds, len(tokens), [], resampled=list(recovered))
            )

    def reset(self) -> None:
        """Give back the memory of the reply."""
        self._request, self.outcome, self.early = None, None, []
        self._ahead.clear()

    def _again(self, draft: RoundDraft, whole: bool) -> list[Message]:
        """The messages to send again; ``whole``: the verifier knows nothing of the reply."""
        if not (whole or draft.number == 1):
            return [self._message(draft, self._recovered)]
        observation = self._observation(everything=whole or draft.number > 1)
        so_far = msgspec.structs.replace(observation, verified=list(draft.prefix), rounds=draft.number - 1)
        return [so_far, self._message(draft, [])]

    def _observation(self, everything: bool = False) -> Observation:
        request = self._request
        assert request is not None
        return self._pictures.observation(self.session, request.number, request.instruction, everything)

    def _message(self, draft: RoundDraft, recovered: list[int], ahead: bool = False) -> Draft:
        tree = draft.tree
        return Draft(
            session=self.session,
            reply=draft.context.reply,
            round=draft.number,
            confirmed=len(draft.prefix),
            tokens=list(tree.tokens),
            evidence=self._method.evidence(draft),
            parents=tree.parents_bytes() if tree.branches else b"",
            assumed=prefix_digest(draft.prefix) if ahead else b"",
            resampled=recovered,
        )
