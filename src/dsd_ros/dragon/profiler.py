# SPDX-License-Identifier: Apache-2.0
"""What the scheduler decides by: how long each side takes for a draft, the link's round trip, and acceptance rates.

Source: "Efficient Distributed Retrieval-Augmented Generation for Enhancing Language Model Performance" (DRAGON),
section 5.2. The paper measures the models offline and the link with ping, sockperf and iperf3; here the answers' own
messages are timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsd_ros.dragon.scheduler import Estimates
from dsd_ros.dragon.settings import SIDES

_WEIGHT = 0.2  # zeta, of a new decoding step or round trip
_ACCEPTANCE_WEIGHT = 0.05


class Average:
    """A moving average; at first the mean of all observations and of ``seen`` earlier ones of ``value``."""

    def __init__(self, weight: float = _WEIGHT, value: float = 0.0, seen: int = 0) -> None:
        self.value, self._weight, self._seen = value, weight, seen

    def observe(self, value: float) -> None:
        """Record a measurement."""
        self._seen += 1
        self.value += max(self._weight, 1.0 / self._seen) * (value - self.value)


def _acceptance() -> Average:
    return Average(_ACCEPTANCE_WEIGHT, 0.5, 4)


@dataclass
class Profile:
    """What one side has measured of both sides and the link, in seconds; kept from question to question."""

    delays: dict[str, Average] = field(default_factory=lambda: {side: Average() for side in SIDES})
    acceptance: dict[str, Average] = field(default_factory=lambda: {side: _acceptance() for side in SIDES})
    link: Average = field(default_factory=Average)

    def estimates(self) -> Estimates:
        """The averages; a time is 0 while nothing is known of it."""
        device, cloud = SIDES
        return Estimates(
            self.delays[device].value, self.delays[cloud].value, self.link.value,
            self.acceptance[device].value, self.acceptance[cloud].value,
        )  # fmt: skip
