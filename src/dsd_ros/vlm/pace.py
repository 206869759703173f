"""Holding a model's forward passes to given times, to measure on one machine what another would do.

The model runs for real and its results are its own; only the clock is stretched. A model that is
slower than its pace keeps its own time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The least time of one forward pass of a model, set as ``VisionLanguageModel.pace``.

    forward_seconds: one pass over one sequence, however many tokens it feeds (a prefill too).
    batch_growth: how much longer a pass over eight sequences takes than over one, as a share; the
        growth is linear (FSD Table 9, draft model on the edge: 8.97 ms for 7.76 ms, about 0.15).
    Raises ValueError for a value that is negative or not finite.
    """

    forward_seconds: float
    batch_growth: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_seconds", "batch_growth"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a pace is {value}; use a number of 0 or more")

    def seconds(self, batch: int = 1) -> float:
        """The least seconds of a pass over ``batch`` sequences."""
        return self.forward_seconds * (1 + self.batch_growth * (batch - 1) / 7)

    def begin(self, layers: int, batch: int = 1) -> PacedPass:
        """Start the clock of one pass through ``layers`` decoder layers."""
        return PacedPass(time.monotonic(), self.seconds(batch) / layers)


@dataclass(frozen=True)
class PacedPass:
    """One pass under way: after layer i (from 1) at least i shares of its time have gone by."""

    began: float
    layer_seconds: float

    def layer_done(self, layer: int) -> None:
        """Sleep until layer ``layer``, counted from 1, would have been done at this pace."""
        due = self.began + layer * self.layer_seconds
        while (missing := due - time.monotonic()) > 0:
            time.sleep(missing)
