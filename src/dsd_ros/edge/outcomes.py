# SPDX-License-Identifier: Apache-2.0
"""The possible outcomes of a round: which to draft after, and in what order (FSD, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.edge.draft_model import ModelDraft
from dsd_ros.edge.outcome_predictor import Guess

FLOOR = 1e-3  # less likely guesses are dropped

EXIT, GUESS = "exit", "guess"


@dataclass(eq=False)
class Predraft:
    """The next round's draft after one possible outcome of this round."""

    accepted: int
    next_token: int
    source: str  # what named it first: EXIT or GUESS
    score: float
    order: int  # in which it was named
    draft: ModelDraft | None = None  # None: not begun
    begun: bool = False
    stepping: bool = False  # a worker is at it
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Whether the whole draft is there."""
        return self.draft is not None and self.draft.complete and not self.failed


class OutcomeQueue:
    """The outcomes named for one round, keyed by their tokens, and the queue of those to work on.

    The best score goes first. ``budget``: how many are begun at most. No outcome is drafted twice. For one thread at a
    time.
    """

    def __init__(self, of: ModelDraft, budget: int, paper: bool) -> None:
        """``paper``: no guesses, and exits score by their confidence alone, as in FSD."""
        self.round = of
        self.begun = 0
        self._budget = budget
        self._paper = paper
        self._named: dict[tuple[int, ...], Predraft] = {}
        self._waiting: list[Predraft] = []
        self._doubt = 1.0  # factor on guesses' scores: the probability that all early exits are wrong

    def __len__(self) -> int:
        return len(self._waiting)

    def find(self, accepted: int, next_token: int) -> Predraft | None:
        """The pre-draft for an outcome."""
        return self._named.get(self.round.tokens_of(accepted, next_token))

    def name(self, accepted: int, next_token: int, source: str, score: float) -> Predraft | None:
        """Add an outcome, or raise its score; None if there is nothing to draft after it."""
        known = self.find(accepted, next_token)
        if known is not None:
            known.score = max(known.score, score)
            return known
        if not self.round.can_follow(accepted, next_token):
            return None
        predraft = Predraft(accepted, next_token, source, score, len(self._named))
        self._named[self.round.tokens_of(accepted, next_token)] = predraft
        self._waiting.append(predraft)
        return predraft

    def guess(self, guesses: list[Guess]) -> None:
        """Add guesses; those below the floor are left out."""
        for guess in guesses:
            score = guess.score * self._doubt
            if score >= FLOOR:
                self.name(guess.accepted, guess.next_token, GUESS, score)

    def forecast(self, accepted: int, next_token: int, confidence: float) -> None:
        """An early exit forecasts an outcome with confidence s: score <- s + (1 - s) score, (1 - s) score for others.

        Guesses that fall below the floor before they are begun are dropped.
        """
        said = self.name(accepted, next_token, EXIT, confidence if self._paper else 0.0)
        if self._paper:
            return
        self._doubt *= 1 - confidence
        for predraft in self._named.values():
            predraft.score *= 1 - confidence
        if said is not None:
            said.score += confidence
            said.source = said.source if said.begun else EXIT
        kept = []
        for predraft in self._waiting:
            if predraft.begun or predraft.score >= FLOOR or predraft is said:
                kept.append(predraft)
            else:
                del self._named[self.round.tokens_of(predraft.accepted, predraft.next_token)]
        self._waiting = kept

    def pop(self, kept: int = 0) -> Predraft | None:
        """``peek``, and take it out of the queue."""
        best = self.peek(kept)
        if best is not None:
            self.take_out(best)
        return best

    def peek(self, kept: int = 0) -> Predraft | None:
        """The next pre-draft to work on for one token; None when there is none.

        kept: part of the budget that is reserved for outcomes still to be named.
        """
        spent = self.begun + kept >= self._budget
        able = [p for p in self._waiting if p.begun or not spent]
        return self._next(able) if able else None

    def _next(self, able: list[Predraft]) -> Predraft:
        return max(able, key=lambda p: (p.score, -p.order))

    def take_out(self, predraft: Predraft) -> None:
        """Take a certain pre-draft out of the queue."""
        if predraft in self._waiting:
            self._waiting.remove(predraft)
        if not predraft.begun:
            predraft.begun = True
            self.begun += 1

    def put_back(self, predraft: Predraft) -> None:
        """Queue a pre-draft again that is not complete."""
        self._waiting.append(predraft)
