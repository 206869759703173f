# SPDX-License-Identifier: Apache-2.0
"""Models in the form that the reference algorithms take, and whole replies by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dsd_ros.decoding import reference
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.sampling import SamplingSettings, transform

GREEDY = SamplingSettings()


def model_of(model, image, instruction: str, sampling: SamplingSettings = GREEDY, size: int = 0) -> reference.Model:
    """The next token's distribution after each reply, from passes of its own; ``size``: padded to so many ids."""
    rows: dict[tuple[int, ...], np.ndarray] = {}
    prompt = model.prefill(image, instruction)

    def next_token(tokens: list[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in rows:
            sequence = prompt.fork()
            sequence.append(tokens)
            row = transform(sequence.next_logits(), sampling).double().numpy()
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
