# SPDX-License-Identifier: Apache-2.0
"""The papers' algorithms, each in one plain function: the specification that every decoding mode must equal.

A model is a function from the tokens so far to the distribution (V,) of the next one: ``q`` is the draft's, ``p``
the target's. Every function returns the tokens that one round adds to ``prefix``, and these are distributed exactly
as if ``p`` alone had been sampled. Step numbers are those of the papers, with misprints corrected. ``rng`` is a
NumPy generator; ``rng.binomial(1, a)`` is 1 with probability a. This module imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = list[int]
Distribution = NDArray[np.float64]  # (V,) float64, sums to 1
Model = Callable[[Tokens], Distribution]
Noise = Callable[[int], NDArray[np.float64]]  # position -> standard Gumbel noise (V,), the same on both sides
Tree = list[tuple[int, "Tree"]]  # children in the order they were drawn, each with its own children


def draw(weights: NDArray[np.float64], rng: np.random.Generator) -> int:
    """A sample of norm(weights)."""
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm(max(0, p - q)): what replaces a token of q that was rejected. p where nothing is left."""
    rest = np.maximum(0.0, p - q)
    return rest / rest.sum() if rest.sum() > 0.0 else p


def greedy(p: Model, q: Model, prefix: Tokens, gamma: int) -> Tokens:
    """The limit of speculative sampling at temperature 0: keep the draft while it is the target's argmax."""
    draft: Tokens = []
    for _ in range(gamma):
        draft.append(int(np.argmax(q(prefix + draft))))
    added: Tokens = []
    for x in [*draft, None]:
        added.append(int(np.argmax(p(prefix + added))))
        if added[-1] != x:  # the target's own token replaces the first that differs, or is the bonus token
            break
    return added


def speculative_sampling(p: Model, q: Model, prefix: Tokens, gamma: int, rng: np.random.Generator) -> Tokens:
    """The base of all methods (Leviathan et al. 2023, algorithm 1; mode dsd)."""
    # 1. The draft model samples x_1..x_gamma, x_i ~ q_i.
    draft: Tokens = []
    for _ in range(gamma):
        draft.append(draw(q(prefix + draft), rng))
    # 2. One pass of the target gives p_1..p_(gamma + 1).
    added: Tokens = []
    for x in draft:
        p_i, q_i = p(prefix + added), q(prefix + added)
        # 3. Accept x_i with probability min(1, p_i(x_i) / q_i(x_i)): target over draft.
        if not rng.binomial(1, min(1.0, p_i[x] / q_i[x])):
            # 4. First rejection: the recovered token comes from norm(max(0, p_i - q_i)), and the round ends.
            return [*added, draw(residual(p_i, q_i), rng)]
        added.append(x)
    # 5. All accepted: the bonus token comes from p_(gamma + 1).
    return [*added, draw(p(prefix + added), rng)]


def split(
    p: Model,
    q: Model,
    prefix: Tokens,
    gamma: int,
    rng: np.random.Generator,
    rounded_up: Callable[[float], float] = lambda q_x: q_x,
) -> Tokens:
    """DSSD, algorithms 1 and 2: the robot draws the recovered token (mode dssd).

    rounded_up: how a probability travels, as a number r(x) of q(x) to 1. The paper sends q(x) as it is.
    """
    # Robot: draft, and send for each token its id and r_i(x_i).
    draft: Tokens = []
    chances: list[float] = []
    for _ in range(gamma):
        q_i = q(prefix + draft)
        draft.append(draw(q_i, rng))
        chances.append(rounded_up(q_i[draft[-1]]))
    # Cloud: accept x_i with probability min(1, p_i(x_i) / r_i(x_i)).
    added: Tokens = []
    for x, r_x in zip(draft, chances, strict=True):
        p_j = p(prefix + added)
        if not rng.binomial(1, min(1.0, p_j[x] / r_x)):
            # Cloud: send j and the whole p_j. Robot, which still has q_j: draw from what is left of p_j. A token x
            # is emitted by acceptance with probability q(x) min(1, p(x) / r(x)); for r = q that is min(p, q).
            q_j = q(prefix + added)
            r_j = np.array([rounded_up(q_x) for q_x in q_j])
            ratio = np.divide(p_j, r_j, out=np.ones_like(p_j), where=r_j > 0.0)
            return [*added, draw(residual(p_j, q_j * np.minimum(1.0, ratio)), rng)]
        added.append(x)
    # Cloud: all accepted, so it draws the bonus token and sends it.
    return [*added, draw(p(prefix + added), rng)]


def truncate(q: Distribution, top_k: int) -> Distribution:
    """q_hat: the ``top_k`` likeliest tokens of q, renormalized (TSLT, equation 12)."""
    kept = np.argsort(-q, kind="stable")[:top_k]
    q_hat = np.zeros_like(q)
    q_hat[kept] = q[kept]
    return q_hat / float(q_hat.sum())


