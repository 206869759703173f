# SPDX-License-Identifier: Apache-2.0
"""The protocol's messages: the one schema behind websocket frames and ROS topics.

A message travels as a MessagePack array ``[tag, field, ...]`` (``wire.codec``) or as the ROS message of the same name,
whose .msg file is generated from its class here: the docstring becomes the head, the comment after a field its
comment (``tools/msg_files.py``). Bounds are part of the types, so a decoded message is a valid one.
This module must not import torch: relays load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct

from dsd_ros.decoding.modes import MAX_DRAFT_LENGTH, MAX_EXITS
from dsd_ros.limits import MAX_CHAT_BYTES, MAX_HISTORY, MAX_INSTRUCTION_CHARS, MAX_SIDE
from dsd_ros.python310 import StrEnum

PROTOCOL_VERSION = 10

MAX_DRAFT = MAX_DRAFT_LENGTH  # tokens of one message
MAX_REPLY = 8192  # tokens
MAX_VOCABULARY = 1 << 20
MAX_EVIDENCE_BYTES = 4 * MAX_DRAFT * 163_840  # 64 float32 rows of the largest vocabulary in use, padded
MAX_FRAME_BYTES = MAX_EVIDENCE_BYTES + 4096  # of any encoded message
MAX_IMAGE_BYTES = 16 << 20
TICKET_BYTES = 16
NONCE_BYTES = 16
TAG_BYTES = 20
DIGEST_BYTES = 8
MAX_DOCUMENTS = 64  # of one side of a question
MAX_WINDOW = 64  # tokens drafted ahead of what is decided
MAX_HEAD = 4096  # tokens of sparse evidence
MAX_REVEALED = 1024  # probabilities in one message
MAX_LOG_WEIGHT = 1000.0

# Meta(extra=...): "packed" names a shorter form on the websocket (``wire.codec``), "msg" the type in the .msg file
# where it is not the one that follows from the bounds.
UInt16 = Annotated[int, Meta(ge=0, lt=1 << 16)]
UInt32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Id = Annotated[int, Meta(ge=1, lt=1 << 32)]
ReplyLength = Annotated[int, Meta(ge=1, le=MAX_REPLY)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Side = Annotated[int, Meta(ge=0, le=MAX_SIDE, extra={"msg": "uint32"})]
TokenId = Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
Confidence = Annotated[float, Meta(ge=0.0, le=1.0, extra={"packed": "uint16"})]
Share = Annotated[int, Meta(ge=0, le=100)]  # of a whole, in hundredths
LogWeight = Annotated[float, Meta(ge=-MAX_LOG_WEIGHT, le=MAX_LOG_WEIGHT)]
EndIds = Annotated[list[TokenId], Meta(max_length=16)]
Drafted = Annotated[list[TokenId], Meta(max_length=MAX_DRAFT, extra={"packed": "varints"})]
Verified = Annotated[list[TokenId], Meta(max_length=MAX_REPLY, extra={"packed": "varints"})]
Layers = Annotated[list[UInt16], Meta(max_length=MAX_EXITS)]
ShortText = Annotated[str, Meta(max_length=256, extra={"msg": "string<=256"})]
Names = Annotated[list[ShortText], Meta(max_length=MAX_DOCUMENTS)]
Sentence = Annotated[str, Meta(max_length=1024)]
Form = Annotated[str, Meta(max_length=16_384)]
Instruction = Annotated[str, Meta(min_length=1, max_length=MAX_INSTRUCTION_CHARS)]
InstructionIfAny = Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)]
Conversation = Annotated[bytes, Meta(max_length=MAX_CHAT_BYTES)]
Picture = Annotated[bytes, Meta(max_length=MAX_IMAGE_BYTES)]
Evidence = Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)]
Ticket = Annotated[bytes, Meta(max_length=TICKET_BYTES)]
Nonce = Annotated[bytes, Meta(max_length=NONCE_BYTES)]
Tag = Annotated[bytes, Meta(max_length=TAG_BYTES)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
DigestIfAny = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
Parents = Annotated[bytes, Meta(max_length=MAX_DRAFT)]
Probabilities = Annotated[bytes, Meta(max_length=4 * MAX_REVEALED)]


class RefusalCode(StrEnum):
    """Why a round or an observation was not served. The first three are cured by sending again."""

    UNKNOWN_SESSION = "unknown-session"  # expired, or of a verifier before its restart: open a new one
    NO_OBSERVATION = "no-observation"  # the draft's observation has not arrived: send both again
    UNKNOWN_PICTURE = "unknown-picture"  # of the history: send all its pictures
    OUT_OF_STEP = "out-of-step"  # round or confirmed count contradict what the verifier did, or the mode
    BAD_OBSERVATION = "bad-observation"  # picture or instruction cannot be used
    BAD_DISTRIBUTION = "bad-distribution"  # evidence is missing, has the wrong size, or holds no probabilities
    MODEL_ERROR = "model-error"  # the target could not go on
    MALFORMED = "malformed"  # not a message of this protocol
    OVERLOADED = "overloaded"  # too many messages of one peer are waiting
    UNSUPPORTED = "unsupported"  # a valid message that asks for what this verifier does not do
    ASSUMPTION_FAILED = "assumption-failed"  # sent ahead after tokens that did not come true


class EndCode(StrEnum):
    """Why a question ended before its answer did."""

    CANCELLED = "cancelled"  # the asker no longer wants the answer
    UNSUPPORTED = "unsupported"  # a valid message that asks for what this side does not do
    OVERLOADED = "overloaded"  # too many answers at once: ask again later
    BAD_QUESTION = "bad-question"  # text or prompt cannot be used
    BAD_EVIDENCE = "bad-evidence"  # a draft's evidence is missing, has the wrong size, or is invalid
    OUT_OF_STEP = "out-of-step"  # contradicts what was agreed
    MODEL_ERROR = "model-error"  # the model could not go on
    UNKNOWN = "unknown"  # no such question, or no longer: ask again with another attempt
    CLOSING = "closing"  # this side is shutting down


class Fields(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array of fields in their order.

    ``LAYOUT`` is for messages of which many are sent: their fields in an order that lets most of them be left out.
    There, a field before the last that has its default is sent as nil, and packed types are packed.
    """

    LAYOUT: ClassVar[tuple[str, ...]] = ()


