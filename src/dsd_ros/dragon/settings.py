"""The settings of a question that two sides answer: one schema for command line flags and ROS parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsd_ros.decoding.bounds import check_bounds

RANDOMNESS = ("shared", "independent")
EVIDENCE = ("sparse", "full", "lossy-nucleus")
SCHEDULES = ("auto", "delta-z", "device", "cloud", "random")
SIDES = ("device", "cloud")
BEGINNERS = ("auto", *SIDES)
ON_LOSS = ("fail", "alone")
NUCLEUS = 0.8  # mass of what evidence "lossy-nucleus" keeps, as the paper's code does


class AggregationSettingsError(ValueError):
    """A setting out of its range; one sentence."""


@dataclass(frozen=True)
class AggregationSettings:
    """How a question is answered with the cloud. Metadata: ``help``, ``min``, ``max``, ``choices``.

    Raises AggregationSettingsError for a value out of place.
    """

    documents: int = field(default=2, metadata={"help": "documents of each side, at most", "min": 0, "max": 64})
    temperature: float = field(
        default=0.0, metadata={"help": "sampling temperature; 0: greedy", "min": 0.0, "max": 100.0}
    )
    seed: int = field(default=0, metadata={"help": "of the random draws", "min": 0, "max": (1 << 63) - 1})
    randomness: str = field(
        default="shared",
        metadata={
            "help": "how sampled tokens are drawn: with noise that both sides derive from the seed, or each with "
            "its own as in the DRAGON paper",
            "choices": RANDOMNESS,
        },
    )
    evidence: str = field(
        default="sparse",
        metadata={
            "help": "what travels of a side's distribution: its decisive tokens and a bound of the others, all "
            "of it, or a nucleus of 0.8, which is not exact",
            "choices": EVIDENCE,
        },
    )
    head: int = field(default=16, metadata={"help": "tokens in sparse evidence", "min": 1, "max": 4096})
    max_tokens: int = field(default=96, metadata={"help": "longest answer in tokens", "min": 1, "max": 4096})
    window: int = field(
        default=8, metadata={"help": "tokens that each side drafts ahead; 1: the sides go in step", "min": 1, "max": 64}
    )
    reweight_every: int = field(
        default=0,
        metadata={
            "help": "tokens after which the documents are weighed anew by question and answer so far; 0: never",
            "min": 0,
            "max": 4096,
        },
    )
    schedule: str = field(
        default="auto",
        metadata={
            "help": "which side aggregates; auto: by what it costs; delta-z: by the DRAGON paper's rule",
            "choices": SCHEDULES,
        },
    )
    aggregator: str = field(
        default="device",  # the first token comes a round trip earlier
        metadata={
            "help": "the side that begins to aggregate; auto: by what the answers before have told",
            "choices": BEGINNERS,
        },
    )
    patience_s: float = field(
        default=5.0,
        metadata={"help": "seconds of silence until the question is asked again", "min": 0.05, "max": 600.0},
    )
    attempts: int = field(
        default=5,
        metadata={
            "help": "times in a row that it is asked, or the link dialled, without an answer",
            "min": 1,
            "max": 100,
        },
    )
    on_loss: str = field(
        default="fail",
        metadata={
            "help": "when the link stays lost: give the answer up, or finish it from the device's documents alone",
            "choices": ON_LOSS,
        },
    )

    def __post_init__(self) -> None:
        check_bounds(self, AggregationSettingsError)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
