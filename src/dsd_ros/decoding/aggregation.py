# SPDX-License-Identifier: Apache-2.0
"""The next token of two sides with documents of their own: p = eta^d p^d + eta^c p^c, device and cloud.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON):
equations 2 and 3 (eta). The token is argmax p or, with shared randomness (``coupling``), argmax(log p + G), where the
paper draws independently (Algorithm 1: ``reference.aggregate``).

The decided token is distributed as p, for any drafts, even if only part of the other side's distribution is known.
Unknown entries are intervals; a decision is made only if no value in them could change it, else the result names the
entries that are needed exactly. Intervals and exact values go through the same float64 operations, device term first.
IEEE 754 rounding is monotone, so a decision from intervals is the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dsd_ros.decoding.coupling import Floats, _log
from dsd_ros.decoding.settings import SamplingError

DEVICE, CLOUD = "device", "cloud"
MAX_ASKED = 1024  # entries in one question, the most promising ones first
_MASS = 1e-3  # tolerance for the sum of a distribution in single precision
_OUTWARD = 1.0 + 1e-12  # more than the error of exp
_SLACK = 1e-9  # of a score; far more than the error of np.log


class Head(NamedTuple):
    """The part of a distribution p that usually decides: its likeliest tokens, and a bound on all others."""

    ids: NDArray[np.int64]  # (k,) int64 ascending
    values: NDArray[np.float32]  # (k,) float32, their p
    bound: float  # p(x) e^G(x) <= bound for every other token; without noise p(x) <= bound


class Undecided(NamedTuple):
    """More must be known: the exact entries ``ids``, ascending, of one side's distribution."""

    side: str  # "device" or "cloud"
    ids: list[int]


class Decision(NamedTuple):
    """The emitted token, and which sides had drafted it."""

    token: int
    device_accepted: bool
    cloud_accepted: bool


class BoundedDistribution:
    """What is known of a distribution p (V,): ``lo`` <= p <= ``hi``, both (V,) float64, equal where p is exact."""

    def __init__(self, lo: Floats, hi: Floats) -> None:
        self.lo, self.hi = lo, hi

    @classmethod
    def whole(cls, p: torch.Tensor | NDArray[np.floating]) -> BoundedDistribution:
        """All of p (V,); SamplingError if it is not a distribution."""
        row = _row(p)
        # NaN fails every comparison.
        if not (row.ndim == 1 and bool((row >= 0.0).all()) and abs(float(row.sum()) - 1.0) <= _MASS):
            raise SamplingError("a side's distribution is invalid: its entries must be 0 or more and sum to 1")
        return cls(row, row)

    @classmethod
    def of_head(cls, head: Head, vocab_size: int, noise: Floats | None) -> BoundedDistribution:
        """What follows from a head; ``noise`` (V or more,) as in ``head_of``.

        SamplingError for a head that no distribution over ``vocab_size`` tokens can have.
        """
        ids, values = np.asarray(head.ids), np.asarray(head.values)
        bound = float(head.bound)
        if ids.ndim != 1 or ids.shape != values.shape or ids.dtype.kind not in "iu":
            raise SamplingError("a head must have one value for each of its ids")
        if len(ids) and not (int(ids[0]) >= 0 and int(ids[-1]) < vocab_size and bool((ids[1:] > ids[:-1]).all())):
            raise SamplingError(f"a head's ids must ascend, from 0 to below {vocab_size}")
        exact = values.astype(np.float64)
        if not (bool((exact >= 0.0).all()) and float(exact.sum()) <= 1.0 + _MASS):
            raise SamplingError("a head's values must be 0 or more and sum to at most 1")
        if not (math.isfinite(bound) and bound >= 0.0):
            raise SamplingError(f"a head's bound is {bound}; it must be a number of 0 or more")
        if noise is None:
            hi = np.full(vocab_size, min(bound, 1.0 + _MASS))
        else:
            hi = bound * np.exp(-_of_size(noise, vocab_size)) * _OUTWARD
            np.minimum(hi, 1.0 + _MASS, out=hi)
        lo = np.zeros(vocab_size)
        lo[ids] = hi[ids] = exact
        if not float(hi.sum()) >= 1.0 - _MASS:
            raise SamplingError(
                "a head's bound is too low for its values: the other tokens could not make up for what they lack of 1"
            )
        return cls(lo, hi)

    def reveal(self, ids: Sequence[int] | NDArray[np.int64], values: Sequence[float] | NDArray[np.float32]) -> None:
        """Add the exact entries of ``ids``; SamplingError, and no change, if they contradict what is known."""
        where, exact = np.asarray(ids, np.int64), np.asarray(values, np.float64)
        if where.ndim != 1 or where.shape != exact.shape:
            raise SamplingError("revealed entries must be one value for each id")
        if not len(where):
            return
        if int(where.min()) < 0 or int(where.max()) >= len(self.lo):
            raise SamplingError(f"a revealed id is out of range; use 0 to {len(self.lo) - 1}")
        if not bool(((exact >= self.lo[where]) & (exact <= self.hi[where])).all()):
            raise SamplingError("a revealed probability contradicts the head that was sent before")
        lo, hi = self.lo.copy(), self.hi.copy()
        lo[where], hi[where] = exact, exact
        if not bool((lo[where] == exact).all()):
            raise SamplingError("an id was revealed twice, with different probabilities")
        if not float(lo.sum()) <= 1.0 + _MASS:
            raise SamplingError("the revealed probabilities sum to more than 1")
        self.lo, self.hi = lo, hi