class SessionRequest(Fields, frozen=True, tag=1):
    """Robot -> verifier: open a decoding session, or resume the one whose ticket is shown."""

    request: UInt32  # chosen by the client and echoed, so that a late reply is not taken for another's
    protocol_version: UInt16  # must be the verifier's
    mode: ShortText  # a decoding mode, e.g. "ar", "dsd"
    tokenizer_fingerprint: ShortText  # must equal the target's
    vocab_size: UInt32  # rows of the draft's LM head (padding included)
    temperature: Temperature  # 0: greedy
    top_k: UInt32  # 0: no limit
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)]  # (0, 1]; 1: no limit
    seed: Seed  # of the verifier's random draws, below 2^63
    max_tokens: ReplyLength  # modes stream and ar: the target's longest reply
    resume: Ticket = b""  # ticket of the session to resume; empty: open a new one
    exits: bool = False  # send early outcomes
    exit_layers: Layers = []  # of the exits after these decoder layers (from 1); empty: of all exits
    min_exit_confidence: Probability = 0.0  # early outcomes below this are not sent, 0..1
    proof: ShortText = ""  # how drafts are verified (decoding.modes.Proof), e.g. "full"; empty: as the mode says
    nonce: Nonce = b""  # 16 fresh random bytes; empty: without a token
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none
    grammar: Form = ""  # JSON of the form that replies must have (decoding.constraint); empty: any


class SessionReply(Fields, frozen=True, tag=2):
    """Verifier -> robot: the session is open (error empty), or why it is not.

    If the session to resume is gone, the verifier opens a new one: compare ``session``. Whoever holds the ticket can
    resume the session: unlike the session's number, it is secret.
    """

    request: UInt32  # that of the SessionRequest
    session: UInt32  # number of the session; 0 with an error
    error: Sentence  # one sentence; empty: the session is open
    target_name: ShortText  # the target model, for people
    target_fingerprint: ShortText  # of the target's configuration and weights
    vocab_size: UInt32  # rows of the target's LM head (padding included)
    eos_token_ids: EndIds = []  # tokens that end a reply, in every mode
    exit_layers: Layers = []  # exits that will send early outcomes, ascending decoder layers from 1; empty: none
    ticket: Ticket = b""  # 16 secret bytes that resume the session; empty with an error
    side_factor: UInt16 = 0  # the target shrinks a picture's sides to multiples of this; 0: it does not say
    min_pixels: UInt32 = 0  # of a picture as the target reads it, at least
    max_pixels: UInt32 = 0  # at most: a robot need not send more
    nonce: Nonce = b""  # 16 fresh random bytes; empty: without a token
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class Past(Fields, frozen=True):
    """One earlier step in an observation's history: the picture seen, and the action taken after it. Not sent alone."""

    action: ShortText  # the action's phrase, e.g. "forward 50 cm"
    encoding: ShortText  # as in Observation
    height: Side  # pixels, at most 8192; 0: no picture
    width: Side  # pixels, at most 8192
    image: Picture  # the picture in that encoding, at most 16 MiB; empty: the verifier has it
    digest: Digest  # the picture's name, 8 bytes (wire.pictures.name_of)


