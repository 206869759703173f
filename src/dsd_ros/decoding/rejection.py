"""The acceptance rule of speculative sampling (Leviathan et al. 2023, Chen et al. 2023).

q is the draft's distribution, p the target's. A drafted x is accepted with probability
min(1, p(x) / q(x)), target over draft; two of the papers implemented here print it upside down. The walk
down a draft by this rule is in ``trees``, for sequences as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsd_ros.decoding.sampling import SamplingError

LEAST_CHANCE = 2.0**-31  # of what proves a token in split verification


@dataclass(frozen=True)
class Verdict:
    """``accepted`` drafted tokens hold, and ``next_token`` follows them.

    Of a tree ``accepted`` is the index plus one of the last node that holds.
    """

    accepted: int
    next_token: int
    # p (n, V) where a draft is rejected and its own side is to find what follows (next_token is then 0):
    # behind the last node that holds, and behind those that may follow it.
    target: torch.Tensor | None = field(default=None, compare=False)


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
        if not probability_of(x, q[i]) > 0.0:
            raise SamplingError(f"drafted token {x} has no probability in its own distribution")


def probability_of(token: int, row: torch.Tensor) -> float:
    """A token's entry in a distribution (V,); 0 beyond its vocabulary."""
    return float(row[token]) if 0 <= token < len(row) else 0.0
