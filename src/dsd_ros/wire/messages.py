"""Message types of the draft/verify protocol, the one schema behind websocket frames and ROS topics.

Every message is a msgspec struct that travels as a MessagePack array ``[tag, field, ...]``. Arrays of floats
travel as little-endian float32 bytes. Bounds are part of the types, so that a decoded message is a valid one.
A round is named by (session, reply, round) and is idempotent: a peer that sees it twice answers the same.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

PROTOCOL_VERSION = 1
MAX_DRAFT = 64
MAX_VOCABULARY = 1 << 20
MAX_IMAGE_BYTES = 16 << 20
MAX_INSTRUCTION_CHARS = 2000

SessionId = Annotated[bytes, Meta(min_length=8, max_length=8)]
UInt16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
ShortText = Annotated[str, Meta(max_length=256)]
Tokens = Annotated[list[TokenId], Meta(max_length=MAX_DRAFT)]


class _Message(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    pass


class SessionRequest(_Message, tag=1):
    """Robot -> verifier: open a session, or resume the one named.

    ``request`` is chosen by the client and echoed, so that a late reply is never taken for another's.
    """

    request: UInt32
    protocol_version: UInt16
    mode: ShortText
    tokenizer_fingerprint: ShortText
    vocab_size: UInt32
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)]
    top_k: UInt32
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]
    seed: Annotated[int, Meta(ge=0, lt=1 << 63)]
    resume: Annotated[bytes, Meta(max_length=8)] = b""


class SessionReply(_Message, tag=2):
    """Verifier -> robot: the session is open (``error`` empty), or why it is not."""

    request: UInt32
    session: Annotated[bytes, Meta(max_length=8)]
    error: Annotated[str, Meta(max_length=1024)]
    target_name: ShortText
    target_fingerprint: ShortText
    vocab_size: UInt32


class Observation(_Message, tag=3):
    """Robot -> verifier: what reply number ``reply`` is about. Starts that reply and ends the one before."""

    session: SessionId
    reply: UInt32
    instruction: Annotated[str, Meta(min_length=1, max_length=MAX_INSTRUCTION_CHARS)]
    height: Annotated[int, Meta(ge=1, le=8192)]
    width: Annotated[int, Meta(ge=1, le=8192)]
    encoding: ShortText  # "rgb8" (raw) or "png"; both lossless, so that both sides see the same picture
    image: Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]


class Draft(_Message, tag=4):
    """Robot -> verifier: one round's draft behind ``confirmed`` tokens of the reply.

    ``distributions`` holds len(tokens) x vocab_size float32 of the draft (proof "full"), or nothing (greedy).
    ``parents`` names each node's parent for a tree (empty: a sequence).
    ``autonomous_rounds`` > 0 asks the verifier to go on alone for that many rounds (cloud-only decoding).
    """

    session: SessionId
    reply: UInt32
    round: UInt32
    confirmed: UInt32
    tokens: Tokens
    distributions: bytes = b""
    parents: Annotated[bytes, Meta(max_length=MAX_DRAFT)] = b""
    autonomous_rounds: UInt16 = 0


class Outcome(_Message, tag=5):
    """Verifier -> robot: ``accepted`` draft tokens hold, and ``next_token`` follows them.

    ``layer`` is the decoder layer that spoke (1-based count of layers run); only ``is_final`` is binding.
    """

    session: SessionId
    reply: UInt32
    round: UInt32
    layer: UInt16
    accepted: UInt16
    next_token: TokenId
    confidence: Annotated[float, Meta(ge=0.0, le=1.0)]
    is_final: bool


class Refusal(_Message, tag=6):
    """Verifier -> robot: the named round (or observation) could not be served; ``sentence`` says why.

    ``code`` is one of RefusalCode's values.
    """

    session: Annotated[bytes, Meta(max_length=8)]
    reply: UInt32
    round: UInt32
    code: ShortText
    sentence: Annotated[str, Meta(max_length=1024)]


class SessionClose(_Message, tag=7):
    """Robot -> verifier: the session is over and its cache may go."""

    session: SessionId


Message = (
    SessionRequest | SessionReply | Observation | Draft | Outcome | Refusal | SessionClose
)