class Observation(Fields, frozen=True, tag=3):
    """Robot -> verifier: the picture and the instruction that the next reply is about.

    Starts that reply and ends the one before. The robot shows its draft model what this picture decodes to.
    ``verified`` and ``rounds`` are for a verifier that does not know the reply: it goes on after these tokens, with
    round ``rounds`` + 1.
    """

    LAYOUT = (
        "session", "reply", "instruction", "height", "width", "encoding", "image", "verified", "rounds", "history",
        "messages", "tag",
    )  # fmt: skip

    session: Id  # number of the session, above 0
    reply: UInt32  # number of the reply within the session
    instruction: InstructionIfAny  # what the robot is told to do, at most 2000 characters (UTF-8); empty: see messages
    height: Side  # pixels, at most 8192; 0: no picture
    width: Side  # pixels, at most 8192
    encoding: ShortText  # "png", "rgb8" (raw rows, no padding), "jpeg", "webp", or "none" (models that read text alone)
    image: Picture  # the picture in that encoding, at most 16 MiB
    verified: Verified = []  # tokens of the reply so far: verified, or drawn by the robot after a rejection
    rounds: UInt32 = 0  # rounds they took
    history: Annotated[list[Past], Meta(max_length=MAX_HISTORY)] = []  # earlier pictures and actions, oldest first
    messages: Conversation = b""  # a conversation in place of the instruction, JSON of up to 256 KiB; empty: none
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class DraftTokens(Fields, frozen=True, tag=4):
    """Robot -> verifier, mode stream: tokens that the robot drafted, from position ``start`` of the reply on.

    They say what the verifier may try next, never what the reply is, so a lost one costs time and a doubled one
    nothing. Without tokens: the robot has ``start`` verified tokens, and asks for those after them.
    """

    LAYOUT = ("session", "reply", "stream", "start", "tokens", "tag")

    session: Id  # number of the session, above 0
    reply: UInt32  # number of the reply within the session
    stream: UInt32  # grows with each correction; tokens of an older stream are void
    start: UInt32  # position in the reply of the first of these tokens, from 0
    tokens: Drafted = []  # drafted token ids
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class VerifiedTokens(Fields, frozen=True, tag=5):
    """Verifier -> robot, modes stream and ar: the target's tokens from position ``at`` of the reply on.

    One pass gave them: the ``accepted`` tokens of the draft, then one of the target's own. Or they are sent again
    (``drafted`` and ``accepted`` 0), since the robot asked for them.
    """

    LAYOUT = ("session", "reply", "at", "tokens", "accepted", "drafted", "compute_us", "ended", "tag")

    session: Id  # number of the session, above 0
    reply: UInt32  # number of the reply within the session
    at: UInt32  # position in the reply of the first of these tokens, from 0
    tokens: Verified  # token ids
    accepted: UInt16 = 0  # how many of them the robot had drafted
    drafted: UInt16 = 0  # how many drafted tokens the pass verified
    compute_us: UInt32 = 0  # the model's time for the pass, microseconds; the first: with reading the observation
    ended: bool = False  # the reply ends with them: by an end token, or at its longest length
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class Draft(Fields, frozen=True, tag=6):
    """Robot -> verifier, in rounds: the tokens drafted in one round, which follow ``confirmed`` tokens of the reply.

    (session, reply, round) names the round; sending it again has no further effect. With no tokens and the number of
    a verified round, ``resampled`` only reports how the reply ended.
    """

    LAYOUT = (
        "session", "reply", "round", "confirmed", "tokens", "evidence", "parents", "resampled", "assumed", "tag",
    )  # fmt: skip

    session: Id  # number of the session, above 0
    reply: UInt32  # number of the reply within the session
    round: UInt32  # number of the round within the reply, from 1
    confirmed: UInt32  # verified tokens of the reply before this draft
    tokens: Drafted  # drafted token ids; for a tree: its nodes, parents before children
    evidence: Evidence = b""  # what verification needs of the draft's distributions (decoding.packing); empty: nothing
    parents: Parents = b""  # tree: 0 for the root's children, else the parent's index + 1; empty: a sequence
    assumed: DigestIfAny = b""  # sent ahead: digest (prefix_digest) of the reply's tokens before it; empty: not ahead
    resampled: Drafted = []  # split: tokens the robot drew after the last rejection, in order; counted in confirmed
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class Outcome(Fields, frozen=True, tag=7):
    """Verifier -> robot, in rounds: ``accepted`` tokens of the draft hold, and ``next_token`` follows them.

    Only a final outcome is binding. Early exits' outcomes are forecasts: they come in any order or not at all, each
    (accepted, next_token) of a round once, and none after the round's final outcome.
    """

    LAYOUT = (
        "session", "reply", "round", "layer", "accepted", "next", "compute_us", "confidence", "is_final",
        "tag",
    )  # fmt: skip

    session: Id  # number of the session, above 0
    reply: UInt32  # number of the reply within the session
    round: UInt32  # the round this answers
    layer: UInt16  # decoder layers run so far (counted from 1)
    accepted: UInt16  # drafted tokens that hold; for a tree: 1 + the index of the last accepted node
    next_token: TokenId = 0  # token after them; 0 where a distribution stands for it
    confidence: Confidence = 0.0  # softmax probability (temperature 1) of that layer's likeliest token, 0..1
    is_final: bool = True  # binding; false: an early exit's forecast
    compute_us: UInt32 = 0  # the model's time for this round, microseconds; round 1: with reading the observation
    distribution: Evidence = b""  # split: the target's p after the accepted tokens; tree: several (decoding.packing)
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none

    @property
    def next(self) -> TokenId | Annotated[bytes, Meta(min_length=1, max_length=MAX_EVIDENCE_BYTES)]:
        """What follows the accepted tokens: the distribution to draw it from where there is one, else the token."""
        return self.distribution or self.next_token


