"""Guessed outcomes: what a verifier will probably say of a draft, by the draft's own probabilities.

Not in the FSD paper; after speculative speculative decoding (arXiv 2603.03251). A guess costs nothing but
the work behind it: what the reply becomes never depends on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample, transform

_FIRST_RATE = 0.7  # of acceptance, before any was seen
_MEMORY = 0.9  # how much of the rate a drafted token leaves as it was


@dataclass(frozen=True)
class Guess:
    """An outcome and how likely it seems, 0 to 1."""

    accepted: int
    next_token: int
    score: float


class Guesser:
    """Guesses for a session's rounds; learns how often sampled drafts are accepted.

    Greedy: a drafted token holds with the draft's own probability of it. Sampled: whether it holds depends
    on the verifier's uniform draw, which both sides can derive (``generator_for``); the robot
    may look ahead at it since its draft is fixed by then, and draws of its own are never touched.
    """

    def __init__(self, sampling: SamplingSettings, seed: int) -> None:
        self._sampling = sampling
        self._seed = seed
        self._rate = _FIRST_RATE

    def learn(self, drafted: int, accepted: int) -> None:
        """One round's outcome: ``accepted`` tokens of ``drafted`` held."""
        for held in [True] * accepted + [False] * (accepted < drafted):
            self._rate = _MEMORY * self._rate + (1 - _MEMORY) * held

    def chances(
        self, reply: int, number: int, tokens: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> list[float]:
        """How likely each drafted token is to hold, if those before it do.

        rows: the logits (V,) that each token was chosen by.
        """
        if self._sampling.greedy:
            shares = [self._probabilities(row)[t] for t, row in zip(tokens, rows, strict=True)]
            return [min(1.0, float(share)) for share in shares]
        draws = generator_for("verifier", self._seed, reply, number).random(len(tokens))
        # Accepted when the draw is below p(x) / q(x): linear in the draw, with the rate as its mean.
        return [min(1.0, max(0.02, 1 - 2 * (1 - self._rate) * float(u))) for u in draws]

    def rejections(
        self, tokens: Sequence[int], rows: Sequence[torch.Tensor], chances: list[float], limit: int
    ) -> list[Guess]:
        """Outcomes that end in a rejection, the ``limit`` likeliest, best first.

        P(a accepted, then y) = prod_{i<=a} chance_i * (1 - chance_{a+1}) * q_{a+1}(y) without x_{a+1}.
        """
        guesses: list[Guess] = []
        before = 1.0
        for accepted, (token, row, chance) in enumerate(zip(tokens, rows, chances, strict=True)):
            others = self._probabilities(row).clone()
            others[token] = 0.0
            total = float(others.sum())
            if total > 0.0:
                share = before * (1 - chance) / total
                guesses += _likeliest(accepted, others, share, limit)
            before *= chance
        return _best(guesses, limit)

    def acceptances(
        self,
        reply: int,
        number: int,
        drafted: int,
        row: torch.Tensor,
        chances: list[float],
        limit: int,
    ) -> list[Guess]:
        """Outcomes that accept the whole draft, the ``limit`` likeliest, best first.

        row: the draft model's logits (V,) behind its whole draft. When sampled, the target's draw
        most probably gives what the same draw gives of the draft's distribution.
        """
        whole = 1.0
        for chance in chances:
            whole *= chance
        probabilities = self._probabilities(row)
        if not self._sampling.greedy:
            generator = generator_for("verifier", self._seed, reply, number)
            generator.random(drafted)
            same = sample(probabilities, generator)
            probabilities = probabilities * (1 - self._rate)
            probabilities[same] += self._rate
        return _best(_likeliest(drafted, probabilities, whole, limit), limit)

    def _probabilities(self, row: torch.Tensor) -> torch.Tensor:
        if self._sampling.greedy:
            return torch.softmax(row, dim=-1)
        return transform(row, self._sampling)


def _likeliest(accepted: int, weights: torch.Tensor, share: float, limit: int) -> list[Guess]:
    values, tokens = weights.topk(min(limit, len(weights)))
    return [
        Guess(accepted, token, share * value)
        for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        if value > 0.0
    ]


def _best(guesses: list[Guess], limit: int) -> list[Guess]:
    return sorted(guesses, key=lambda guess: -guess.score)[:limit]
