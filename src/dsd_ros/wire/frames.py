"""How observations, drafts and outcomes travel: in the order that lets most of a round's fields be left out.

Token ids are varints (LEB128, seven bits a byte from the lowest), a confidence 16 bits, and an outcome
brings either the token that follows or, where the robot is to draw it, the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from dsd_ros.wire.messages import (
    MAX_DRAFT,
    MAX_EVIDENCE_BYTES,
    MAX_HISTORY,
    MAX_INSTRUCTION_CHARS,
    MAX_REPLY,
    MAX_VOCABULARY,
    Draft,
    Observation,
    Outcome,
    Past,
    Picture,
    SessionId,
    ShortText,
    Side,
    TokenId,
    UInt16,
    UInt32,
)

_ID_BYTES = 3  # of a varint: 21 bits hold any id
Ids = Annotated[bytes, Meta(max_length=_ID_BYTES * MAX_DRAFT)]


class FrameError(ValueError):
    """A frame whose fields hold nonsense; one sentence."""


class _Frame(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    pass


class ObservationFrame(_Frame, frozen=True, tag=3):
    """An Observation on the wire; None: the field's default."""

    session: SessionId
    reply: UInt32
    instruction: Annotated[str, Meta(min_length=1, max_length=MAX_INSTRUCTION_CHARS)]
    height: Side
    width: Side
    encoding: ShortText
    image: Picture
    verified: Annotated[bytes, Meta(max_length=_ID_BYTES * MAX_REPLY)] | None = None
    rounds: UInt32 | None = None
    history: Annotated[list[Past], Meta(max_length=MAX_HISTORY)] | None = None

    @classmethod
    def of(cls, observation: Observation) -> ObservationFrame:
        """How an observation travels. ValueError for ids that are none."""
        return cls(
            observation.session, observation.reply, observation.instruction, observation.height,
            observation.width, observation.encoding, observation.image,
            pack_varints(observation.verified) or None, observation.rounds or None,
            observation.history or None,
        )  # fmt: skip

    def message(self) -> Observation:
        """The observation; FrameError."""
        return Observation(
            self.session, self.reply, self.instruction, self.height, self.width, self.encoding,
            self.image, unpack_varints(self.verified or b"", MAX_REPLY), self.rounds or 0,
            self.history or [],
        )  # fmt: skip


class DraftFrame(_Frame, frozen=True, tag=4):
    """A Draft on the wire; None: the field's default."""

    session: SessionId
    reply: UInt32
    round: UInt32
    confirmed: UInt32
    tokens: Ids
    evidence: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)] | None = None
    parents: Annotated[bytes, Meta(max_length=MAX_DRAFT)] | None = None
    resampled: Ids | None = None
    assumed: Annotated[bytes, Meta(max_length=8)] | None = None
    autonomous_rounds: UInt16 | None = None

    @classmethod
    def of(cls, draft: Draft) -> DraftFrame:
        """How a draft travels. ValueError for ids that are none."""
        return cls(
            draft.session, draft.reply, draft.round, draft.confirmed,
            pack_varints(draft.tokens), draft.evidence or None, draft.parents or None,
            pack_varints(draft.resampled) or None, draft.assumed or None,
            draft.autonomous_rounds or None,
        )  # fmt: skip

    def message(self) -> Draft:
        """The draft; FrameError."""
        return Draft(
            self.session, self.reply, self.round, self.confirmed, unpack_varints(self.tokens),
            self.evidence or b"", self.parents or b"", self.assumed or b"",
            unpack_varints(self.resampled or b""), self.autonomous_rounds or 0,
        )  # fmt: skip


class OutcomeFrame(_Frame, frozen=True, tag=5):
    """An Outcome on the wire; ``next`` is the token, or the distribution that stands for it."""

    session: SessionId
    reply: UInt32
    round: UInt32
    layer: UInt16
    accepted: UInt16
    next: TokenId | Annotated[bytes, Meta(min_length=1, max_length=MAX_EVIDENCE_BYTES)]
    compute_us: UInt32 | None = None
    confidence: UInt16 | None = None
    is_final: bool | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeFrame:
        """How an outcome travels. ValueError for a confidence that is no number."""
        return cls(
            outcome.session, outcome.reply, outcome.round, outcome.layer, outcome.accepted,
            outcome.distribution or outcome.next_token, outcome.compute_us or None,
            round(outcome.confidence * 65535) or None, None if outcome.is_final else False,
        )  # fmt: skip

    def message(self) -> Outcome:
        """The outcome."""
        token, distribution = (self.next, b"") if isinstance(self.next, int) else (0, self.next)
        return Outcome(
            self.session, self.reply, self.round, self.layer, self.accepted, token,
            (self.confidence or 0) / 65535, self.is_final is not False, self.compute_us or 0,
            distribution,
        )  # fmt: skip


def pack_varints(ids: Sequence[int]) -> bytes:
    """Ids one behind the other, seven bits a byte, the lowest first; all but an id's last byte have the top bit."""
    data = bytearray()
    for value in ids:
        if not 0 <= value < MAX_VOCABULARY:
            raise FrameError(f"{value} is no token id; use 0 to {MAX_VOCABULARY - 1}")
        while value >= 0x80:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)
    return bytes(data)


def unpack_varints(data: bytes, most: int = MAX_DRAFT) -> list[int]:
    """The ids of ``pack_varints``, ``most`` of them; FrameError for anything else."""
    ids: list[int] = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            ids.append(value)
            value = shift = 0
        elif shift >= 7 * _ID_BYTES:
            break
    if shift or len(ids) > most or any(value >= MAX_VOCABULARY for value in ids):
        raise FrameError(f"{len(data)} bytes are no varints of up to {most} token ids below {MAX_VOCABULARY}")
    return ids
