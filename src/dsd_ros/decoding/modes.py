# SPDX-License-Identifier: Apache-2.0
"""Decoding modes as combinations of axes; the papers' names are presets. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dsd_ros.python310 import StrEnum

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_DRAFT_LENGTH = 64  # tokens
MAX_EXITS = 256


class ModeError(ValueError):
    """An unknown mode; the sentence names the known ones."""


class Declared(NamedTuple):
    """What a method is when sampled, to all that works with any method."""

    draws_alike: bool = False  # both sides draw with the same noise: a reply is the target's own, whatever is drafted
    sends_rows: bool = False  # whole distributions of the draft go up
    truncates: bool = False  # it goes by top_k_proof, top_rho_proof and top_float_proof
    recovers: bool = False  # after a rejection p comes down, and the robot draws the token that follows


class Proof(StrEnum):
    """The evidence that travels with a draft so that the target can verify it; what its method is is ``declared``."""

    declared: Declared

    FULL = "full", Declared(sends_rows=True)  # the draft's full distributions (DSD); only ids when greedy
    SPLIT = "split", Declared(recovers=True)  # each drafted token's probability (DSSD)
    TRUNCATED = "truncated", Declared(truncates=True)  # each distribution, truncated before its token is drawn (TSLT)
    COUPLED = "coupled", Declared(draws_alike=True)  # nothing (decoding.coupling)

    def __new__(cls, name: str, declared: Declared = Declared()) -> Self:  # noqa: B008
        member = str.__new__(cls, name)
        member._value_, member.declared = name, declared
        return member


class Shape(StrEnum):
    """The shape of a draft."""

    SEQUENCE = "sequence"
    EXPANSION = "expansion"  # a tree whose nodes have a fixed number of children per level (MCSample)
    BUDGET = "budget"  # the tree of a given size with the most expected accepted tokens


@dataclass(frozen=True)
class Mode:
    """One combination of the axes."""

    name: str
    proof: Proof
    summary: str
    shape: Shape = Shape.SEQUENCE
    predrafts: bool = False  # the next round is drafted while this one is verified
    drafts: bool = True  # whether a draft model takes part; without one the cloud decodes alone
    streams: bool = False  # the target decodes by itself and never waits for a draft


PRESETS: dict[str, Mode] = {
    preset.name: preset
    for preset in (
        Mode("stream", Proof.COUPLED, "the cloud decodes by itself, sooner by what the robot drafts", streams=True),
        Mode("ar", Proof.COUPLED, "stream without a draft model: the target alone", drafts=False, streams=True),
        Mode("dsd", Proof.FULL, "in rounds: drafted on the robot, verified in the cloud by full distributions"),
        Mode("fsd", Proof.FULL, "as dsd, drafting the next round while the cloud verifies this one", predrafts=True),
        Mode(
            "dssd", Proof.SPLIT,
            "as dsd, sending one probability per token; the robot draws the token after a rejection",
        ),
        Mode("tslt", Proof.TRUNCATED, "as dsd, drafted from truncated distributions, which take few bytes"),
        Mode("coupled", Proof.COUPLED, "as dsd, with shared noise in place of distributions on the link"),
        Mode("mc-dsd", Proof.FULL, "as dsd, with a tree of tokens instead of a sequence", Shape.EXPANSION),
        Mode("mc-tslt", Proof.TRUNCATED, "as tslt, with a tree of tokens instead of a sequence", Shape.EXPANSION),
    )
}  # fmt: skip


def streams(name: str) -> bool:
    """Whether a mode decodes in passes of the target; False for one in rounds, or of another release."""
    return name in PRESETS and PRESETS[name].streams


def unit_of(name: str) -> str:
    """What a mode's replies are counted in: "pass" or "round"."""
    return "pass" if streams(name) else "round"


def mode(name: str) -> Mode:
    """The preset with this name; ModeError if there is none."""
    if name in ("auto", "best"):
        raise ModeError(f"mode {name} is gone: use stream, the default, which never waits and needs no tuning")
    try:
        return PRESETS[name]
    except KeyError:
        raise ModeError(f"unknown mode {name!r}; known modes are {', '.join(PRESETS)}") from None
