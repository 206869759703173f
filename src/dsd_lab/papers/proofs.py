# SPDX-License-Identifier: Apache-2.0
"""What it costs to prove a draft to the target: bits, seconds and speed-ups, by the papers DSSD and TSLT.

Sources: "DSSD: Efficient Edge-Device LLM Deployment and Collaborative Inference via Distributed Split Speculative
Decoding" and "Fast Collaborative Inference via Distributed Speculative Decoding" (TSLT). Letters as in theory.py, and:

    alpha   expected acceptance of a position     t_ntt   both ways over the link without sending, seconds
    V       vocabulary                            b_prob  bits of a probability, b_idx of a token id
    K       ids kept by truncation                R       rate of the link, bit/s
    <k_1..k_L>  children of every node of a tree's layers 0..L-1; a sequence of gamma is <1..1>

Both papers take acceptances as independent and alike, know no prompt and no end of a reply, and count distributions
only; ``payload`` adds the ids. TheoryError for values out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsd_lab.papers.theory import TheoryError, check_amounts, check_gamma, check_positive, check_shares

PROOFS = ("full", "split", "truncated", "coupled")


def _check_config(config: Sequence[int]) -> None:
    if not config or min(config) < 1:
        raise TheoryError(f"the tree is {list(config)}; give every layer at least 1 child a node")


# -------------------------------------------------------------------------------------------------- tokens


def accepted_tokens(rates: Sequence[float]) -> float:
    """Layers of a tree, or positions of a sequence, accepted on average: sum_l prod_(i<=l) rates_i.

    rates: of each layer where the one before was accepted (theta where there are several candidates). (TSLT equation 28
    has L alpha here, which also counts what comes after a rejection.)
    """
    reached, total = 1.0, 0.0
    for layer, rate in enumerate(rates, 1):
        check_shares(**{f"the acceptance of layer {layer}": rate})
        reached *= rate
        total += reached
    return total


def nodes(config: Sequence[int]) -> int:
    """Drafted tokens of a tree <k_1..k_L>: the widths W_l = k_1 ... k_l summed (TSLT equation 24)."""
    _check_config(config)
    width, total = 1, 0
    for children in config:
        width *= children
        total += width
    return total


def distributions(config: Sequence[int]) -> int:
    """|Q| = 1 + sum_(l<L) prod_(i<=l) k_i, the distributions a tree is drawn from: TSLT equation 27."""
    _check_config(config)
    return 1 + (nodes(config[:-1]) if len(config) > 1 else 0)


# ---------------------------------------------------------------------------------------- bits and seconds


def index_bits(vocabulary: int) -> int:
    """b_idx = ceil(log2 V)."""
    if vocabulary < 2:
        raise TheoryError(f"the vocabulary has {vocabulary} tokens; give at least 2")
    return (vocabulary - 1).bit_length()


def distribution_seconds(*, entries: float, b_prob: float, rate: float, b_idx: float = 0.0) -> float:
    """T_V, sending one distribution: V (b_prob + b_idx) / R; TSLT equations 1 to 3, DSSD 1, 2 and 4 with b_idx = 0."""
    check_amounts(entries=entries, b_prob=b_prob, b_idx=b_idx)
    check_positive(rate=rate)
    return entries * (b_prob + b_idx) / rate


def dsd_comm_seconds(*, sent: int, t_v: float, t_ntt: float = 0.0) -> float:
    """DSD: every distribution goes up, ``sent t_v + t_ntt``; DSSD equation 5, TSLT equation 4, |Q| t_v in 26."""
    check_gamma(sent)
    check_amounts(t_v=t_v, t_ntt=t_ntt)
    return sent * t_v + t_ntt


def dssd_comm_seconds(*, alpha: float, gamma: int, t_v: float, t_ntt: float = 0.0) -> float:
    """DSSD: one distribution down after a rejection, ``(1 - alpha^gamma) t_v + t_ntt``: equations 9 to 12."""
    check_gamma(gamma)
    check_shares(alpha=alpha)
    check_amounts(t_v=t_v, t_ntt=t_ntt)
    return (1 - alpha**gamma) * t_v + t_ntt


def round_seconds(*, gamma: int, t_p: float, t_q: float, t_comm: float) -> float:
    """``gamma t_p + t_comm + t_q``; DSSD equations 6, 7 and 13, TSLT 5 and 26, where gamma is the tree's depth L."""
    check_gamma(gamma)
    check_amounts(t_p=t_p, t_q=t_q, t_comm=t_comm)
    return gamma * t_p + t_comm + t_q


def speedup(*, tokens: float, seconds: float, t_q: float) -> float:
    """Tokens a second over the target alone, which takes t_q for one: DSSD 14 and 15, TSLT 10."""
    check_amounts(tokens=tokens, t_q=t_q)
    check_positive(seconds=seconds)
    return tokens * t_q / seconds


# ---------------------------------------------------------------------------- the four proofs, ids included


@dataclass(frozen=True)
class Payload:
    """Bits of one round on average, message headers apart."""

    up: float
    down: float


