# SPDX-License-Identifier: Apache-2.0
"""Sampling with shared randomness: both sides derive the same noise, so no distribution travels.

Gumbel coupling (Daliri, Musco and Suresh 2024, arXiv 2408.07978): argmax(log p + G) with standard Gumbel noise G is
a sample of p. The draft's argmax(log q + G) with the same G equals it with a probability of at least
(1 - TV) / (1 + TV), and the target's choice never depends on the draft.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from dsd_ros.decoding.settings import SamplingError

Floats = NDArray[np.float64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the counter's stride in SplitMix64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the multipliers of its finalizer
_HALVES = 2.0**-52
_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_TERMS = 12  # of the logarithm's series; further ones are below one part in 2^53


@lru_cache(maxsize=32)  # a pass' exits and the pre-drafting workers ask for the same rows
def gumbel(seed: int, reply: int, position: int, size: int) -> Floats:
    """Standard Gumbel noise (size,) float64 for the token at ``position`` (from 0) of a reply; read-only.

    The bits are the same on every machine: an integer counter hash gives a 53-bit uniform, and its logarithms use
    only operations that IEEE 754 rounds exactly. The noise of an id does not depend on ``size``, so the models may
    pad their vocabularies differently.
    """
    key = _key(seed, reply, position)
    counters = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(key)
    bits = _scrambled(counters) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * _HALVES  # never 0 or 1
    noise = -_log(-_log(uniform))
    noise.setflags(write=False)
    return noise


def scores(probabilities: torch.Tensor, noise: Floats) -> Floats:
    """log p + G, (..., V) float64, of probabilities (..., V) after the sampling transform; -inf where p is 0.

    The highest score is a sample of p, and the k highest are k samples without replacement.
    """
    weights: Floats = probabilities.detach().cpu().double().numpy()
    with np.errstate(divide="ignore"):
        return np.log(weights) + noise


def choose(probabilities: torch.Tensor, noise: Floats) -> int:
    """argmax(log p + G), the sample of p (V,) that the noise selects; the lowest id if several are equal.

    SamplingError for weights that are not probabilities.
    """
    found = scores(probabilities, noise)
    best = int(found.argmax())
    if not np.isfinite(found[best]):
        raise SamplingError("cannot draw from weights that are not probabilities")
    return best


def _key(seed: int, reply: int, position: int) -> int:
    key = 0
    for part in (seed, reply, position):
        key = _mixed(key ^ _mixed(part + _STEP))
    return key


def _mixed(value: int) -> int:
    """SplitMix64's finalizer of one number (Steele, Lea and Flood 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _scrambled(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``_mixed`` of uint64 numbers, which overflow as it requires."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    values = values ^ (values >> np.uint64(31))
    return values


def _log(values: Floats) -> Floats:
    """Natural logarithm of positive float64, the same bits on every machine (libraries differ in the last one).

    log(m 2^e) = e log 2 + 2 artanh((m - 1) / (m + 1)) with m between sqrt(1/2) and sqrt(2).
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    exponent = exponent - small
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(ratio, 1.0 / (2 * _TERMS - 1))
    for term in range(_TERMS - 2, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return exponent * _LN_2 + 2.0 * ratio * series
