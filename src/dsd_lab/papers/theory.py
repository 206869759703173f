# SPDX-License-Identifier: Apache-2.0
"""What decoding costs by the paper's formulas, in seconds and in dollars, to be compared with measurements.

Source: "Fast and Cost-effective Speculative Edge-Cloud Decoding with Early Exits" (FSD), whose letters are used:

    n      tokens of a reply                    t_p   one forward pass of the draft, seconds
    gamma  tokens drafted a round               t_q   one forward pass of the target, seconds
    tau    tokens a round gains, 1..gamma+1     t_c   the link, one way, seconds
    r      pre-draft miss rate, 0..1            t_r   picking up a pre-draft after a hit, seconds
    c      t_p / t_q

The formulas know no prompt (its prefill on both sides), no spread of any time, and no cost of the early exits or of
drafting several outcomes at once. Every function raises TheoryError for a value out of its range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


class TheoryError(ValueError):
    """A quantity that no formula can take."""


def check_amounts(**values: float) -> None:
    """TheoryError naming the first value that is negative or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise TheoryError(f"{name} is {value}; give a number of 0 or more")


def check_positive(**values: float) -> None:
    """TheoryError naming the first value that is 0, negative or not finite."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise TheoryError(f"{name} is {value}; give a number above 0")


def check_shares(**values: float) -> None:
    """TheoryError naming the first value outside 0..1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise TheoryError(f"{name} is {value}; give a share from 0 to 1")


def check_gamma(gamma: float) -> None:
    """TheoryError unless a round drafts something."""
    if gamma < 1:
        raise TheoryError(f"gamma is {gamma}; draft at least 1 token a round")


def _check_round(tau: float, gamma: float) -> None:
    check_gamma(gamma)
    if not 1 <= tau <= gamma + 1:
        raise TheoryError(f"tau is {tau}; a round of {gamma} drafted tokens gains 1 to {gamma + 1}")


# ------------------------------------------------------------------------------------------------- seconds


def ar_seconds(*, n: float, t_q: float, t_c: float) -> float:
    """The cloud alone, token by token: ``2 t_c + n t_q`` (Table 4)."""
    check_amounts(n=n, t_q=t_q, t_c=t_c)
    return 2 * t_c + n * t_q


def sd_seconds(*, n: float, tau: float, gamma: float, t_p: float, t_q: float, t_c: float) -> float:
    """Speculative decoding over the link: ``(n / tau) (2 t_c + gamma t_p + t_q)`` (Table 4)."""
    check_amounts(n=n, t_p=t_p, t_q=t_q, t_c=t_c)
    _check_round(tau, gamma)
    return n / tau * (2 * t_c + gamma * t_p + t_q)


def fsd_seconds(
    *, n: float, tau: float, gamma: float, t_p: float, t_q: float, t_c: float, r: float, t_r: float = 0.0
) -> float:
    """With pre-drafting: ``(n / tau) (2 t_c + r gamma t_p + (1 - r) t_r + t_q)`` (Table 4)."""
    check_amounts(n=n, t_p=t_p, t_q=t_q, t_c=t_c, t_r=t_r)
    _check_round(tau, gamma)
    check_shares(**{"the miss rate r": r})
    return n / tau * (2 * t_c + r * gamma * t_p + (1 - r) * t_r + t_q)


def limit_seconds(*, n: float, tau: float, t_q: float, t_c: float) -> float:
    """The least time of any scheme that gains ``tau`` tokens a target pass: ``(n / tau) t_q + 2 t_c``."""
    check_amounts(n=n, t_q=t_q, t_c=t_c)
    check_positive(tau=tau)
    return n / tau * t_q + 2 * t_c


def expected_tokens(*, alpha: float, gamma: int) -> float:
    """tau of drafts of gamma tokens, each accepted with alpha: ``(1 - alpha^(gamma+1)) / (1 - alpha)``; TSLT 8."""
    check_gamma(gamma)
    check_shares(alpha=alpha)
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def acceptance_of(*, tau: float, gamma: int) -> float:
    """The alpha at which a round of gamma drafted tokens gains tau: ``expected_tokens`` inverted, by bisection."""
    _check_round(tau, gamma)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(alpha=middle, gamma=gamma) < tau else (low, middle)
    return high


def sequence_limit(
    *, n: float, alpha: float, t_p: float, t_q: float, t_c: float, prefill: float, longest: int
) -> tuple[int, float]:
    """(draft length, seconds) that no method which drafts sequences beats: nothing waits but the prompt and one trip.

    ``prefill + 2 t_c + n / tau(gamma) max(t_q, gamma t_p)`` at the best gamma up to ``longest``: passes of the target
    one after the other, each as long as its draft takes if that is longer.
    """
    check_amounts(n=n, t_p=t_p, t_q=t_q, t_c=t_c, prefill=prefill)
    found = {
        gamma: prefill + 2 * t_c + n / expected_tokens(alpha=alpha, gamma=gamma) * max(t_q, gamma * t_p)
        for gamma in range(1, longest + 1)
    }
    best = min(found, key=found.__getitem__)
    return best, found[best]


def fsd_speedup(*, gamma: int, c: float, r: float) -> float:
    """Pre-drafting over plain speculative decoding, link and hits free: ``(gamma c + 1) / (r gamma c + 1)`` (9)."""
    check_amounts(c=c)
    _check_round(1.0, gamma)
    check_shares(**{"the miss rate r": r})
    return (gamma * c + 1) / (r * gamma * c + 1)


