# SPDX-License-Identifier: Apache-2.0
"""The settings of questions that both sides answer: one schema for flags, ROS parameters and config files."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.options import check_options, option

RANDOMNESS = ("shared", "independent")
EVIDENCE = ("sparse", "full", "lossy-nucleus")
SCHEDULES = ("auto", "delta-z", "device", "cloud", "random")
SIDES = ("device", "cloud")
BEGINNERS = ("auto", *SIDES)
ON_LOSS = ("fail", "alone")
NUCLEUS = 0.8  # probability mass that "lossy-nucleus" evidence keeps, as in the paper's code


class AggregationSettingsError(ValueError):
    """A setting is out of range: one sentence."""


@dataclass(frozen=True)
class AggregationSettings:
    """How a question is answered with the cloud. AggregationSettingsError for a value out of range."""

    documents: int = option(2, "most documents used per side", 0, 64)
    temperature: float = option(0.0, "sampling temperature; 0: greedy", 0.0, 100.0)
    seed: int = option(0, "seed of the random draws", 0, (1 << 63) - 1)
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
    head: int = option(16, "tokens in sparse evidence", 1, 4096)
    max_tokens: int = option(96, "longest answer, tokens", 1, 4096)
    window: int = option(8, "tokens that each side drafts ahead; 1: both sides go in step", 1, 64)
    schedule: str = option(
        "auto", "which side aggregates. auto: by cost; delta-z: by the DRAGON paper's rule", choices=SCHEDULES
    )
    aggregator: str = option(
        "device",  # the first token comes a round trip earlier
        "side that begins to aggregate. auto: by what earlier answers have shown",
        choices=BEGINNERS,
    )
    patience_s: float = option(5.0, "the question is asked again after this much silence, s", 0.05, 600.0)
    attempts: int = option(
        5, "times in a row that the question is asked, or the link dialled, without an answer", 1, 100
    )
    on_loss: str = option(
        "fail",
        "when the link stays lost. fail: give the answer up; alone: finish it from the robot's documents",
        choices=ON_LOSS,
    )

    def __post_init__(self) -> None:
        check_options(self, AggregationSettingsError)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class ServiceSettings:
    """Limits of the cloud's half. ValueError for a value out of range."""

    max_answers: int = option(16, "questions being answered at once", 1, 10_000)
    max_documents: int = option(8, "most documents used for a question", 1, 64)

    def __post_init__(self) -> None:
        check_options(self)
