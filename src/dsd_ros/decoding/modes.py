"""Decoding modes as combinations of axes; the papers' names are presets. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_DRAFT_LENGTH = 64  # tokens
MAX_EXITS = 256
EXIT_POLICIES = ("priority", "fifo")  # which early outcome leaves first: the most confident, or the oldest


class ModeError(ValueError):
    """An unknown mode; the sentence names the known ones."""


class Proof(StrEnum):
    """The evidence that travels with a draft so that the target can verify it."""

    NONE = "none"  # there is no draft
    FULL = "full"  # the draft's full distributions (DSD); only ids when greedy
    SPLIT = "split"  # each drafted token's probability (DSSD); after a rejection the target's p comes down
    TRUNCATED = "truncated"  # each distribution, truncated before its token is drawn (TSLT)
    COUPLED = "coupled"  # nothing: both sides draw with the same noise (decoding.coupling)


class Shape(StrEnum):
    """The shape of a draft."""

    SEQUENCE = "sequence"
    EXPANSION = "expansion"  # a tree whose nodes have a fixed number of children per level (MCSample)
    BUDGET = "budget"  # the tree of a given size with the most expected accepted tokens


class Overlap(StrEnum):
    """What is drafted while a round is being verified."""

    NONE = "none"
    PREDRAFT = "predraft"  # the next round, after outcomes predicted by early exits or guesses


class Side(StrEnum):
    """Where decoding runs."""

    CLOUD = "cloud"
    EDGE_CLOUD = "edge-cloud"


@dataclass(frozen=True)
class Mode:
    """One combination of the axes."""

    name: str
    side: Side
    proof: Proof
    shape: Shape
    overlap: Overlap
    summary: str
    draft_length: int = 4  # default of draft_length; 0: chosen while decoding

    @property
    def drafts(self) -> bool:
        """Whether a draft model takes part."""
        return self.proof is not Proof.NONE


PRESETS: dict[str, Mode] = {
    preset.name: preset
    for preset in (
        Mode(
            "ar", Side.CLOUD, Proof.NONE, Shape.SEQUENCE, Overlap.NONE,
            "the target alone, token by token in the cloud",
        ),
        Mode(
            "dsd", Side.EDGE_CLOUD, Proof.FULL, Shape.SEQUENCE, Overlap.NONE,
            "drafted on the robot, verified in the cloud by full distributions",
        ),
        Mode(
            "fsd", Side.EDGE_CLOUD, Proof.FULL, Shape.SEQUENCE, Overlap.PREDRAFT,
            "as dsd, drafting the next round while the cloud verifies this one",
        ),
        Mode(
            "dssd", Side.EDGE_CLOUD, Proof.SPLIT, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, sending one probability per token; the robot draws the token after a rejection",
        ),
        Mode(
            "tslt", Side.EDGE_CLOUD, Proof.TRUNCATED, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, drafted from truncated distributions, which take few bytes",
        ),
        Mode(
            "coupled", Side.EDGE_CLOUD, Proof.COUPLED, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, with shared noise in place of distributions on the link",
        ),
        Mode(
            "mc-dsd", Side.EDGE_CLOUD, Proof.FULL, Shape.EXPANSION, Overlap.NONE,
            "as dsd, with a tree of tokens instead of a sequence",
        ),
        Mode(
            "mc-tslt", Side.EDGE_CLOUD, Proof.TRUNCATED, Shape.EXPANSION, Overlap.NONE,
            "as tslt, with a tree of tokens instead of a sequence",
        ),
        Mode(
            "best", Side.EDGE_CLOUD, Proof.COUPLED, Shape.BUDGET, Overlap.PREDRAFT,
            "as fsd and coupled, with the likeliest tree of tokens, its size chosen as it goes",
            draft_length=0,
        ),
    )
}  # fmt: skip


def mode(name: str) -> Mode:
    """The preset with this name; ModeError if there is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ModeError(f"unknown mode {name!r}; known modes are {', '.join(PRESETS)}") from None
