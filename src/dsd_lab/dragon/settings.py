# SPDX-License-Identifier: Apache-2.0
"""What the DRAGON paper varies: as settings, which are flags, too, and as the benches' variants. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsd_lab.papers.dragon_schedules import SCHEDULES
from dsd_lab.report import BenchError
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


@dataclass(frozen=True)
class Variant:
    """A method and what it sends, as a bench measures it."""

    label: str
    method: str
    evidence: str = "sparse"
    temperature: float = 0.0
    randomness: str = "shared"

    def settings(self, **others: Any) -> AblationSettings:
        return AblationSettings(
            temperature=self.temperature, evidence=self.evidence, randomness=self.randomness, **others
        )  # fmt: skip


VARIANTS = {
    variant.label: variant
    for variant in (
        Variant("dragon", "dragon"),
        Variant("dragon, full", "dragon", "full"),
        Variant("dragon, sampled", "dragon", temperature=1.0),
        Variant("dragon, independent", "dragon", temperature=1.0, randomness="independent"),
        Variant("drdg-tw", "drdg-tw"),
        Variant("drdg-tw, full", "drdg-tw", "full"),
        Variant("drdg-sw", "drdg-sw"),
        Variant("drdg-sw, full", "drdg-sw", "full"),
        *(Variant(method, method) for method in ("drcg-text", "drcg-kv", "crcg", "crcg-cloud", "device", "cloud")),
    )
}


def variants_named(names: Sequence[str], usual: Sequence[Variant]) -> Sequence[Variant]:
    """The variants of these names, or the ``usual``; BenchError."""
    for name in names:
        if name not in VARIANTS:
            raise BenchError(f"there is no variant {name!r}; name some of {'; '.join(VARIANTS)}")
    return [VARIANTS[name] for name in names] or usual
