# SPDX-License-Identifier: Apache-2.0
"""DRAGON's Algorithm 1, speculative aggregation with random numbers of each side's own, where little of p is known.

The product decides by shared noise instead (``dsd_ros.decoding.aggregation``, whose intervals this uses).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsd_ros.decoding.aggregation import CLOUD, DEVICE, Decision, SideDraft, Undecided, padded, settled, shares_of
from dsd_ros.decoding.coupling import Floats


class IndependentDraws(NamedTuple):
    """The algorithm's uniforms for one position, in [0, 1); deciding again after a question needs the same ones."""

    side: float  # sigma: below 1/2 the device's draft is tested, else the cloud's
    keep: float  # sigma^s


def decide_independently(
    device: SideDraft, cloud: SideDraft, noise: Floats, draws: IndependentDraws
) -> Decision | Undecided:
    """As ``aggregation.decide``; the residual is drawn as argmax(log residual + G), so drafts must not depend on G.

    Lines 6 to 15, only for the side that the first draw chooses: the other side's x~ is not needed.
    """
    found = _token(device, cloud, noise, draws)
    if isinstance(found, Undecided):
        return found
    return Decision(found, found == device.token, found == cloud.token)


def _token(device: SideDraft, cloud: SideDraft, noise: Floats, draws: IndependentDraws) -> int | Undecided:
    shares = shares_of(device, cloud)
    by_device = draws.side < 0.5
    own, other = (device.known, cloud.known) if by_device else (cloud.known, device.known)
    own_side, other_side = (DEVICE, CLOUD) if by_device else (CLOUD, DEVICE)
    token = device.token if by_device else cloud.token
    own_share, other_share = shares if by_device else shares[::-1]
    if own.lo[token] < own.hi[token]:
        return Undecided(own_side, [token])
    # Keep with probability min(1, eta^s + eta^o p^o(x) / p^s(x)), multiplied out.
    own_p = float(own.hi[token])
    inside = token < len(other.hi)
    least, most = (
        own_share * own_p + other_share * (float(bounds[token]) if inside else 0.0) for bounds in (other.lo, other.hi)
    )
    if draws.keep * own_p < least:
        return token
    if draws.keep * own_p < most:
        return Undecided(other_side, [token])
    size = max(len(own.hi), len(other.hi))
    lowest = np.maximum(padded(other.lo, size) - padded(own.hi, size), 0.0)
    highest = np.maximum(padded(other.hi, size) - padded(own.lo, size), 0.0)
    found = settled(lowest, highest, noise, device.known, cloud.known)
    # p^o == p^s leaves nothing to draw, and then only rounding can have rejected.
    return token if found is None else found
