"""Messages of a question that two sides answer together, each from its own documents (DRAGON's aggregation).

A question is named by ``ask`` and ``attempt``. All it takes stands in the Question, so that a lost link or a cloud
that was started anew is mended by another attempt with the tokens that hold so far; no session is opened.
Whichever side aggregates, positions count the answer's tokens from 0.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from dsd_ros.wire.fields import (
    MAX_EVIDENCE_BYTES,
    EndIds,
    Fields,
    Instruction,
    Seed,
    Sentence,
    SessionId,
    ShortText,
    Temperature,
    TokenId,
    UInt16,
    UInt32,
    Verified,
)

MAX_DOCUMENTS = 64  # of a side
MAX_WINDOW = 64  # drafts ahead of what is decided
MAX_HEAD = 4096  # tokens of a head
MAX_REVEALED = 1024  # probabilities in one message
MAX_LOG_WEIGHT = 1000.0

AskId = SessionId
LogWeight = Annotated[float, Meta(ge=-MAX_LOG_WEIGHT, le=MAX_LOG_WEIGHT)]


class EndCode(StrEnum):
    """Why a question's answering ended before its answer did."""

    CANCELLED = "cancelled"  # its asker does not want the answer any more
    UNSUPPORTED = "unsupported"  # a valid message asking for what this side does not do
    OVERLOADED = "overloaded"  # too many answers at once: ask again later
    BAD_QUESTION = "bad-question"  # text or prompt cannot be used
    BAD_EVIDENCE = "bad-evidence"  # a draft's evidence is missing, has the wrong size, or is none
    OUT_OF_STEP = "out-of-step"  # contradicts what was agreed
    MODEL_ERROR = "model-error"  # the model could not go on
    UNKNOWN = "unknown"  # no such question (any more): ask again with another attempt
    CLOSING = "closing"  # this side shuts down


class Question(Fields, frozen=True, tag=8):
    """Device -> cloud: answer ``text`` with me, from your own ``documents`` likeliest documents.

    ``ask`` is random; ``attempt`` counts how often it was asked, and a later one ends those before.
    ``reply`` and ``seed`` are the key of the shared noise (``decoding.coupling.gumbel``). ``randomness``: "shared"
    or "independent"; ``evidence``: "sparse", "full" or "lossy-nucleus", with ``head`` tokens in a sparse one.
    ``window``: how many tokens each side may draft ahead of what is decided. ``reweight_every``: after
    how many tokens a side weighs its documents anew (0: never). ``aggregator``, "device" or "cloud",
    begins; ``schedule`` ("auto", "delta-z", "device", "cloud" or "random") says how it changes. ``answered`` are
    the tokens that hold already. A token of either side's ``eos_token_ids`` ends the answer.
    ``relevance_fingerprint`` names what makes the device's relevances: those of two sides meet in one softmax.
    """

    ask: AskId
    attempt: UInt16
    protocol_version: UInt16
    tokenizer_fingerprint: ShortText
    vocab_size: UInt32
    text: Instruction
    documents: Annotated[int, Meta(ge=0, le=MAX_DOCUMENTS)]
    temperature: Temperature
    seed: Seed
    reply: UInt32
    randomness: ShortText
    evidence: ShortText
    head: Annotated[int, Meta(ge=1, le=MAX_HEAD)]
    max_tokens: UInt16
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]
    reweight_every: UInt16
    schedule: ShortText
    aggregator: ShortText
    eos_token_ids: EndIds = []
    answered: Verified = []
    relevance_fingerprint: ShortText = ""


class QuestionReply(Fields, frozen=True, tag=9):
    """Cloud -> device: the question is being answered (``error`` empty), or why it is not.

    ``documents`` is how many documents were found, ``held`` for how many microseconds the Question was, which
    leaves its sender the link's share of what the reply took.
    """

    ask: AskId
    attempt: UInt16
    error: Sentence
    model_name: ShortText
    model_fingerprint: ShortText
    vocab_size: UInt32
    eos_token_ids: EndIds = []
    documents: UInt16 = 0
    held: UInt32 = 0


class Proposal(Fields, frozen=True, tag=10):
    """One side's draft of the token at ``position``, with what the aggregator has to know of its distribution.

    ``rejections``: how many drafts of this side had been rejected when it was made; it stands behind the
    tokens decided until then and this side's own drafts. ``log_weight``: log-sum-exp of the relevance of this
    side's documents. ``evidence`` is a row (``packing.pack_row``), a head (``packing.pack_head``) or a nucleus
    (``packing.pack_kept``). ``decode_us``: how long the draft took to make.
    ``sent``, ``echo`` and ``held`` measure the link, in microseconds modulo 2^32: this side's clock, the other's
    ``sent`` that arrived last, and how long ago that was.
    """

    ask: AskId
    attempt: UInt16
    position: UInt16
    rejections: UInt16
    token: TokenId
    log_weight: LogWeight
    evidence: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)]
    decode_us: UInt32 = 0
    sent: UInt32 = 0
    echo: UInt32 = 0
    held: UInt32 = 0


class Verdict(Fields, frozen=True, tag=11):
    """Aggregator -> the other side: ``token`` stands at ``position``, and whose draft it equals.

    ``switch``: whoever receives this aggregates from the next position on. ``decode_us``: how long the
    aggregator's own draft took to make. The last three are as of a Proposal.
    """

    ask: AskId
    attempt: UInt16
    position: UInt16
    token: TokenId
    device_accepted: bool
    cloud_accepted: bool
    switch: bool = False
    decode_us: UInt32 = 0
    sent: UInt32 = 0
    echo: UInt32 = 0
    held: UInt32 = 0


class Reveal(Fields, frozen=True, tag=12):
    """Aggregator -> the other side: your probabilities of ``ids`` at ``position``, please (``values`` empty).

    And the answer: the same ids, ascending, with their probabilities as little-endian float32.
    """

    ask: AskId
    attempt: UInt16
    position: UInt16
    rejections: UInt16
    ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_REVEALED)]
    values: Annotated[bytes, Meta(max_length=4 * MAX_REVEALED)] = b""


class QuestionEnd(Fields, frozen=True, tag=13):
    """Either side: it is over with this question; ``code`` is one of EndCode's values, ``sentence`` says why."""

    ask: AskId
    attempt: UInt16
    code: ShortText
    sentence: Sentence