@dataclass(frozen=True)
class SideDraft:
    """One side's part of a position: its draft, the log of its documents' weight h, its distribution."""

    token: int
    log_weight: float
    known: BoundedDistribution


def head_of(p: torch.Tensor, noise: Floats | None, size: int, token: int) -> Head:
    """The head of p (V,): the ``size`` tokens (0: all) with the largest log p + G (without noise: p), and ``token``.

    noise: G (V or more,). Tokens of probability 0 are left out. The bound is rounded up to single precision.
    """
    row = _row(p)
    if not 0 <= token < len(row):
        raise SamplingError(f"token {token} is outside its distribution over {len(row)} tokens")
    weights = row if noise is None else row * np.exp(_of_size(noise, len(row)))
    chosen = np.arange(len(row))
    if 0 < size < len(row):
        chosen = np.argpartition(weights, len(row) - size)[len(row) - size :]
    ids = np.union1d(chosen[weights[chosen] > 0.0], [token]).astype(np.int64)
    outside = weights.copy()
    outside[ids] = 0.0
    most = float(outside.max(initial=0.0)) * _OUTWARD
    bound = np.float32(most)
    if float(bound) < most:
        bound = np.nextafter(bound, np.float32(np.inf))
    return Head(ids, row[ids].astype(np.float32), float(bound))


def eta(log_weight_device: float, log_weight_cloud: float) -> tuple[float, float]:
    """Device's and cloud's share h / (h^d + h^c) from log h (equation 3); minus infinity means no documents."""
    highest = max(log_weight_device, log_weight_cloud)
    if not math.isfinite(highest) or math.isnan(log_weight_device + log_weight_cloud):
        raise SamplingError(
            f"the sides' log weights are {log_weight_device} and {log_weight_cloud}; at least one must be finite"
        )
    device, cloud = math.exp(log_weight_device - highest), math.exp(log_weight_cloud - highest)
    return device / (device + cloud), cloud / (device + cloud)


def mixture(
    p_device: torch.Tensor, p_cloud: torch.Tensor, log_weight_device: float, log_weight_cloud: float
) -> torch.Tensor:
    """p = eta^d p^d + eta^c p^c (equation 2), (V,) float64 over the larger of the two vocabularies."""
    shares = eta(log_weight_device, log_weight_cloud)
    return torch.from_numpy(_mixed(_row(p_device), _row(p_cloud), shares))


