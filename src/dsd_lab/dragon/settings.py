# SPDX-License-Identifier: Apache-2.0
"""What the DRAGON paper varies, as settings. Loads no torch: they are flags, too."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_lab.papers.dragon_schedules import SCHEDULES
from dsd_ros.dragon.settings import HEAD, SIDES, AggregationSettings
from dsd_ros.options import option

RANDOMNESS = ("shared", "independent")
EVIDENCE = ("sparse", "full", "lossy-nucleus")


@dataclass(frozen=True)
class AblationSettings(AggregationSettings):
    """``AggregationSettings``, and what the paper varies."""

    randomness: str = option(
        "shared",
        "how sampled tokens are drawn. shared: with noise that both sides derive from the seed; independent: each "
        "side with its own, as in the DRAGON paper",
        choices=RANDOMNESS,
    )
    evidence: str = option(
        "sparse",
        "what travels of a side's distribution. sparse: its decisive tokens and a bound on the others; full: all of "
        "it; lossy-nucleus: a nucleus of 0.8, which is not exact",
        choices=EVIDENCE,
    )
    head: int = option(HEAD, "tokens in sparse evidence", 1, 4096)
    schedule: str = option(
        "auto", "which side aggregates. auto: by cost; delta-z: by the DRAGON paper's rule", choices=SCHEDULES
    )
    aggregator: str = option("device", "side that begins to aggregate", choices=SIDES)
