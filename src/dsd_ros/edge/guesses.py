"""Guessed outcomes: what a verifier will probably say of a draft, by the draft's own probabilities.

Not in the FSD paper; after speculative speculative decoding (arXiv 2603.03251). A guess costs nothing but
the work behind it: what the reply becomes never depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample, transform

_FIRST_RATE = 0.7  # of acceptance, before any was seen
_MEMORY = 0.9  # how much of the rate a drafted token leaves as it was
_STEP = 0.3  # of the shift, in nats, for a token that holds against all odds
_LARGEST_SHIFT = 4.0


@dataclass(frozen=True)
class Guess:
    """An outcome and how likely it seems, 0 to 1."""

    accepted: int
    next_token: int
    score: float


class Trust:
    """How far somebody's own probabilities can be trusted: a shift of their odds, learned from outcomes."""

    def __init__(self) -> None:
        self._shift = 0.0

    def corrected(self, chance: float) -> float:
        """``chance`` (0 to 1) with the odds that experience gives it."""
        chance = min(1 - 1e-6, max(1e-6, chance))
        return 1 / (1 + math.exp(-self._shift) * (1 - chance) / chance)

    def learn(self, chance: float, held: bool) -> None:
        """What had been given the corrected ``chance`` came true, or not."""
        # One step of logistic regression with the bias as its only weight.
        shift = self._shift + _STEP * (held - chance)
        self._shift = min(_LARGEST_SHIFT, max(-_LARGEST_SHIFT, shift))


class Guesser:
    """Guesses for a session's rounds; learns from outcomes how far the draft can be trusted.

    Greedy: a drafted token holds with the draft's own probability of it, its odds shifted by what was
    learned. Coupled is greedy with log q + G in the place of the logits. Sampled: whether it holds depends
    on the verifier's uniform draw, which both sides can derive (``generator_for``); the robot may look
    ahead at it since its draft is fixed by then.
    """

    def __init__(self, sampling: SamplingSettings, seed: int, coupled: bool = False) -> None:
        """``coupled``: rows are given as log q + G (``Drafting.ranking``), and nothing else is drawn."""
        self._sampling = sampling
        self._draws = not (sampling.greedy or coupled)
        self._seed = seed
        self._rate = _FIRST_RATE
        self._trust = Trust()

    def learn(self, chances: Sequence[float], accepted: int) -> None:
        """One round's outcome: ``accepted`` of the tokens that were given these ``chances`` held."""
        for i, chance in enumerate(chances[: accepted + 1]):
            held = i < accepted
            self._rate = _MEMORY * self._rate + (1 - _MEMORY) * held
            self._trust.learn(chance, held)

    def chances(
        self, reply: int, number: int, tokens: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> list[float]:
        """How likely each drafted token is to hold, if those before it do.

        rows: the logits (V,) that each token was chosen by, or its ``Drafting.ranking``.
        """
        if not self._draws:
            shares = [self._probabilities(row)[t] for t, row in zip(tokens, rows, strict=True)]
            return [self._trust.corrected(float(share)) for share in shares]
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

        row: as above, behind the whole draft. When sampled, the target's draw
        most probably gives what the same draw gives of the draft's distribution.
        """
        whole = 1.0
        for chance in chances:
            whole *= chance
        probabilities = self._probabilities(row)
        if not self._draws:
            same = int(probabilities.argmax())
            first = float(probabilities[same])
            trusted = self._trust.corrected(first)
            probabilities = probabilities * ((1 - trusted) / max(1 - first, 1e-9))
            probabilities[same] = trusted
        else:
            generator = generator_for("verifier", self._seed, reply, number)
            generator.random(drafted)
            same = sample(probabilities, generator)
            probabilities = probabilities * (1 - self._rate)
            probabilities[same] += self._rate
        return _best(_likeliest(drafted, probabilities, whole, limit), limit)

    def _probabilities(self, row: torch.Tensor) -> torch.Tensor:
        if not self._draws:
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