def decide(device: SideDraft, cloud: SideDraft, noise: Floats | None) -> Decision | Undecided:
    """The token of one position, or what must be known first; either vocabulary may be the larger.

    argmax(log p + G) with noise G (V or more,), or argmax p if ``noise`` is None; the lowest id if several are equal.
    Called again after each answer is revealed, it reaches the decision that whole distributions give. SamplingError for
    offers that no side can make.
    """
    shares = shares_of(device, cloud)
    lowest = _mixed(device.known.lo, cloud.known.lo, shares)
    highest = _mixed(device.known.hi, cloud.known.hi, shares)
    found = settled(lowest, highest, noise, device.known, cloud.known)
    if found is None:
        raise SamplingError("no token has a probability")
    if isinstance(found, Undecided):
        return found
    return Decision(found, found == device.token, found == cloud.token)


def shares_of(device: SideDraft, cloud: SideDraft) -> tuple[float, float]:
    """``eta`` of two sides' drafts; SamplingError for drafts that no side can make."""
    for side, offer in ((DEVICE, device), (CLOUD, cloud)):
        if not 0 <= offer.token < len(offer.known.hi):
            raise SamplingError(f"the {side}'s draft {offer.token} is outside its vocabulary")
        if not offer.known.hi[offer.token] > 0.0:
            raise SamplingError(f"the {side}'s draft {offer.token} has no probability in its own distribution")
    return eta(device.log_weight, cloud.log_weight)


def settled(
    lowest: Floats, highest: Floats, noise: Floats | None, device: BoundedDistribution, cloud: BoundedDistribution
) -> int | Undecided | None:
    """The argmax of weights between ``lowest`` and ``highest`` (V,), of log weight + G if there is noise.

    None if all weights are 0. A weight is exact if the entries of both sides are.
    """
    if noise is None:
        upper, best = highest, float(lowest.max(initial=0.0))
    else:
        noise = _of_size(noise, len(highest))
        with np.errstate(divide="ignore"):
            upper = np.log(highest) + noise
            best = float((np.log(lowest) + noise).max(initial=-np.inf)) - _SLACK
    candidates = np.flatnonzero((upper >= best) & (highest > 0.0))
    if not len(candidates):
        return None
    if len(candidates) == 1 and lowest[candidates[0]] > 0.0:
        return int(candidates[0])
    for side, known in ((DEVICE, device), (CLOUD, cloud)):
        inside = candidates[candidates < len(known.hi)]
        missing = inside[known.lo[inside] < known.hi[inside]]
        if len(missing) > MAX_ASKED:
            missing = missing[np.argpartition(-upper[missing], MAX_ASKED)[:MAX_ASKED]]
        if len(missing):
            return Undecided(side, np.sort(missing).tolist())
    # coupling's logarithm, because it gives the same bits on every machine.
    weights = highest[candidates]
    exact = weights if noise is None else _log(weights) + noise[candidates]
    return int(candidates[exact.argmax()])


def _mixed(device: Floats, cloud: Floats, shares: tuple[float, float]) -> Floats:
    size = max(len(device), len(cloud))
    return padded(shares[0] * device, size) + padded(shares[1] * cloud, size)


def _row(p: torch.Tensor | NDArray[np.floating]) -> Floats:
    if isinstance(p, torch.Tensor):
        p = p.detach().cpu().numpy()
    return np.asarray(p).astype(np.float64)


def padded(row: Floats, size: int) -> Floats:
    """Pad a smaller vocabulary's row with zeros."""
    return row if len(row) == size else np.concatenate([row, np.zeros(size - len(row))])


def _of_size(noise: Floats, size: int) -> Floats:
    if len(noise) < size:
        raise SamplingError(f"the noise is for {len(noise)} tokens, the distribution of {size}")
    return noise[:size]
