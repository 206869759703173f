# SPDX-License-Identifier: Apache-2.0
"""Which side of DRAGON aggregates, by the product's rule and by those that the paper compares.

auto: the product's (``dsd_ros.dragon.scheduler``). delta-z: the paper's, the side that is better in the long run
(equation 8). device, cloud: always that side. random: either, by chance.
"""

from __future__ import annotations

import random

from dsd_ros.dragon.scheduler import Estimates, long_run, pays, switches
from dsd_ros.dragon.settings import SIDES

SCHEDULES = ("auto", "delta-z", *SIDES, "random")


def latency(c_own: float, c_other: float, rtt: float, acceptance_other: float) -> float:
    """Z, seconds per token in the long run if the own side aggregates (equation 7).

    a max(c, c') + (1 - a) max(c, c' + rtt): the other side's draft, of acceptance a, is late only after a rejection.
    """
    return acceptance_other * max(c_own, c_other) + (1.0 - acceptance_other) * max(c_own, c_other + rtt)


class Schedule:
    """One of SCHEDULES, on one side of one answer."""

    def __init__(self, name: str, seed: int = 0) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"schedule is {name}; use one of {', '.join(SCHEDULES)}")
        self._name, self._random = name, random.Random(seed)

    def switches(
        self,
        estimates: Estimates,
        current: str,
        device_accepted: bool,
        cloud_accepted: bool,
        own_ahead: int = 0,
        other_ahead: int = 0,
    ) -> bool:
        """As ``dsd_ros.dragon.scheduler.switches``."""
        if self._name == "auto":
            return switches(estimates, current, device_accepted, cloud_accepted, own_ahead, other_ahead)
        if self._name == "delta-z":
            return pays(estimates, long_run(estimates, current))
        chosen = self._random.choice(SIDES) if self._name == "random" else self._name
        return chosen != current
