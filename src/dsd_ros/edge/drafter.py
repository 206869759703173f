"""Drafting: a few tokens ahead of what is verified, from the robot's own small model.

What a round's draft is depends on the tokens in front of it and on the number of its round alone, so it
may be made by whoever, at any time: before its outcome is known, or after.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from dsd_ros.decoding.coupling import gumbel, scores
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample, transform
from dsd_ros.decoding.truncation import restored, truncate
from dsd_ros.vlm.errors import ContextError
from dsd_ros.vlm.sequence import Sequence


@dataclass(frozen=True)
class Drafting:
    """What holds for all drafts of one reply.

    ``eos_token_ids`` are the target's: nothing is drafted behind the end of a reply.
    """

    draft_length: int
    max_tokens: int
    sampling: SamplingSettings
    eos_token_ids: frozenset[int]
    seed: int
    reply: int
    proof: Proof = Proof.FULL
    top_k_proof: int = 0
    top_rho_proof: float = 0.0
    top_float_proof: str = "float16"

    @property
    def coupled(self) -> bool:
        """Whether tokens are drawn with the noise that the verifier shares."""
        return self.proof is Proof.COUPLED and not self.sampling.greedy

    def ranking(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """What ranks the tokens at a position of the reply (from 0), (V,): the logits themselves, or
        log q + G when coupled, whose draft is the argmax of these as if it were greedy.
        """
        if not self.coupled:
            return logits
        q = transform(logits, self.sampling)
        noise = gumbel(self.seed, self.reply, position, len(q))
        return torch.from_numpy(scores(q, noise))


class GrowingDraft:
    """One round's draft, grown token by token on ``sequence``; for one thread at a time.

    ``able`` is False once the draft model cannot go on: its context is full, or it lacks a token.
    ``rows`` are the ``Drafting.ranking`` (V,) that each token was chosen by.
    """

    def __init__(
        self, sequence: Sequence, length: int, drafting: Drafting, number: int, able: bool = True
    ) -> None:
        self.sequence = sequence
        self.length = length
        self.able = able
        self.tokens: list[int] = []
        self.rows: list[torch.Tensor] = []
        self.seconds = 0.0  # in the draft model
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # of proof TRUNCATED: ids and weights
        self._q: list[torch.Tensor] = []
        self._drafting = drafting
        self._generator: np.random.Generator | None = None
        if not (drafting.sampling.greedy or drafting.coupled):
            self._generator = generator_for("draft", drafting.seed, drafting.reply, number)

    @property
    def complete(self) -> bool:
        """Whether nothing is to be added."""
        if not self.able or len(self.tokens) >= self.length:
            return True
        return bool(self.tokens) and self.tokens[-1] in self._drafting.eos_token_ids

    @property
    def q(self) -> list[torch.Tensor]:
        """The distributions (V,) float32 the tokens were drawn from; none when greedy or coupled."""
        return self._q

    def finish(self) -> None:
        """Add all that is missing."""
        began = time.perf_counter()
        while not self.complete:
            try:
                logits = self.sequence.next_logits()
            except ContextError:
                self.able = False  # the target may hold more: it goes on without drafts
                break
            self.take(logits)
        self.seconds += time.perf_counter() - began

    def take(self, logits: torch.Tensor) -> None:
        """Add the token that the sequence's ``logits`` (V,) give."""
        drafting = self._drafting
        row = drafting.ranking(logits, len(self.sequence.tokens))
        if drafting.coupled:
            token = int(row.argmax())
        elif self._generator is None:
            # Greedy needs no draw, and its q is known to the verifier: one at the drafted token.
            token = int(transform(logits, drafting.sampling).argmax())
        else:
            q = transform(logits, drafting.sampling)
            if drafting.proof is Proof.TRUNCATED:
                # Before the draw: what is verified has to be what it was drawn from.
                kept = truncate(
                    q, drafting.top_k_proof, drafting.top_rho_proof, drafting.top_float_proof
                )
                q = restored(*kept, len(q))
                self.kept.append(kept)
            token = sample(q, self._generator)
            self._q.append(q)
        self.sequence.append([token])
        self.tokens.append(token)
        self.rows.append(row)


@dataclass(frozen=True, eq=False)
class DraftedRound:
    """A round with its draft behind ``prefix``, all tokens of the reply in front of it.

    While others may fork the draft's sequence it is not to be changed.
    """

    drafting: Drafting
    number: int
    prefix: list[int]
    draft: GrowingDraft

    @classmethod
    def first(cls, drafting: Drafting, sequence: Sequence) -> DraftedRound:
        """Round 1, its draft yet to be grown."""
        length = min(drafting.draft_length, drafting.max_tokens - 1)
        return cls(drafting, 1, [], GrowingDraft(sequence, length, drafting, 1))

    @property
    def goes_on(self) -> bool:
        """Whether there is anything to draft behind the whole draft."""
        return self.draft.able and not (
            self.drafting.eos_token_ids.intersection(self.draft.tokens)
            or len(self.prefix) + len(self.draft.tokens) + 2 >= self.drafting.max_tokens
        )

    def tokens_of(self, accepted: int, next_token: int) -> tuple[int, ...]:
        """What an outcome adds to the reply."""
        return (*self.draft.tokens[:accepted], next_token)

    def drafts_behind(self, accepted: int, next_token: int) -> bool:
        """Whether there is anything to draft behind an outcome."""
        gained = self.tokens_of(accepted, next_token)
        return (
            self.draft.able
            and 0 <= accepted <= len(self.draft.tokens)
            and next_token < self.draft.sequence.model.vocab_size
            and not self.drafting.eos_token_ids.intersection(gained)
            and len(self.prefix) + len(gained) < self.drafting.max_tokens - 1
        )

    def next_draft(self, accepted: int, next_token: int, fork: bool) -> GrowingDraft:
        """The draft of the next round behind an outcome, to be grown; ``fork`` leaves this round as it is."""
        drafting, draft = self.drafting, self.draft
        # One token of the round is always the target's own.
        left = drafting.max_tokens - len(self.prefix) - accepted - 1
        length = max(0, min(drafting.draft_length, left - 1))
        # A token only the target has: nothing can be drafted behind it.
        able = draft.able and next_token < draft.sequence.model.vocab_size
        sequence = draft.sequence
        if able:
            sequence = sequence.fork() if fork else sequence
            sequence.rollback(len(self.prefix) + accepted)
            sequence.append([next_token])
        return GrowingDraft(sequence, length, drafting, self.number + 1, able)

    def followed_by(self, accepted: int, next_token: int, draft: GrowingDraft) -> DraftedRound:
        """The next round, with its draft."""
        prefix = [*self.prefix, *self.tokens_of(accepted, next_token)]
        return DraftedRound(self.drafting, self.number + 1, prefix, draft)
