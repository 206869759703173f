"""Decoding modes as combinations of axes, with the papers' names as presets over them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Here, not in settings: what only relays messages must not load torch.
MAX_DRAFT_LENGTH = 64
MAX_EXITS = 256
EXIT_POLICIES = ("priority", "fifo")  # which early outcome leaves first: the most confident, or the oldest


class ModeError(ValueError):
    """A mode that does not exist; the sentence names those that do."""


class Proof(StrEnum):
    """What travels with a draft so that the target can verify it."""

    NONE = "none"  # there is no draft
    FULL = "full"  # the draft's whole distributions (DSD); ids alone when greedy
    SPLIT = "split"  # each drafted token's probability (DSSD); where one is rejected, p comes down
    TRUNCATED = "truncated"  # what is kept of each distribution before a token is drawn from it (TSLT)
    COUPLED = "coupled"  # nothing: both sides draw with the same noise (decoding.coupling)


class Shape(StrEnum):
    """How drafted tokens hang together."""

    SEQUENCE = "sequence"
    EXPANSION = "expansion"  # a tree where every node of a level has as many children (MCSample)
    BUDGET = "budget"  # the tree of so many nodes of which most are expected to be accepted


class Overlap(StrEnum):
    """What is drafted while a round is being verified."""

    NONE = "none"
    PREDRAFT = "predraft"  # the next round, behind outcomes that early exits or guesses foretell


class Side(StrEnum):
    """Where the work is done."""

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
    draft_length: int = 4  # unless something else is asked for; 0: chosen as it goes

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
            "as dsd, with the next draft made while the cloud still verifies this one",
        ),
        Mode(
            "dssd", Side.EDGE_CLOUD, Proof.SPLIT, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, with one probability a token on the link, and drawing anew on the robot",
        ),
        Mode(
            "tslt", Side.EDGE_CLOUD, Proof.TRUNCATED, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, drafted from truncated distributions, of which little is sent",
        ),
        Mode(
            "coupled", Side.EDGE_CLOUD, Proof.COUPLED, Shape.SEQUENCE, Overlap.NONE,
            "as dsd, with noise that both sides derive instead of distributions on the link",
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
    """The preset of that name; ModeError for a name that is none."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ModeError(f"unknown mode {name!r}; known modes are {', '.join(PRESETS)}") from None
