"""Types and bounds of the protocol's fields, and what its messages are made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH

MAX_DRAFT = MAX_DRAFT_LENGTH
MAX_REPLY = 8192  # tokens
MAX_VOCABULARY = 1 << 20
MAX_INSTRUCTION_CHARS = 2000
MAX_EVIDENCE_BYTES = 4 * MAX_DRAFT * 163_840  # 64 rows of the largest vocabulary in use, padded
MAX_FRAME_BYTES = MAX_EVIDENCE_BYTES + 4096  # of any encoded message

UInt16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
SessionId = Annotated[int, Meta(ge=1, lt=1 << 32)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
EndIds = Annotated[list[TokenId], Meta(max_length=16)]
Tokens = Annotated[list[TokenId], Meta(max_length=MAX_DRAFT)]
Verified = Annotated[list[TokenId], Meta(max_length=MAX_REPLY)]
ShortText = Annotated[str, Meta(max_length=256)]
Sentence = Annotated[str, Meta(max_length=1024)]
Instruction = Annotated[str, Meta(min_length=1, max_length=MAX_INSTRUCTION_CHARS)]


class Fields(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array of fields in their order."""
