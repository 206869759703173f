# SPDX-License-Identifier: Apache-2.0
"""The verification rules for sequences, written out one by one, to check the product's rules for trees.

A sequence is a tree without branches, and the product knows it as nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.methods import DraftVerdict
from dsd_ros.decoding.rejection import residual
from dsd_ros.decoding.sampling import SamplingError, sample


def verify_draft(
    draft_tokens: Sequence[int], q: torch.Tensor, p: torch.Tensor, generator: np.random.Generator
) -> DraftVerdict:
    """Accept a prefix of the draft and add one token, so that the result is distributed as p alone.

    draft_tokens: gamma ids, the i-th drawn from q[i].
    q: (gamma, V_q) the draft's distributions; p: (gamma + 1, V_p) the target's, the last one for the
    bonus token. The narrower of the two vocabularies is padded with zeros, so ids that the target does
    not have are rejected. SamplingError when shapes do not fit or a token has q(x) = 0.
    """
    gamma = len(draft_tokens)
    if len(q) != gamma or len(p) != gamma + 1:
        raise SamplingError(
            f"{gamma} drafted tokens need {gamma} rows of q and {gamma + 1} of p, not {len(q)} and {len(p)}"
        )
    for i, x in enumerate(draft_tokens):
        q_x, p_x = _at(q[i], x), _at(p[i], x)
        if not q_x > 0.0:
            raise SamplingError(f"drafted token {x} has no probability in its own distribution")
        # 1. Accept x with probability min(1, p(x) / q(x)).
        if generator.random() * q_x < p_x:
            continue
        # 2. First rejection: draw from norm(max(0, p - q)) and stop.
        return DraftVerdict(i, sample(residual(p[i], q[i]), generator))
    # 3. All accepted: the bonus token.
    return DraftVerdict(gamma, sample(p[gamma], generator))


def verify_split(
    draft_tokens: Sequence[int], chances: Sequence[float], p: torch.Tensor, generator: np.random.Generator
) -> DraftVerdict:
    """The cloud's half of split verification (DSSD): it knows q_i(x_i) alone, ``rounded_up``, as ``chances``.

    p: (gamma + 1, V). The verdict of a rejection names no token: whoever holds q draws it from
    ``split_residual(verdict.target, q)``. SamplingError for chances that are no probabilities.
    """
    if len(chances) != len(draft_tokens) or not all(0.0 < q_x <= 1.0 for q_x in chances):
        raise SamplingError(f"{len(draft_tokens)} drafted tokens need as many probabilities above 0 and up to 1")
    for i, (x, q_x) in enumerate(zip(draft_tokens, chances, strict=True)):
        if generator.random() * q_x >= _at(p[i], x):
            return DraftVerdict(i, 0, p[i])
    return DraftVerdict(len(draft_tokens), sample(p[-1], generator))


def verify_greedy(draft_tokens: Sequence[int], argmax: Sequence[int]) -> DraftVerdict:
    """The limit of ``verify_draft`` at temperature 0: accept while x is the target's argmax.

    argmax: gamma + 1 ids, the target's likeliest token at each position.
    """
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == argmax[accepted]:
        accepted += 1
    return DraftVerdict(accepted, argmax[accepted])


def verify_coupled(draft_tokens: Sequence[int], p: torch.Tensor, noise: Callable[[int], np.ndarray]) -> DraftVerdict:
    """Accept while the draft is what the target draws itself with the shared noise, then emit that.

    p: (gamma + 1, V) the target's distributions; noise(i): row i of it, (V,), from ``coupling.gumbel``. The
    outcome is the target's own sample whatever was drafted, so the draft's distributions are not needed.
    """
    # Behind the first token that does not hold nothing is looked at.
    for i, x in enumerate(draft_tokens):
        drawn = choose(p[i], noise(i))
        if drawn != x:
            return DraftVerdict(i, drawn)
    gamma = len(draft_tokens)
    return DraftVerdict(gamma, choose(p[gamma], noise(gamma)))


def _at(row: torch.Tensor, token: int) -> float:
    return float(row[token]) if 0 <= token < len(row) else 0.0
