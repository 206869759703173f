# SPDX-License-Identifier: Apache-2.0
"""Which side aggregates the next token.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 5.1. Its rule (equation 8) compares the long-run time of a token with either side aggregating. It ignores that a
switch may cost, or save, up to half a round trip: a verdict that rejects the other side's draft has to travel there
anyway, and a side that takes over does not have to send its next draft back. So this one compares the cost of the next
token with and without a switch, given the verdict and the waiting drafts, plus the expected cost of what follows.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import product

from dsd_ros.dragon.settings import SIDES

HYSTERESIS = 0.02  # a switch must gain more than this share of the slower side's decoding step
_ITERATIONS = 20  # each damped by 1/2: to a millionth


@dataclass(frozen=True)
class Estimates:
    """The profiler's estimates: seconds per decoding step and round trip, acceptance rates."""

    device_delay: float
    cloud_delay: float
    round_trip: float
    device_acceptance: float
    cloud_acceptance: float


def delta_z(c_device: float, c_cloud: float, rtt: float, a_device: float, a_cloud: float) -> float:
    """Z if the device aggregates minus Z if the cloud does, seconds per token (equation 8)."""
    ahead = c_cloud - c_device
    if c_device <= c_cloud - rtt:
        return (1.0 - a_cloud) * rtt
    if c_device > c_cloud + rtt:
        return (a_device - 1.0) * rtt
    lost = 1.0 - (a_device if c_device <= c_cloud else a_cloud)
    return lost * ahead + (a_device - a_cloud) * rtt


def wait(own_made: float, other_made: float, way: float, switch: bool) -> float:
    """Seconds from a verdict to the next one, here or, after a ``switch``, there; ``way``: half a round trip.

    ``own_made``, ``other_made``: seconds until each side has made its next draft; below 0 if it has. A wait below 0 is
    time that later tokens win back.
    """
    if switch:
        return max(own_made + way, other_made)
    return max(own_made, other_made + way)


def won_back(waited: float, delay: float, acceptance: float) -> float:
    """Seconds of a wait that later tokens win back, because the slower side goes on drafting.

    It has ``waited`` seconds after its next draft and ``delay`` seconds per draft. The k-th of these drafts is useful
    if it and those before it are accepted on both sides: delay (a + ... + a^m), m = waited / delay, a the product of
    both acceptances.
    """
    if waited <= 0.0 or delay <= 0.0:
        return 0.0
    if acceptance >= 1.0:
        return waited
    missed: float = acceptance ** (waited / delay)
    return delay * acceptance * (1.0 - missed) / (1.0 - acceptance)


def switches(
    estimates: Estimates,
    current: str,
    device_accepted: bool,
    cloud_accepted: bool,
    own_ahead: int = 0,
    other_ahead: int = 0,
) -> bool:
    """Whether the other side should aggregate after a verdict of side ``current`` about both sides' drafts.

    ``own_ahead``, ``other_ahead``: this and the other side's later drafts that wait here; a rejected side has none.
    """
    gain = _gain(estimates, SIDES.index(current), (device_accepted, cloud_accepted), own_ahead, other_ahead)
    # Estimates err: leave the side that is better in the long run only for more than that gain.
    return pays(estimates, gain + min(0.0, long_run(estimates, current)))


def pays(estimates: Estimates, gain: float) -> bool:
    """Whether a switch that gains so many seconds is worth it."""
    return gain > HYSTERESIS * max(estimates.device_delay, estimates.cloud_delay)


def long_run(estimates: Estimates, current: str) -> float:
    """Seconds per token that the other side would save in the long run (equation 8)."""
    found = delta_z(*astuple(estimates))
    return found if current == SIDES[0] else -found


def _gain(estimates: Estimates, side: int, held: tuple[bool, bool], own_ahead: int, other_ahead: int) -> float:
    """Seconds that a switch is expected to save, now and later."""
    delays = (estimates.device_delay, estimates.cloud_delay)
    way, own, other = estimates.round_trip / 2.0, delays[side], delays[1 - side]
    own_made = own * (1 - own_ahead) if held[side] and own_ahead else own
    if not held[1 - side]:
        other_made = other + way  # it has to hear of the rejection first
    elif other_ahead:
        other_made = -way - other * (other_ahead - 1)
    else:
        other_made = other - way  # the last one has just arrived
    later = _difference(estimates)
    made = (own_made, other_made) if side == 0 else (other_made, own_made)
    return _cost(estimates, side, made, False) - _cost(estimates, side, made, True) + (later if side == 0 else -later)


def _cost(estimates: Estimates, side: int, made: tuple[float, float], switch: bool) -> float:
    """A wait less what is won back of it; ``made``: seconds until each side has its next draft."""
    slower = int(estimates.cloud_delay > estimates.device_delay)
    delay = max(estimates.device_delay, estimates.cloud_delay)
    acceptance = estimates.device_acceptance * estimates.cloud_acceptance
    way = estimates.round_trip / 2.0
    waited = wait(made[side], made[1 - side], way, switch)
    there = made[slower] + (way if (side == slower) == switch else 0.0)  # where it is decided
    return waited - won_back(waited - max(0.0, there), delay, acceptance)


def _difference(estimates: Estimates) -> float:
    """The extra cost, in seconds, of the device aggregating from now on, if every later switch is made when it pays.

    A Markov decision process with two states, the sides, solved by relative value iteration. A side that is no faster
    than the other is assumed to have no drafts ahead.
    """
    delays = (estimates.device_delay, estimates.cloud_delay)
    shares = (estimates.device_acceptance, estimates.cloud_acceptance)
    way = estimates.round_trip / 2.0
    outcomes: list[tuple[float, list[float], list[float]]] = []
    for held in product((True, False), repeat=2):
        chance, costs = 1.0, list[list[float]]()
        for side, other in ((0, 1), (1, 0)):
            chance *= shares[side] if held[side] else 1.0 - shares[side]
            own_late = not held[side] or delays[side] >= delays[other]
            own_made = delays[side] if own_late else -way
            other_made = delays[other] + (-way if held[other] else way)
            made = (own_made, other_made) if side == 0 else (other_made, own_made)
            costs.append([_cost(estimates, side, made, switch) for switch in (False, True)])
        outcomes.append((chance, costs[0], costs[1]))
    ahead = 0.0
    for _ in range(_ITERATIONS):
        change = sum(
            chance * (min(device[0] + ahead, device[1]) - min(cloud[0], cloud[1] + ahead))
            for chance, device, cloud in outcomes
        )
        ahead += 0.5 * (change - ahead)  # damped, since two states may take turns
        if abs(change - ahead) < 1e-5:
            break
    return ahead
