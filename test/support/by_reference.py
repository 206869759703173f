# SPDX-License-Identifier: Apache-2.0
"""Models in the form that the reference algorithms take, and whole replies by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from by_transformers import processors

from dsd_ros.decoding import reference
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.methods.split import rounded_up
from dsd_ros.decoding.modes import Proof, Shape
from dsd_ros.decoding.sampling import SamplingSettings, generator_for, transform
from dsd_ros.decoding.settings import DecodeSettings, expansion_nodes
from dsd_ros.decoding.truncation import restored, truncate

GREEDY = SamplingSettings()


def model_of(model, image, instruction: str, sampling: SamplingSettings = GREEDY, size: int = 0) -> reference.Model:
    """The next token's distribution after each reply, from passes of its own; ``size``: padded to so many ids.

    A TableModel's ``options`` are applied by transformers' own processors.
    """
    rows: dict[tuple[int, ...], np.ndarray] = {}
    prompt = model.prefill(image, instruction)
    options = getattr(model, "options", None)
    change = processors(options, [*model.eos_token_ids], model.prompt(image, instruction)) if options else None

    def next_token(tokens: list[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in rows:
            sequence = prompt.fork()
            sequence.append(tokens)
            logits = sequence.next_logits() if change is None else change(tokens, sequence.next_logits())
            row = transform(logits, sampling).double().numpy()
            rows[key] = np.pad(row / row.sum(), (0, max(0, size - len(row))))
        return rows[key]

    return next_token


def whole_reply(round_: Callable, length: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """Rounds until ``length`` tokens or one of ``ends``; round_(tokens so far) returns what a round adds."""
    tokens: list[int] = []
    while len(tokens) < length and not ends & set(tokens):
        tokens += round_(tokens)
    end = next((i + 1 for i, token in enumerate(tokens) if token in ends), length)
    return tokens[: min(end, length)]


def greedy_reply(target, draft, image, instruction: str, length: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """What ``reference.greedy`` says with drafts of 3."""
    size = max(target.vocab_size, draft.vocab_size)
    p, q = (model_of(model, image, instruction, GREEDY, size) for model in (target, draft))
    return whole_reply(lambda tokens: reference.greedy(p, q, tokens, 3), length, ends)


def coupled_reply(
    target, draft, image, instruction: str, settings, number: int, ends: frozenset[int] = frozenset()
) -> list[int]:
    """What ``reference.coupled`` says as reply ``number`` (from 1) of a session, with drafts of 3."""
    size = max(target.vocab_size, draft.vocab_size)
    p, q = (model_of(model, image, instruction, settings.sampling, size) for model in (target, draft))
    noise = partial(gumbel, settings.seed, number, size=size)
    return whole_reply(lambda tokens: reference.coupled(p, q, tokens, 3, noise), settings.max_tokens, ends)


def reply_alone(
    target, image, instruction: str, settings, number: int = 1, ends: frozenset[int] = frozenset()
) -> list[int]:
    """What the target alone says as reply ``number``, token by token: greedy, or with shared noise."""
    p, noise = model_of(target, image, instruction, settings.sampling), partial(gumbel, settings.seed, number)
    if settings.sampling.greedy:
        return whole_reply(lambda tokens: reference.greedy(p, p, tokens, 0), settings.max_tokens, ends)
    sized = partial(noise, size=target.vocab_size)
    return whole_reply(lambda tokens: reference.coupled(p, p, tokens, 0, sized), settings.max_tokens, ends)


class TwoStreams:
    """Stands where an algorithm of ``reference`` has a NumPy generator, and draws as the product does.

    A draft of ``drafts`` tokens and its verification have a stream of random numbers each.
    """

    def __init__(self, drafting: np.random.Generator, verifying: np.random.Generator, drafts: int) -> None:
        self._drafting, self._verifying, self._left = drafting, verifying, drafts

    def choice(self, size: int, p: np.ndarray) -> int:
        generator = self._drafting if self._left > 0 else self._verifying
        self._left -= 1
        up_to = p.cumsum()
        return int(np.searchsorted(up_to, generator.random() * up_to[-1], side="right"))

    def binomial(self, _: int, chance: float) -> bool:
        return bool(self._verifying.random() < chance)


class SplitDraws(TwoStreams):
    """The same in split verification: what follows a rejection is drawn with the noise (V,) of its position."""

    def __init__(self, *streams, noise: Callable[[int], np.ndarray], start: int) -> None:
        super().__init__(*streams)
        self._noise, self._position, self._rejected = noise, start, False

    def choice(self, size: int, p: np.ndarray) -> int:
        if not self._rejected:
            return super().choice(size, p)
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(p) + self._noise(self._position)))

    def binomial(self, _: int, chance: float) -> bool:
        self._rejected = not super().binomial(_, chance)
        self._position += not self._rejected
        return not self._rejected


class SplitTreeDraws(TwoStreams):
    """The same for a tree: from the first rejection on the robot verifies, with a stream of its own."""

    def __init__(self, *streams, resampling: np.random.Generator) -> None:
        super().__init__(*streams)
        self._resampling = resampling

    def binomial(self, _: int, chance: float) -> bool:
        kept = super().binomial(_, chance)
        if not kept:
            self._verifying = self._resampling
        return kept


def chance_that_travels(q_x: float) -> float:
    """A probability of split verification as the wire holds it."""
    return float(rounded_up(torch.tensor([q_x], dtype=torch.float32)))


def drawn_reply(target, draft, image, instruction: str, settings: DecodeSettings, number: int = 1) -> list[int]:
    """What the reference of a proof that draws says as reply ``number``, given the product's draws; no token ends it.

    Of trees those by expansion, of at most two levels: the product draws a draft level by level. With split
    verification their probabilities have to travel as they are.
    """
    size = max(target.vocab_size, draft.vocab_size)
    p, whole = (model_of(model, image, instruction, settings.sampling, size) for model in (target, draft))
    expansion = settings.expansion if settings.shaped_by is Shape.EXPANSION else (1,) * settings.draft_length
    rounds = 0

    def q(tokens: list[int]) -> np.ndarray:
        row = whole(tokens)
        if settings.proven_by is not Proof.TRUNCATED:
            return row
        kept = truncate(torch.from_numpy(row).float(), settings.top_k_proof, settings.top_rho_proof)
        row = restored(*kept, size).double().numpy()
        return row / row.sum()

    def round_(tokens: list[int]) -> list[int]:
        nonlocal rounds
        rounds += 1
        shape = expansion[: settings.max_tokens - len(tokens) - 1]
        drafting, verifying = (generator_for(side, settings.seed, number, rounds) for side in ("draft", "verifier"))
        draws = TwoStreams(drafting, verifying, expansion_nodes(shape))
        if settings.shaped_by is Shape.EXPANSION:
            if settings.proven_by is Proof.SPLIT:
                resampling = generator_for("resample", settings.seed, number, rounds)
                draws = SplitTreeDraws(drafting, verifying, expansion_nodes(shape), resampling=resampling)
            return reference.multi_candidate(p, q, tokens, shape, draws)
        if settings.proven_by is Proof.SPLIT:
            noise = partial(gumbel, settings.seed, number, size=size)
            draws = SplitDraws(drafting, verifying, len(shape), noise=noise, start=len(tokens))
            return reference.split(p, q, tokens, len(shape), draws, chance_that_travels)
        return reference.speculative_sampling(p, q, tokens, len(shape), draws)

    return whole_reply(round_, settings.max_tokens)