def truncated(p: Model, q: Model, prefix: Tokens, gamma: int, top_k: int, rng: np.random.Generator) -> Tokens:
    """TSLT, algorithm 3: truncate first, then sample (mode tslt).

    Only q_hat's entries travel. It is lossless because the draft really is a sample of the q_hat that it is
    verified against; truncating q after sampling from all of it would not be.
    """
    return speculative_sampling(p, lambda context: truncate(q(context), top_k), prefix, gamma, rng)


def multi_candidate(p: Model, q: Model, prefix: Tokens, expansion: Sequence[int], rng: np.random.Generator) -> Tokens:
    """TSLT's multi-candidate trees, MCSample and MCVeri (modes mc-dsd, and mc-tslt with ``truncate``).

    expansion: <k_1..k_L>, the children of every node, level by level.
    """

    # MCSample: every node of level l - 1 gets k_l children, drawn from its q independently and with replacement.
    def sampled(path: Tokens, level: int) -> Tree:
        if level == len(expansion):
            return []
        family = [draw(q(path), rng) for _ in range(expansion[level])]
        return [(x, sampled([*path, x], level + 1)) for x in family]

    children = sampled(prefix, 0)
    # MCVeri: one pass of the target over the whole tree, then a walk down from the root.
    added: Tokens = []
    while True:
        q_here = q(prefix + added)
        p_i = p(prefix + added)  # p^(1)
        for x, below in children:
            # Accept sibling x^(i) with probability min(1, p^(i)(x) / q(x)), and walk down to it.
            if rng.binomial(1, min(1.0, p_i[x] / q_here[x])):
                added, children = [*added, x], below
                break
            p_i = residual(p_i, q_here)  # p^(i + 1) = norm(max(0, p^(i) - q))
        else:
            # No child accepted: the recovered token comes from p^(k + 1). At a leaf: the bonus token, from p.
            return [*added, draw(p_i, rng)]


def coupled(p: Model, q: Model, prefix: Tokens, gamma: int, noise: Noise) -> Tokens:
    """Gumbel coupling (Daliri, Musco and Suresh 2024; mode coupled): no distribution travels.

    argmax(log p + G) is a sample of p. Draft and target use the same G, so they mostly choose the same token, and
    the target's choice never depends on the draft.
    """

    def choice(distribution: Distribution, position: int) -> int:
        with np.errstate(divide="ignore"):
            return int(np.argmax(np.log(distribution) + noise(position)))

    draft: Tokens = []
    for _ in range(gamma):
        draft.append(choice(q(prefix + draft), len(prefix) + len(draft)))
    added: Tokens = []
    for x in [*draft, None]:
        added.append(choice(p(prefix + added), len(prefix) + len(added)))
        if added[-1] != x:
            break
    return added


def mixture(p_left: Distribution, p_right: Distribution, eta_left: float) -> Distribution:
    """DRAGON, equation 2: p = eta^l p^l + eta^r p^r, the distribution that both sides speak from."""
    return eta_left * p_left + (1.0 - eta_left) * p_right


class Aggregated(NamedTuple):
    """One position of speculative aggregation: its token, and whether it is what each side had drafted."""

    token: int
    left_accepted: bool
    right_accepted: bool


def aggregate(
    p_left: Distribution, p_right: Distribution, x_left: int, x_right: int, eta_left: float, rng: np.random.Generator
) -> Aggregated:
    """DRAGON, algorithm 1, one position: drafts x^s ~ p^s of two sides become a sample of their mixture."""
    corrected = []
    for p_s, p_o, x, eta_s in ((p_left, p_right, x_left, eta_left), (p_right, p_left, x_right, 1.0 - eta_left)):
        # Keep x^s with probability min(1, eta^s + eta^o p^o(x) / p^s(x)), else draw from norm(max(0, p^o - p^s)).
        keep = min(1.0, eta_s + (1.0 - eta_s) * p_o[x] / p_s[x])
        corrected.append(x if rng.binomial(1, keep) else draw(residual(p_o, p_s), rng))
    # The target token is either side's, with probability 1/2 each.
    token = corrected[rng.binomial(1, 0.5)]
    return Aggregated(token, token == x_left, token == x_right)


def speculative_aggregation(
    p_left: Model, p_right: Model, eta_left: float, prefix: Tokens, count: int, ahead: int, rng: np.random.Generator
) -> Tokens:
    """DRAGON: ``count`` tokens of the mixture, while each side drafts up to ``ahead`` tokens from its own p^s."""
    left: Tokens = []
    right: Tokens = []
    added: Tokens = []
    while len(added) < count:
        for p_s, queue in ((p_left, left), (p_right, right)):
            while len(queue) < ahead:
                queue.append(draw(p_s(prefix + added + queue), rng))
        context = prefix + added
        found = aggregate(p_left(context), p_right(context), left[0], right[0], eta_left, rng)
        added.append(found.token)
        # A draft that is not the target token drops its side's whole queue; the side restarts after that token.
        left = left[1:] if found.left_accepted else []
        right = right[1:] if found.right_accepted else []
    return added
