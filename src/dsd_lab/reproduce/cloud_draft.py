# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding in the cloud alone (FSD, Figure 1b): draft and target at the verifier, the robot in mode ``ar``.

A target with a draft model beside it, for the product's own engine: where a robot lets the target decode alone, one
pass verifies what the draft model proposed, and the tokens gained leave one by one. It belongs to the laboratory: an
operator gets the same from an engine that speculates by itself (vLLM's ``--speculative-config``), without a protocol.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from dsd_ros.cloud.rounds import OnEarly, PendingRound, RoundRefused, Work
from dsd_ros.cloud.target import LocalTarget
from dsd_ros.decoding.coupling import choose, gumbel
from dsd_ros.decoding.sampling import transform
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence as TokenSequence
from dsd_ros.wire.messages import Outcome


@dataclass
class Bill:
    """What a provider could bill: passes and tokens of the target, and of a draft model beside it."""

    passes: int = 0  # rounds that the target verified
    positions: int = 0  # tokens that these passes read: drafted ones, and one more each
    cloud_drafted: int = 0  # by the draft model in the cloud
    seconds: float = 0.0  # in the draft model in the cloud


class BilledTarget(LocalTarget):
    """A target that counts what it verifies."""

    def __init__(self, model: VisionLanguageModel) -> None:
        super().__init__(model)
        self.bill = Bill()

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        for item in work:
            if isinstance(item, PendingRound):
                self.bill.passes += 1
                self.bill.positions += 1 + len(item.draft.tokens)
        yield from super().verify(work, on_early)


@dataclass
class _Reply:
    """The draft model's text of one reply, and tokens that are verified and have not left."""

    sequence: TokenSequence
    ready: list[int] = field(default_factory=list)
    last: Outcome | None = None


class CloudDraftTarget(BilledTarget):
    """A target that speculates by itself where a robot lets it decode alone; greedy, or with shared noise."""

    def __init__(self, model: VisionLanguageModel, draft: VisionLanguageModel, gamma: int = 4) -> None:
        """``gamma``: tokens drafted before each pass."""
        super().__init__(model)
        self._draft, self._gamma = draft, gamma
        self._replies: WeakKeyDictionary[TokenSequence, _Reply] = WeakKeyDictionary()

    def prefill(
        self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]
    ) -> TokenSequence:
        sequence = super().prefill(image, instruction, history)
        self._replies[sequence] = _Reply(self._draft.prefill(image, instruction, history))
        return sequence

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        given: dict[int, Work] = {}
        asked: list[Work] = []
        for item in work:
            reply = self._speculating(item)
            if reply is None:
                asked.append(item)
            elif reply.ready:
                assert isinstance(item, PendingRound)
                yield item, self._next(item, reply, None)
            else:
                assert isinstance(item, PendingRound)
                drafted = PendingRound(item.session, item.reply, self._proposed(item, reply))
                given[id(drafted)] = item
                asked.append(drafted)
        for item, result in super().verify(asked, on_early):
            own = given.get(id(item))
            if own is None or not isinstance(result, Outcome):
                yield own or item, result
                continue
            assert isinstance(own, PendingRound) and isinstance(item, PendingRound)
            reply = self._replies[_sequence(own)]
            reply.ready = [*item.draft.tokens[: result.accepted], result.next_token]
            yield own, self._next(own, reply, result)

    def _speculating(self, item: Work) -> _Reply | None:
        """The reply of a round that the target decodes alone; None for any other work."""
        if not isinstance(item, PendingRound) or item.draft.tokens:
            return None
        return self._replies.get(_sequence(item)) if item.session.streams else None

    def _proposed(self, item: PendingRound, reply: _Reply) -> object:
        """The round's draft with gamma tokens of the draft model."""
        began, session, sequence = time.perf_counter(), item.session, reply.sequence
        verified = list(_sequence(item).tokens)
        common = next((n for n, (a, b) in enumerate(zip(sequence.tokens, verified, strict=False)) if a != b), None)
        sequence.rollback(min(len(sequence.tokens), len(verified)) if common is None else common)
        sequence.append(verified[len(sequence.tokens) :])
        tokens: list[int] = []
        for position in range(len(verified), len(verified) + self._gamma):
            row = transform(sequence.next_logits(), session.sampling)
            noise = (
                None if session.sampling.greedy else gumbel(session.request.seed, item.draft.reply, position, len(row))
            )
            tokens.append(int(row.argmax()) if noise is None else choose(row, noise))
            if tokens[-1] in self._draft.eos_token_ids:
                break
            sequence.append([tokens[-1]])
        self.bill.cloud_drafted += len(tokens)
        self.bill.seconds += time.perf_counter() - began
        return msgspec.structs.replace(item.draft, tokens=tokens)

    def _next(self, item: PendingRound, reply: _Reply, passed: Outcome | None) -> Outcome:
        """The outcome that gives the reply's next token; ``passed``: that of the pass just over."""
        token, sequence, before = reply.ready.pop(0), _sequence(item), item.draft.confirmed
        sequence.rollback(before)
        sequence.append([token])
        reply.last = last = passed or reply.last
        assert last is not None
        spent = passed.compute_us if passed is not None else 0
        return msgspec.structs.replace(last, round=item.draft.round, accepted=0, next_token=token, compute_us=spent)


def _sequence(item: PendingRound) -> TokenSequence:
    sequence = item.reply.sequence
    assert isinstance(sequence, TokenSequence)
    return sequence
