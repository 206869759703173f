"""Message types of the draft/verify protocol, the one schema behind websocket frames and ROS topics.

Every message travels as a MessagePack array ``[tag, field, ...]``, observations, drafts and outcomes in the leaner
layout of ``wire.frames``. Those with tags from 8 on stand in ``wire.questions``. Bounds are part of the types, so
that a decoded message is a valid one.
A round is named by (session, reply, round) and is idempotent: a peer that sees it twice answers the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import numpy as np
from msgspec import Meta

from dsd_ros.wire.dragon_messages import EndCode as EndCode
from dsd_ros.wire.dragon_messages import Proposal as Proposal
from dsd_ros.wire.dragon_messages import Question as Question
from dsd_ros.wire.dragon_messages import QuestionEnd as QuestionEnd
from dsd_ros.wire.dragon_messages import QuestionReply as QuestionReply
from dsd_ros.wire.dragon_messages import Reveal as Reveal
from dsd_ros.wire.dragon_messages import Verdict as Verdict
from dsd_ros.wire.fields import MAX_DRAFT as MAX_DRAFT
from dsd_ros.wire.fields import MAX_EVIDENCE_BYTES as MAX_EVIDENCE_BYTES
from dsd_ros.wire.fields import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from dsd_ros.wire.fields import MAX_INSTRUCTION_CHARS as MAX_INSTRUCTION_CHARS
from dsd_ros.wire.fields import MAX_REPLY as MAX_REPLY
from dsd_ros.wire.fields import MAX_VOCABULARY as MAX_VOCABULARY
from dsd_ros.wire.fields import EndIds, Fields, Instruction, Seed, Sentence, Temperature, Tokens, Verified
from dsd_ros.wire.fields import SessionId as SessionId
from dsd_ros.wire.fields import ShortText as ShortText
from dsd_ros.wire.fields import TokenId as TokenId
from dsd_ros.wire.fields import UInt16 as UInt16
from dsd_ros.wire.fields import UInt32 as UInt32
from dsd_ros.wire.version import PROTOCOL_VERSION as PROTOCOL_VERSION

MAX_HISTORY = 8  # earlier pictures of an observation
MAX_EXITS = 256
EXIT_POLICIES = ("priority", "fifo")  # by confidence, or as they come
MAX_IMAGE_BYTES = 16 << 20
TICKET_BYTES = 16
DIGEST_BYTES = 8

Ticket = Annotated[bytes, Meta(max_length=TICKET_BYTES)]
Side = Annotated[int, Meta(ge=0, le=8192)]
Picture = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
Layers = Annotated[list[UInt16], Meta(max_length=MAX_EXITS)]


class RefusalCode(StrEnum):
    """Why a round or an observation was not served. The first three are mended by sending again."""

    UNKNOWN_SESSION = "unknown-session"  # expired, or of a verifier before its restart: open anew
    NO_OBSERVATION = "no-observation"  # the draft's observation has not arrived: send both again
    UNKNOWN_PICTURE = "unknown-picture"  # of the history: send all its pictures
    OUT_OF_STEP = "out-of-step"  # round or confirmed count contradict what the verifier did
    BAD_OBSERVATION = "bad-observation"  # picture or instruction cannot be used
    BAD_DISTRIBUTION = "bad-distribution"  # missing, wrong size, or no probabilities
    MODEL_ERROR = "model-error"  # the target could not go on
    MALFORMED = "malformed"  # no message of this protocol
    OVERLOADED = "overloaded"  # too many messages of one peer are waiting
    UNSUPPORTED = "unsupported"  # a valid message asking for what this verifier does not do
    ASSUMPTION_FAILED = "assumption-failed"  # sent ahead behind tokens that did not come true


class SessionRequest(Fields, frozen=True, tag=1):
    """Robot -> verifier: open a session, or ``resume`` the one whose ticket is shown.

    ``request`` is chosen by the client and echoed, so that a late reply is never taken for another's.
    ``exits`` asks for early outcomes, of the exits behind ``exit_layers`` (1-based; empty: all there are), from
    ``min_exit_confidence`` up; ``exit_policy`` orders those that wait for the link: "priority" (by
    confidence) or "fifo". ``proof`` is what lets drafts be verified, a value of decoding.modes.Proof; empty:
    what the mode says.
    """

    request: UInt32
    protocol_version: UInt16
    mode: ShortText
    tokenizer_fingerprint: ShortText
    vocab_size: UInt32
    temperature: Temperature
    top_k: UInt32
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]
    seed: Seed
    resume: Ticket = b""
    exits: bool = False
    exit_layers: Layers = []
    exit_policy: ShortText = "priority"
    min_exit_confidence: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    proof: ShortText = ""


class SessionReply(Fields, frozen=True, tag=2):
    """Verifier -> robot: the session is open (``error`` empty), or why it is not.

    Asked to resume a session that is gone, the verifier opens a new one: compare ``session``. It is 0 with
    an error. Who holds the ``ticket`` can resume the session: unlike its number it is secret.
    The target's ``eos_token_ids`` end a reply in every mode, whatever the draft's would be.
    ``exit_layers`` are the exits that will speak (empty: none), 1-based and ascending.
    """

    request: UInt32
    session: UInt32
    error: Sentence
    target_name: ShortText
    target_fingerprint: ShortText
    vocab_size: UInt32
    eos_token_ids: EndIds = []
    exit_layers: Layers = []
    ticket: Ticket = b""


class Past(Fields, frozen=True):
    """One earlier step of an observation's history: the picture seen, and the action taken behind it.

    ``digest`` is ``pictures.picture_digest`` of the picture; an empty ``image`` means that the verifier has seen it.
    """

    action: ShortText
    encoding: ShortText
    height: Side
    width: Side
    image: Picture
    digest: Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Observation(Fields, frozen=True, tag=3):
    """Robot -> verifier: what reply number ``reply`` is about. Starts that reply and ends the one before.

    ``encoding`` is "rgb8" (raw) or "png", both lossless, so that both sides see the same picture; or "none"
    for models that read no picture: then ``image`` is empty and its sides are 0.
    ``verified`` and ``rounds`` tell a verifier that lost the reply how far it was: its tokens, all of them
    verified or found behind a rejection, and the rounds that took. It goes on with round ``rounds`` + 1.
    ``history`` holds earlier pictures and actions, oldest first.
    """

    session: SessionId
    reply: UInt32
    instruction: Instruction
    height: Side
    width: Side
    encoding: ShortText
    image: Picture
    verified: Verified = []
    rounds: UInt32 = 0
    history: Annotated[list[Past], Meta(max_length=MAX_HISTORY)] = []


class Draft(Fields, frozen=True, tag=4):
    """Robot -> verifier: one round's draft behind ``confirmed`` tokens of the reply.

    ``evidence`` is what the proof needs, nothing when greedy or by proof "coupled": the draft's distributions
    as float32 rows of vocab_size (proof "full"), or what was kept of them (``packing.pack_kept``,
    "truncated"), one row per drafted token; or each token's own probability rounded up
    (``packing.pack_chances``, "split"). ``parents`` holds a byte per token for a tree
    (``decoding.trees``): 0 for the root's children, else the parent's index plus one; distributions are then
    one per node that has children. Empty: a sequence.
    ``assumed`` is for a round sent ahead, while earlier ones are under way: the ``prefix_digest`` of all the
    reply's tokens in front of this draft. Where they come out otherwise the round is refused
    (ASSUMPTION_FAILED) and forgotten, and its number may be used again.
    ``resampled`` are the tokens that the robot itself determined behind what was verified last ("split"),
    counted in ``confirmed``; with no tokens and that round's own number they only tell of the reply's end.
    ``autonomous_rounds`` > 0 asks the verifier to go on alone for that many rounds (cloud-only decoding).
    """

    session: SessionId
    reply: UInt32
    round: UInt32
    confirmed: UInt32
    tokens: Tokens
    evidence: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)] = b""
    parents: Annotated[bytes, Meta(max_length=MAX_DRAFT)] = b""
    assumed: Annotated[bytes, Meta(max_length=8)] = b""
    resampled: Tokens = []
    autonomous_rounds: UInt16 = 0


class Outcome(Fields, frozen=True, tag=5):
    """Verifier -> robot: ``accepted`` draft tokens hold, and ``next_token`` follows them.

    Of a tree ``accepted`` is the index plus one of the last node that holds, with those on the path to it.
    An early exit's outcome (``is_final`` false, ``layer`` below the last) is a forecast. Early outcomes may come
    in any order or not at all, each (accepted, next_token) of a round once, none behind the final one.
    ``layer`` is the decoder layer that spoke (1-based count of layers run); only ``is_final`` is binding.
    ``confidence`` is the softmax probability (at temperature 1) of the likeliest token there; on the wire it is
    a multiple of 1/65535. ``compute_us`` is how long the verifier's model ran for this round, in microseconds by
    its own monotonic clock; that of a reply's first round includes reading the observation.
    ``distribution`` is given by proof "split" where a token is rejected: the target's own there
    (``packing.pack_distribution``), with which the robot draws what follows; ``next_token`` and ``confidence``
    are then 0. Of a tree it holds several (``packing.pack_rows``).
    """

    session: SessionId
    reply: UInt32
    round: UInt32
    layer: UInt16
    accepted: UInt16
    next_token: TokenId
    confidence: Annotated[float, Meta(ge=0.0, le=1.0)]
    is_final: bool
    compute_us: UInt32 = 0
    distribution: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)] = b""


class Refusal(Fields, frozen=True, tag=6):
    """Verifier -> robot: the named round (or observation) could not be served; ``sentence`` says why.

    ``code`` is one of RefusalCode's values. Round 0 is the observation. Session 0: not about one.
    """

    session: UInt32
    reply: UInt32
    round: UInt32
    code: ShortText
    sentence: Sentence


class SessionClose(Fields, frozen=True, tag=7):
    """Robot -> verifier: the session is over and its cache may go."""

    session: SessionId


Message = (
    SessionRequest
    | SessionReply
    | Observation
    | Draft
    | Outcome
    | Refusal
    | SessionClose
    | Question
    | QuestionReply
    | Proposal
    | Verdict
    | Reveal
    | QuestionEnd
)


def prefix_digest(tokens: Sequence[int]) -> bytes:
    """8 bytes that stand for a reply's tokens: BLAKE2b over their ids as little-endian uint32."""
    return hashlib.blake2b(np.asarray(tokens, dtype="<u4").tobytes(), digest_size=DIGEST_BYTES).digest()