class Refusal(Fields, frozen=True, tag=8):
    """Verifier -> robot: the named round, observation or draft of a stream could not be served."""

    session: UInt32  # number of the session; 0: none in particular
    reply: UInt32  # number of the reply within the session
    round: UInt32  # number of the round within the reply, or of the stream; 0: the observation
    code: ShortText  # machine-readable reason (RefusalCode), e.g. "unknown-session", "out-of-step"
    sentence: Sentence  # the reason for people, and the remedy
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class SessionClose(Fields, frozen=True, tag=9):
    """Robot -> verifier: the session is over; its cache may go."""

    session: Id  # number of the session, above 0
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class Question(Fields, frozen=True, tag=10):
    """Device -> cloud: answer this with me, from your own documents (DRAGON's aggregation; no session is opened).

    Holds all that the answer takes: after a lost link or a restart of the cloud the next attempt goes on with it.
    """

    ask: Id  # names the question, random, above 0
    attempt: UInt16  # number of the attempt, from 0; the newest ends those before
    protocol_version: UInt16  # must be the cloud's
    tokenizer_fingerprint: ShortText  # must equal the cloud's
    vocab_size: UInt32  # rows of the device's LM head (padding included)
    text: Instruction  # the question, at most 2000 characters (UTF-8)
    documents: Annotated[int, Meta(ge=0, le=MAX_DOCUMENTS)]  # most documents of the cloud to read, up to 64
    temperature: Temperature  # 0: greedy
    seed: Seed  # of the shared noise (decoding.coupling.gumbel), below 2^63
    reply: UInt32  # with the seed: the key of the shared noise
    head: Annotated[int, Meta(ge=1, le=MAX_HEAD)]  # tokens of the evidence that proposals carry, 1 to 4096
    max_tokens: UInt16  # longest answer, tokens
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]  # tokens a side may draft ahead of what is decided, 1 to 64
    aggregator: ShortText  # the side that begins: "device" or "cloud"
    eos_token_ids: EndIds = []  # of the device; those of either side end the answer
    answered: Annotated[list[TokenId], Meta(max_length=MAX_REPLY)] = []  # tokens decided in earlier attempts
    relevance_fingerprint: ShortText = ""  # of what computes the device's relevances; must equal the cloud's
    nonce: Nonce = b""  # 16 fresh random bytes; empty: without a token
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class QuestionReply(Fields, frozen=True, tag=11):
    """Cloud -> device: the question is being answered (error empty), or why it is not."""

    ask: Id  # the question, above 0
    attempt: UInt16  # the attempt this answers
    error: Sentence  # one sentence; empty: it is being answered
    model_name: ShortText  # the cloud's text model, for people
    model_fingerprint: ShortText  # of its configuration and weights
    vocab_size: UInt32  # rows of its LM head (padding included)
    eos_token_ids: EndIds = []  # of the cloud; those of either side end the answer
    documents: UInt16 = 0  # documents that the cloud found
    held: UInt32 = 0  # from the question's arrival to this reply, microseconds; the rest of the wait was the link
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none
    sources: Names = []  # of those documents, in their order; never their text


