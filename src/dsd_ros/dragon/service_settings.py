"""What the cloud's half of questions holds: the schema of the verifier's options and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsd_ros.decoding.bounds import check_bounds


@dataclass(frozen=True)
class ServiceSettings:
    """What the cloud's half holds; ValueError for a value out of place."""

    max_answers: int = field(default=16, metadata={"help": "questions being answered at once", "min": 1, "max": 10_000})
    max_documents: int = field(
        default=8, metadata={"help": "documents used for a question, at most", "min": 1, "max": 64}
    )

    def __post_init__(self) -> None:
        check_bounds(self, ValueError)