@dataclass(frozen=True)
class Latency:
    """What the formulas predict for one setting: seconds a reply, and how many times faster than what."""

    ar_seconds: float
    sd_seconds: float
    fsd_seconds: float
    limit_seconds: float
    sd_over_ar: float
    fsd_over_sd: float
    fsd_over_ar: float
    limit_over_ar: float
    cost_ratio: float  # c
    equation_9: float  # fsd_over_sd if link and hits were free


def predict(
    *, n: float, tau: float, gamma: int, t_p: float, t_q: float, t_c: float, r: float, t_r: float = 0.0
) -> Latency:
    """All of the above at once; ``n`` and ``t_q`` must not be 0."""
    check_positive(n=n, t_q=t_q)
    ar = ar_seconds(n=n, t_q=t_q, t_c=t_c)
    sd = sd_seconds(n=n, tau=tau, gamma=gamma, t_p=t_p, t_q=t_q, t_c=t_c)
    fsd = fsd_seconds(n=n, tau=tau, gamma=gamma, t_p=t_p, t_q=t_q, t_c=t_c, r=r, t_r=t_r)
    limit = limit_seconds(n=n, tau=tau, t_q=t_q, t_c=t_c)
    c = t_p / t_q
    nine = fsd_speedup(gamma=gamma, c=c, r=r)
    return Latency(ar, sd, fsd, limit, ar / sd, sd / fsd, ar / fsd, ar / limit, cost_ratio=c, equation_9=nine)


@dataclass(frozen=True)
class Setup:
    """A system the paper measured, at gamma 4: Tables 5 and 6 (averages over data sets) and Table 8."""

    name: str
    draft_round: float  # gamma t_p, seconds
    t_q: float
    t_c: float
    tau: float
    r: float
    sd_over_ar: float  # as the paper reports it
    fsd_over_sd: float

    def predicted(self, n: float = 200, gamma: int = 4) -> Latency:
        """What the formulas make of the paper's own times; n is 200 in its experiments."""
        t_p = self.draft_round / gamma
        return predict(n=n, tau=self.tau, gamma=gamma, t_p=t_p, t_q=self.t_q, t_c=self.t_c, r=self.r)


SETUPS = (
    Setup("Vicuna 68m/7B, Jetson", 0.334, 0.497, 0.095, 2.15, 0.6561, 0.69, 1.04),
    Setup("Vicuna 68m/7B, RTX", 0.102, 0.442, 0.042, 2.10, 0.1959, 1.20, 1.06),
    Setup("Vicuna 160m/13B, Jetson", 1.596, 0.616, 0.091, 2.25, 0.6205, 0.42, 1.05),
    Setup("Vicuna 160m/13B, RTX", 0.555, 0.618, 0.046, 2.40, 0.2795, 0.94, 1.10),
    Setup("Vicuna 68m/Llama2 7B, Jetson", 0.301, 0.522, 0.096, 4.03, 0.3994, 1.35, 1.11),
    Setup("Vicuna 68m/Llama2 7B, RTX", 0.099, 0.467, 0.047, 3.54, 0.0963, 1.94, 1.06),
    Setup("Qwen2-VL 2B/7B, Go2", 0.288, 0.620, 0.120, 2.92, 0.5563, 0.90, 1.34),
)


# ------------------------------------------------------------------------------------------------- dollars


@dataclass(frozen=True)
class Prices:
    """Dollars for a million tokens, read (in) and written (out), of a draft and a target model."""

    name: str
    draft_in: float
    draft_out: float
    target_in: float
    target_out: float

    def __post_init__(self) -> None:
        check_amounts(**{name: value for name, value in vars(self).items() if name != "name"})


PRICES = (  # Table 1
    Prices("Together AI, Qwen1.5 0.5B/72B", 0.1, 0.1, 0.9, 0.9),
    Prices("OpenRouter, llama-3.1 8b/405b", 0.02, 0.05, 0.9, 0.9),
    Prices("Groq, llama3 8b/70b", 0.05, 0.08, 0.59, 0.79),
    Prices("OpenRouter, Qwen-2-VL 7B/72B", 0.2, 0.2, 0.7, 0.7),
)


@dataclass(frozen=True)
class ApiCost:
    """Dollars for all requests: target alone, both models in the cloud, the draft at the edge."""

    ar: float
    cloud_sd: float
    edge_cloud_sd: float


def api_cost(
    prices: Prices,
    *,
    gamma: int = 4,
    tau: float = 2.5,
    requests: float = 1e6,
    input_tokens: float = 100,
    output_tokens: float = 500,
) -> ApiCost:
    """The costs of Table 1, whose request shape is the default.

    A target pass is billed as one token written, the prompt once; draft tokens as written, and at the edge not at all.
    """
    check_amounts(requests=requests, input_tokens=input_tokens, output_tokens=output_tokens)
    _check_round(tau, gamma)
    millions = requests / 1e6
    passes = output_tokens / tau
    edge = input_tokens * prices.target_in + passes * prices.target_out
    draft = input_tokens * prices.draft_in + passes * gamma * prices.draft_out
    return ApiCost(
        ar=millions * (input_tokens * prices.target_in + output_tokens * prices.target_out),
        cloud_sd=millions * (edge + draft),
        edge_cloud_sd=millions * edge,
    )
