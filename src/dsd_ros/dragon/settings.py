# SPDX-License-Identifier: Apache-2.0
"""The settings of questions that both sides answer: one schema for flags, ROS parameters and config files."""

from __future__ import annotations

from dataclasses import dataclass

from dsd_ros.options import check_options, option

SIDES = ("device", "cloud")
ON_LOSS = ("fail", "alone")
HEAD = 16  # tokens of a distribution that travel with a draft


class AggregationSettingsError(ValueError):
    """A setting is out of range: one sentence."""


@dataclass(frozen=True)
class AggregationSettings:
    """How a question is answered with the cloud. AggregationSettingsError for a value out of range."""

    documents: int = option(2, "most documents used per side", 0, 64)
    temperature: float = option(0.0, "sampling temperature; 0: greedy", 0.0, 100.0)
    seed: int = option(0, "seed of the random draws", 0, (1 << 63) - 1)
    max_tokens: int = option(96, "longest answer, tokens", 1, 4096)
    window: int = option(8, "tokens that each side drafts ahead; 1: both sides go in step", 1, 64)
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


@dataclass(frozen=True)
class ServiceSettings:
    """Limits of the cloud's half. ValueError for a value out of range."""

    max_answers: int = option(16, "questions being answered at once", 1, 10_000)
    max_documents: int = option(8, "most documents used for a question", 1, 64)

    def __post_init__(self) -> None:
        check_options(self)