class Proposal(Fields, frozen=True, tag=12):
    """Either side -> the other: the draft of one token, with what the aggregator needs of its distribution."""

    ask: Id  # the question, above 0
    attempt: UInt16  # the attempt
    position: UInt16  # of the token in the answer, from 0
    rejections: UInt16  # drafts of this side rejected before this one was made
    token: TokenId  # the draft
    log_weight: LogWeight  # log-sum-exp of the relevance of this side's documents, -1000 to 1000
    evidence: Evidence  # a head of the distribution (decoding.packing); empty: from the aggregator
    decode_us: UInt32 = 0  # time the draft took, microseconds
    sent: UInt32 = 0  # this side's clock, microseconds modulo 2^32
    echo: UInt32 = 0  # the other side's `sent` that arrived last
    held: UInt32 = 0  # how long ago that was, microseconds
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none
    source: UInt16 = 0  # from the cloud: its document that tells the token, from 1, as in QuestionReply; 0: none
    source_share: Share = 0  # how much of the token's probability behind the cloud's documents it gives, in hundredths


class Verdict(Fields, frozen=True, tag=13):
    """The side that aggregates -> the other: the token at one position of the answer."""

    ask: Id  # the question, above 0
    attempt: UInt16  # the attempt
    position: UInt16  # of the token in the answer, from 0
    token: TokenId  # the token
    device_accepted: bool  # it equals the draft of the device, or the one that it follows
    cloud_accepted: bool  # it equals the draft of the cloud, or the one that it follows
    hands_over: bool = False  # the receiver aggregates from the next position on
    decode_us: UInt32 = 0  # time the aggregator's own draft took, microseconds
    sent: UInt32 = 0  # this side's clock, microseconds modulo 2^32
    echo: UInt32 = 0  # the other side's `sent` that arrived last
    held: UInt32 = 0  # how long ago that was, microseconds
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none
    source: UInt16 = 0  # from the cloud: its document that tells the token, from 1, as in QuestionReply; 0: none
    source_share: Share = 0  # how much of the token's probability behind the cloud's documents it gives, in hundredths
    cloud_share: Share = 0  # of the weight of both sides' documents that the cloud's have, in hundredths


class Reveal(Fields, frozen=True, tag=14):
    """The side that aggregates asks for the other's probabilities of some tokens, and the other answers."""

    ask: Id  # the question, above 0
    attempt: UInt16  # the attempt
    position: UInt16  # of the draft they belong to
    rejections: UInt16  # of that draft
    ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_REVEALED)]  # token ids, ascending
    values: Probabilities = b""  # their probabilities as little-endian float32; empty: the request
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


class QuestionEnd(Fields, frozen=True, tag=15):
    """Either side -> the other: the question is over."""

    ask: Id  # the question, above 0
    attempt: UInt16  # the attempt
    code: ShortText  # machine-readable reason (EndCode), e.g. "cancelled", "unknown"
    sentence: Sentence  # the reason for people
    tag: Tag = b""  # proof that the sender holds the token (wire.authentication); empty: none


Message = (
    SessionRequest
    | SessionReply
    | Observation
    | DraftTokens
    | VerifiedTokens
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
