"""The acceptance rule of speculative sampling (Leviathan et al. 2023, Chen et al. 2023).

q is the draft's distribution, p the target's. A drafted x is accepted with probability
min(1, p(x) / q(x)), target over draft; two of the papers implemented here print it upside down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsd_ros.decoding.coupling import choose
from dsd_ros.decoding.sampling import SamplingError, sample

LEAST_CHANCE = 2.0**-31  # of what proves a token in split verification


@dataclass(frozen=True)
class Verdict:
    """``accepted`` drafted tokens hold, and ``next_token`` follows them."""

    accepted: int
    next_token: int
    # p (V,) where a draft is rejected and its own side is to draw the next token (next_token is then 0).
    target: torch.Tensor | None = field(default=None, compare=False)


def verify_draft(
    draft_tokens: Sequence[int],
    q: torch.Tensor,
    p: torch.Tensor,
    generator: np.random.Generator,
) -> Verdict:
    """Accept a prefix of the draft and add one token, so that the result is distributed as p alone.

    draft_tokens: gamma ids, the i-th drawn from q[i].
    q: (gamma, V_q) the draft's distributions; p: (gamma + 1, V_p) the target's, the last one for the
    bonus token. The narrower of the two vocabularies is padded with zeros, so ids that the target does
    not have are rejected. SamplingError when shapes do not fit or a token has q(x) = 0.
    """
    gamma = len(draft_tokens)
    if len(q) != gamma or len(p) != gamma + 1:
        raise SamplingError(
            f"{gamma} drafted tokens need {gamma} rows of q and {gamma + 1} of p, "
            f"not {len(q)} and {len(p)}"
        )
    for i, x in enumerate(draft_tokens):
        q_x, p_x = _at(q[i], x), _at(p[i], x)
        if not q_x > 0.0:
            raise SamplingError(f"drafted token {x} has no probability in its own distribution")
        # 1. Accept x with probability min(1, p(x) / q(x)).
        if generator.random() * q_x < p_x:
            continue
        # 2. First rejection: draw from norm(max(0, p - q)) and stop.
        return Verdict(i, sample(residual(p[i], q[i]), generator))
    # 3. All accepted: the bonus token.
    return Verdict(gamma, sample(p[gamma], generator))


def verify_split(
    draft_tokens: Sequence[int],
    chances: Sequence[float],
    p: torch.Tensor,
    generator: np.random.Generator,
) -> Verdict:
    """The cloud's half of split verification (DSSD): it knows q_i(x_i) alone, ``rounded_up``, as ``chances``.

    p: (gamma + 1, V). The verdict of a rejection names no token: whoever holds q draws it from
    ``split_residual(verdict.target, q)``. SamplingError for chances that are no probabilities.
    """
    if len(chances) != len(draft_tokens) or not all(0.0 < q_x <= 1.0 for q_x in chances):
        raise SamplingError(
            f"{len(draft_tokens)} drafted tokens need as many probabilities above 0 and up to 1"
        )
    for i, (x, q_x) in enumerate(zip(draft_tokens, chances, strict=True)):
        if generator.random() * q_x >= _at(p[i], x):
            return Verdict(i, 0, p[i])
    return Verdict(len(draft_tokens), sample(p[-1], generator))


def verify_greedy(draft_tokens: Sequence[int], argmax: Sequence[int]) -> Verdict:
    """The limit of ``verify_draft`` at temperature 0: accept while x is the target's argmax.

    argmax: gamma + 1 ids, the target's likeliest token at each position.
    """
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == argmax[accepted]:
        accepted += 1
    return Verdict(accepted, argmax[accepted])


def verify_coupled(
    draft_tokens: Sequence[int], p: torch.Tensor, noise: Callable[[int], np.ndarray]
) -> Verdict:
    """Accept while the draft is what the target draws itself with the shared noise, then emit that.

    p: (gamma + 1, V) the target's distributions; noise(i): row i of it, (V,), from ``coupling.gumbel``. The
    outcome is the target's own sample whatever was drafted, so the draft's distributions are not needed.
    """
    # Behind the first token that does not hold nothing is looked at.
    for i, x in enumerate(draft_tokens):
        drawn = choose(p[i], noise(i))
        if drawn != x:
            return Verdict(i, drawn)
    gamma = len(draft_tokens)
    return Verdict(gamma, choose(p[gamma], noise(gamma)))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(0, p - q) over p's vocabulary, (V_p,), unnormalised; p where rounding leaves nothing."""
    shared = min(len(p), len(q))
    rest = p.clone()
    rest[:shared] -= q[:shared]
    rest.clamp_(min=0.0)
    # p == q leaves nothing, and then only rounding can have rejected.
    return rest if float(rest.sum()) > 0.0 else p


def rounded_up(q: torch.Tensor) -> torch.Tensor:
    """q, 0..1, as float32 that is all in the 12 bits that travel: the smallest of these that is not below.

    They are 2^-31..1 with seven bits behind the leading one, so that no more than a relative 2^-7 is added.
    """
    bits = q.float().clamp(LEAST_CHANCE, 1.0).contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def split_residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the token behind a rejection is drawn from where x was accepted with min(1, p(x) / r(x)), (V_p,).

    r is ``rounded_up`` q. Accepted so, x is emitted with probability q(x) min(1, p(x) / r(x)), and this is the
    rest of p, unnormalised: exact for any r >= q, where max(0, p - q) would not be. p where nothing is left.
    """
    shared = min(len(p), len(q))
    q = q[:shared].float()
    rest = p.to(torch.float64, copy=True)
    rest[:shared] -= q * (rest[:shared] / rounded_up(q)).clamp(max=1.0)
    rest = rest.clamp(min=0.0).float()
    return rest if float(rest.sum()) > 0.0 else p


def check_distributions(draft_tokens: Sequence[int], q: torch.Tensor) -> None:
    """Refuse rows that are no distributions, or that the drafted tokens cannot come from.

    q: (gamma, V) from an untrusted peer. SamplingError names the first row at fault.
    """
    sums = q.double().sum(dim=-1)
    # NaN fails every comparison, so both tests are written to pass only what is right.
    valid = (q >= 0.0).all(dim=-1) & ((sums - 1.0).abs() <= 1e-3)
    for i, x in enumerate(draft_tokens):
        if not bool(valid[i]):
            raise SamplingError(
                f"the distribution of drafted token {i} is none: its entries must be 0 or more and sum to 1"
            )
        if not _at(q[i], x) > 0.0:
            raise SamplingError(f"drafted token {x} has no probability in its own distribution")


def _at(row: torch.Tensor, token: int) -> float:
    return float(row[token]) if 0 <= token < len(row) else 0.0
