"""What a decode gives back, with what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoundRecord:
    """One round. Seconds are of monotonic clocks: ``verify_seconds`` of the verifier's, the rest of ours."""

    drafted: int
    accepted: int
    draft_seconds: float  # in the draft model
    wait_seconds: float  # from sending the draft until its outcome was there
    verify_seconds: (
        float  # in the target, as the verifier measured it; round 1: its prefill included
    )
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class DecodedReply:
    """One verified reply.

    ``tokens`` are the target's, the token that ends the reply included, whatever the mode; ``text`` is
    theirs without special tokens ("" without a tokenizer). ``finished`` tells an ended reply from one cut
    off at max_tokens. ``seconds`` is the whole decode, ``prefill_seconds`` reading the image with the draft.
    """

    tokens: list[int]
    text: str
    mode: str
    finished: bool
    seconds: float
    prefill_seconds: float
    bytes_up: int
    bytes_down: int
    records: list[RoundRecord] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """How many times the target was asked."""
        return len(self.records)

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens accepted, per round."""
        return [record.accepted for record in self.records]

    @property
    def tau(self) -> float:
        """Tokens gained per round."""
        return len(self.tokens) / max(1, self.rounds)

    @property
    def draft_seconds(self) -> float:
        """In the draft model, after its prefill."""
        return sum(record.draft_seconds for record in self.records)

    @property
    def wait_seconds(self) -> float:
        """Waiting for the verifier."""
        return sum(record.wait_seconds for record in self.records)

    @property
    def verify_seconds(self) -> float:
        """In the target model, prefill included, as the verifier measured it."""
        return sum(record.verify_seconds for record in self.records)
