# SPDX-License-Identifier: Apache-2.0
"""Predicts a round's outcome from the draft's own probabilities, so that the next round can be drafted ahead.

Not in the FSD paper; after speculative speculative decoding (arXiv 2603.03251). A wrong guess wastes work but never
changes the reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsd_ros.decoding.sampling import generator_for, sample
from dsd_ros.decoding.settings import SamplingSettings
from dsd_ros.decoding.tree import ROOT, TokenTree

_FIRST_RATE = 0.7  # acceptance rate before any token was verified
_MEMORY = 0.9  # weight of the old rate when a token is verified
_STEP = 0.3  # learning rate of the shift, nats
_LARGEST_SHIFT = 4.0


@dataclass(frozen=True)
class Guess:
    """An outcome, as it travels, and its predicted probability."""

    accepted: int
    next_token: int
    score: float


class Trust:
    """Calibrates a model's own probabilities: a shift of their log odds, learned from outcomes."""

    def __init__(self) -> None:
        self._shift = 0.0

    def corrected(self, chance: float) -> float:
        """``chance`` (0 to 1), calibrated."""
        chance = min(1 - 1e-6, max(1e-6, chance))
        return 1 / (1 + math.exp(-self._shift) * (1 - chance) / chance)

    def learn(self, chance: float, held: bool) -> None:
        """Record whether what had the calibrated ``chance`` came true."""
        # One step of logistic regression whose only weight is the bias.
        shift = self._shift + _STEP * (held - chance)
        self._shift = min(_LARGEST_SHIFT, max(-_LARGEST_SHIFT, shift))


class Guesser:
    """Predicts the outcomes of a session's rounds, and learns from outcomes how far to trust the draft.

    Greedy: the target's token is the draft's likeliest with the draft's own probability of it, calibrated. Coupled is
    greedy with log q + G in place of the logits. Sampled: acceptance depends on the verifier's uniform draw, which
    both sides can derive (``generator_for``); the robot may look at it because its draft is fixed by then.
    ``chances`` as an argument holds each node's probability of being accepted if its parent is.
    """

    def __init__(self, sampling: SamplingSettings, seed: int, coupled: bool = False) -> None:
        """``coupled``: rows are log q + G."""
        self._draws = not (sampling.greedy or coupled)
        self._seed = seed
        self._rate = _FIRST_RATE
        self._trust = Trust()

    def learn(self, tree: TokenTree, chances: Sequence[float], accepted: int) -> None:
        """Learn from a round whose nodes had these ``chances``."""
        path = tree.path_to(accepted - 1)
        for parent, held in zip((ROOT, *path), (*path, ROOT), strict=True):
            children = tree.children(parent)
            if not children:
                break
            self._trust.learn(chances[children[0]], children[0] == held)
            for child in children:
                self._rate = _MEMORY * self._rate + (1 - _MEMORY) * (child == held)
                if child == held:
                    break

    def chances(self, reply: int, number: int, tree: TokenTree, rows: Sequence[torch.Tensor]) -> list[float]:
        """Each node's probability of being accepted if its parent is.

        rows (V,): what the children of each inner node were drawn from (``Method.draw_from``).
        """
        if self._draws:
            return self._drawn(reply, number, tree)
        foreseen = dict(zip(tree.inner, map(self._foreseen, rows), strict=True))
        return [float(foreseen[parent][x]) for x, parent in zip(tree.tokens, tree.parents, strict=True)]

    def rejections(
        self, tree: TokenTree, rows: Sequence[torch.Tensor], chances: Sequence[float], limit: int
    ) -> list[Guess]:
        """The ``limit`` likeliest outcomes that end in a rejection, best first.

        P(path, then y) = prod of the path's chances * (1 - the children's chances) * q(y), q without the children.
        """
        guesses: list[Guess] = []
        reached = _reached(tree, chances)
        for node, row in zip(tree.inner, rows, strict=True):
            children = tree.children(node)
            others = self._foreseen(row)
            others[list(tree.tokens_of(children))] = 0.0
            total = float(others.sum())
            if total > 0.0:
                left = 1.0 - math.fsum(chances[child] for child in children)
                guesses += _likeliest(node + 1, others, reached[node] * left / total, limit)
        return _best(guesses, limit)

    def acceptances(
        self,
        reply: int,
        number: int,
        tree: TokenTree,
        rows: Mapping[int, torch.Tensor],
        chances: Sequence[float],
        limit: int,
    ) -> list[Guess]:
        """The ``limit`` likeliest outcomes that accept a whole path, best first.

        rows: as above, after leaves. When sampled, the likeliest bonus token is what the target's uniform draw selects
        from the draft's distribution.
        """
        guesses: list[Guess] = []
        reached = _reached(tree, chances)
        for leaf, row in rows.items():
            probabilities = self._foreseen(row)
            if self._draws:
                generator = generator_for("verifier", self._seed, reply, number)
                generator.random(_tried(tree, leaf))
                same = sample(probabilities, generator)
                probabilities = probabilities * (1 - self._rate)
                probabilities[same] += self._rate
            guesses += _likeliest(leaf + 1, probabilities, reached[leaf], limit)
        return _best(guesses, limit)

    def _drawn(self, reply: int, number: int, tree: TokenTree) -> list[float]:
        draws = generator_for("verifier", self._seed, reply, number).random(len(tree))
        chances = [0.0] * len(tree)
        for node in tree.inner:
            left = 1.0  # probability that all earlier siblings were rejected
            for child in tree.children(node):
                # Accepted when the draw is below p(x) / q(x). Model: linear in the draw, with the rate as its mean.
                draw = float(draws[_tried(tree, child) - 1])
                chance = min(1.0, max(0.02, 1 - 2 * (1 - self._rate) * draw))
                chances[child] = left * chance
                left *= 1 - chance
        return chances

    def _foreseen(self, row: torch.Tensor) -> torch.Tensor:
        """Each token's probability (V,) of being the target's; when sampled, before the verifier's draw."""
        if self._draws:
            return row.clone()
        probabilities = torch.softmax(row, dim=-1)
        likeliest = int(probabilities.argmax())
        first = float(probabilities[likeliest])
        trusted = self._trust.corrected(first)
        probabilities *= (1 - trusted) / max(1 - first, 1e-9)
        probabilities[likeliest] = trusted
        return probabilities


def _reached(tree: TokenTree, chances: Sequence[float]) -> dict[int, float]:
    """The probability that the path to each node is accepted."""
    reached = {ROOT: 1.0}
    for node, parent in enumerate(tree.parents):
        reached[node] = reached[parent] * chances[node]
    return reached


def _tried(tree: TokenTree, node: int) -> int:
    """How many nodes the verifier has tried, each with one draw, by the time it accepts ``node``."""
    return sum(tree.children(tree.parents[x]).index(x) + 1 for x in tree.path_to(node))


def _likeliest(accepted: int, weights: torch.Tensor, share: float, limit: int) -> list[Guess]:
    values, tokens = weights.topk(min(limit, len(weights)))
    return [
        Guess(accepted, token, share * value)
        for token, value in zip(tokens.tolist(), values.tolist(), strict=True)
        if value > 0.0
    ]


def _best(guesses: list[Guess], limit: int) -> list[Guess]:
    return sorted(guesses, key=lambda guess: -guess.score)[:limit]
