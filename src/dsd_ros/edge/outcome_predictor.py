"""Guessed outcomes: what a verifier will probably say of a draft, by the draft's own probabilities.

Not in the FSD paper; after speculative speculative decoding (arXiv 2603.03251). A guess costs nothing but
the work behind it: what the reply becomes never depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsd_ros.decoding.sampling import SamplingSettings, generator_for, sample
from dsd_ros.decoding.tree import ROOT, TokenTree

_FIRST_RATE = 0.7  # of acceptance, before any was seen
_MEMORY = 0.9  # how much of the rate a drafted token leaves as it was
_STEP = 0.3  # of the shift, in nats, for a token that holds against all odds
_LARGEST_SHIFT = 4.0


@dataclass(frozen=True)
class Guess:
    """An outcome, as it travels, and how likely it seems, 0 to 1."""

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

    Greedy: the target says the draft's likeliest token with the draft's own probability of it, its odds
    shifted by what was learned. Coupled is greedy with log q + G in the place of the logits. Sampled:
    whether a token holds depends on the verifier's uniform draw, which both sides can derive
    (``generator_for``); the robot may look ahead at it since its draft is fixed by then. ``chances``,
    where they are arguments, are of each node: to hold if its parent does.
    """

    def __init__(self, sampling: SamplingSettings, seed: int, coupled: bool = False) -> None:
        """``coupled``: rows are log q + G, and nothing else is drawn."""
        self._sampling = sampling
        self._draws = not (sampling.greedy or coupled)
        self._seed = seed
        self._rate = _FIRST_RATE
        self._trust = Trust()

    def learn(self, tree: TokenTree, chances: Sequence[float], accepted: int) -> None:
        """One round's outcome: of the nodes that were given these ``chances`` a path holds."""
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
        """How likely each node is to hold, if its parent does.

        rows (V,): what the children of each inner node were drawn from (``Method.draw_from``).
        """
        if self._draws:
            return self._drawn(reply, number, tree)
        foreseen = dict(zip(tree.inner, map(self._foreseen, rows), strict=True))
        return [float(foreseen[parent][x]) for x, parent in zip(tree.tokens, tree.parents, strict=True)]

    def rejections(
        self, tree: TokenTree, rows: Sequence[torch.Tensor], chances: Sequence[float], limit: int
    ) -> list[Guess]:
        """Outcomes that end in a rejection, the ``limit`` likeliest, best first.

        P(path, then y) = prod of the path's chances * (1 - the next nodes' chances) * q(y) without them.
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
        """Outcomes that accept a whole path, the ``limit`` likeliest, best first.

        rows: as above, behind leaves. When sampled, the target's draw most probably gives what the same
        draw gives of the draft's distribution.
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
            left = 1.0  # that the siblings before have all been rejected
            for child in tree.children(node):
                # Accepted when the draw is below p(x) / q(x): linear in the draw, the rate as its mean.
                draw = float(draws[_tried(tree, child) - 1])
                chance = min(1.0, max(0.02, 1 - 2 * (1 - self._rate) * draw))
                chances[child] = left * chance
                left *= 1 - chance
        return chances

    def _foreseen(self, row: torch.Tensor) -> torch.Tensor:
        """How likely each token (V,) is to be the target's, but for what is drawn."""
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
    """How likely the path to each node is to hold."""
    reached = {ROOT: 1.0}
    for node, parent in enumerate(tree.parents):
        reached[node] = reached[parent] * chances[node]
    return reached


def _tried(tree: TokenTree, node: int) -> int:
    """How many nodes a verifier has tried, each with a draw, once it has accepted ``node``."""
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