def payload(
    proof: str,
    *,
    config: Sequence[int],
    alpha: float,
    vocabulary: int,
    b_prob: int = 16,
    b_chance: int | None = None,
    kept: int = 0,
    target_kept: int = 0,
) -> Payload:
    """What a round sends in each of ``PROOFS``, with the ids and counts that the papers leave out.

    alpha: acceptance of each layer, in split proofs of each node's first child. kept: ids of a truncated distribution.
    target_kept: ids left in p by its sampling settings (0: all). b_chance: bits of a split proof's probability on its
    way up. Up go ids, parents of a tree (a byte each) and distributions; split: a probability per token and the
    resampled token. Down go a count or node and a token; split: after a rejection its distribution, in a tree also
    those after the rejected child's siblings and the nodes below them.
    """
    if proof not in PROOFS:
        raise TheoryError(f"there is no proof {proof!r}; use one of {', '.join(PROOFS)}")
    check_shares(alpha=alpha)
    check_amounts(b_prob=b_prob)
    index, drafted, rows = index_bits(vocabulary), nodes(config), distributions(config)
    tree = drafted > len(config)
    up = float(drafted * (index + 8 * tree))
    count = drafted.bit_length()
    if proof == "full":
        up += rows * vocabulary * b_prob
    elif proof == "truncated":
        up += rows * _sparse_bits(kept, vocabulary, b_prob)
    elif proof == "split":
        rejected = 1 - alpha ** len(config)
        up += drafted * (b_prob if b_chance is None else b_chance) + rejected * index
        sent = _sparse_bits(target_kept, vocabulary, b_prob) if target_kept else vocabulary * b_prob
        down = sent * sum(alpha**depth * (1 - alpha) * _rows_down(config[depth:]) for depth in range(len(config)))
        return Payload(up, count + down + (1 - rejected) * index)
    return Payload(up, float(count + index))


def _rows_down(config: Sequence[int]) -> int:
    """Distributions that a split rejection of a first child sends, the levels from there on being ``config``."""
    below = nodes(config[1:]) if len(config) > 1 else 0
    return 1 + (config[0] - 1) * (1 + below)


def _sparse_bits(entries: int, vocabulary: int, b_prob: int) -> int:
    if not 1 <= entries <= vocabulary:
        raise TheoryError(f"{entries} of {vocabulary} ids are kept; keep 1 or more, and no more")
    return entries * (b_prob + index_bits(vocabulary))


# ----------------------------------------------------------------------------- what the DSSD paper prints

TABLE_1_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
TABLE_1_GAMMAS = (2, 4, 6, 8)


def dssd_table_1(t_v: float = 0.008, t_ntt: float = 0.020) -> list[list[tuple[float, float]]]:
    """1 - alpha^gamma and T_comm in seconds, a row for each of ``TABLE_1_GAMMAS``: the paper's Table 1."""
    return [
        [
            (1 - alpha**gamma, dssd_comm_seconds(alpha=alpha, gamma=gamma, t_v=t_v, t_ntt=t_ntt))
            for alpha in TABLE_1_ALPHAS
        ]
        for gamma in TABLE_1_GAMMAS
    ]


@dataclass(frozen=True)
class Transfer:
    """A row of the DSSD paper's Table 2, OPT-125M to 6.7B: seconds of communication for 128 tokens."""

    t_ntt: float
    rate: float  # bit/s
    gamma: int
    dsd: float
    dssd: float

    @property
    def rounds(self) -> float:
        """Rounds by the DSSD column, which is t_ntt times a whole number. 31 where t_ntt is 0."""
        return round(self.dssd / self.t_ntt) if self.t_ntt else 31

    def predicted_dsd(self, vocabulary: int = 50272, b_prob: int = 32) -> float:
        """Equation 5 over all rounds, with OPT's vocabulary in single precision."""
        t_v = distribution_seconds(entries=vocabulary, b_prob=b_prob, rate=self.rate)
        return self.rounds * dsd_comm_seconds(sent=self.gamma, t_v=t_v, t_ntt=self.t_ntt)

    def predicted_dssd(self, alpha: float = 0.61, vocabulary: int = 50272, b_prob: int = 32) -> float:
        """Equation 9 over all rounds, with the paper's alpha and a whole distribution a rejection."""
        t_v = distribution_seconds(entries=vocabulary, b_prob=b_prob, rate=self.rate)
        return self.rounds * dssd_comm_seconds(alpha=alpha, gamma=self.gamma, t_v=t_v, t_ntt=self.t_ntt)


TABLE_2 = (
    Transfer(0.0, 100e6, 8, 3.91, 0.01),
    Transfer(0.02, 100e6, 8, 4.60, 0.62),
    Transfer(0.05, 10e6, 8, 41.44, 1.55),
    Transfer(0.02, 50e6, 8, 8.59, 0.62),
    Transfer(0.05, 50e6, 8, 9.52, 1.55),
    Transfer(0.05, 10e6, 6, 8.12, 0.40),
)
