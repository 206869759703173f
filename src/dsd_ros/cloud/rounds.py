# SPDX-License-Identifier: Apache-2.0
"""The verifier's nouns: a robot's session, its reply, what a pass has to do for it, and the target that makes the pass.

They import no queue, link or model, so sessions, target and verification can all import them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from dsd_ros.cloud.drafts import StreamedDraft
from dsd_ros.cloud.exits import ExitRules
from dsd_ros.decoding.constraint import Constraint
from dsd_ros.decoding.methods import DraftVerdict, split
from dsd_ros.decoding.modes import Proof, mode
from dsd_ros.decoding.packing import PackingError
from dsd_ros.decoding.settings import SamplingError, SamplingSettings, TreeError
from dsd_ros.vlm.errors import VlmError
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import (
    MAX_EVIDENCE_BYTES,
    Draft,
    DraftTokens,
    Message,
    Observation,
    Outcome,
    Refusal,
    RefusalCode,
    SessionRequest,
)
from dsd_ros.wire.pictures import LastPictures, kept_pictures

_log = logging.getLogger(__name__)
FAILED = "the verifier's model failed on this; the verifier's log says how"

# Sends a message to a robot.
Answer = Callable[[Message], object]


class Prefix(Protocol):
    """A prompt and the verified tokens of its reply, as the target holds them."""

    prompt_length: int  # tokens of the prompt, with those of the pictures
    tokens: list[int]

    @property
    def unread(self) -> int:
        """How many tokens of the prompt the target has not read yet; 0 where the target reads it whole at once."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values that this process holds; 0 where another does."""

    def append(self, tokens: Sequence[int]) -> None:
        """Extend the reply by verified tokens; the next pass takes them along."""


@dataclass
class ReplyState:
    """The reply that a session is at. ``outcomes`` answered its last rounds and are kept for retransmission.

    ``begun_at`` rounds were verified before by a verifier that has forgotten them: the robot stated them.
    """

    number: int
    sequence: Prefix | None
    prefill_us: int = 0
    refusal: Refusal | None = None  # the observation could not be used: the answer to all its rounds
    outcomes: list[Outcome] = field(default_factory=list)
    begun_at: int = 0
    received: int = 0  # the robot has the outcomes of this many rounds for certain
    ended: bool = False  # mode stream: by an end token, or at its longest length
    owed: int = 0  # tokens, at most, that the robot draws itself after the last round's rejection
    reading: int = 0  # tokens of the prompt and of what other verifiers have added, until it is read
    generation: Generation | None = None  # by a target that decodes replies itself, while it does

    @property
    def tokens(self) -> list[int]:
        """The verified tokens."""
        return self.sequence.tokens if self.sequence is not None else []

    @property
    def held(self) -> int:
        """Tokens of the prompt and of the reply."""
        return self.sequence.prompt_length + len(self.sequence.tokens) if self.sequence is not None else 0

    @property
    def unread(self) -> int:
        """How many tokens of the prompt the target has not read yet."""
        return self.sequence.unread if self.sequence is not None else 0

    @property
    def rounds(self) -> int:
        """How many rounds are verified."""
        return self.begun_at + len(self.outcomes)

    def since(self, number: int) -> list[Outcome]:
        """The outcomes of round ``number`` and those after it; the robot has those from before ``begun_at``."""
        return self.outcomes[max(0, number - 1 - self.begun_at) :]


@dataclass
class Session:
    """One robot's state. ``peer`` is who may use it; None while its link is down."""

    id: int
    ticket: bytes  # shown to resume it
    request: SessionRequest
    sampling: SamplingSettings
    opener: tuple[Hashable, int]  # peer and request number: a duplicate of the request opens nothing
    peer: Hashable | None
    answer: Answer | None
    last_used: float
    exits: ExitRules | None = None  # None: no early outcomes
    constraint: Constraint | None = None  # what its replies are held to
    reply: ReplyState | None = None
    draft: StreamedDraft = field(default_factory=StreamedDraft)  # mode stream
    pictures: LastPictures[np.ndarray] = field(default_factory=kept_pictures)  # the last, by digest
    robot: str = ""  # its name, where each robot has a token of its own
    used: bool = True  # over DDS False until its robot has sent more than an opening, which may be a recorded one
    lacks: int = -1  # the newest reply whose observation named a picture that is not among them

    @property
    def replaceable(self) -> bool:
        """Whether a new session may take its place when there is no room, since no robot is known to use it."""
        return self.peer is None or not self.used

    @property
    def streams(self) -> bool:
        """Whether the target decodes by itself, and never waits for a draft."""
        return mode(self.request.mode).streams

    @property
    def splits(self) -> bool:
        """Whether the robot draws what follows a rejection."""
        return self.proof.declared.recovers and not self.sampling.greedy

    @property
    def proof(self) -> Proof:
        """The proof that the robot's drafts come with."""
        return Proof(self.request.proof) if self.request.proof else mode(self.request.mode).proof

    @property
    def newest(self) -> int:
        """The newest reply that needs no observation (any more)."""
        reply = self.reply  # once: another thread may change it
        return reply.number if reply is not None else self.lacks - 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of the reply's KV cache."""
        reply = self.reply
        return reply.sequence.cache_bytes if reply is not None and reply.sequence is not None else 0

    def has_had(self, observation: Observation) -> bool:
        """Whether an observation is a duplicate, or older than the reply in progress."""
        reply = self.reply
        if reply is not None and observation.reply == reply.number:
            if self.streams:
                return len(observation.verified) <= len(reply.tokens)
            return observation.rounds <= reply.rounds  # else a late duplicate has begun it
        return observation.reply <= self.newest

    def send(self, message: Message) -> bool:
        """Send to the peer that holds the session now; False if there is none."""
        answer = self.answer
        if answer is not None:
            answer(message)
        return answer is not None


class RoundRefused(Exception):
    """A round cannot be served; one sentence and the code that goes with it."""

    def __init__(self, code: RefusalCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code

    @classmethod
    def of(cls, error: Exception) -> RoundRefused:
        """The refusal for an error of a pass. An unexpected error is logged, and the robot learns no details."""
        if isinstance(error, RoundRefused):
            return error
        if isinstance(error, (SamplingError, TreeError, PackingError, WireError)):
            return cls(RefusalCode.BAD_DISTRIBUTION, str(error))
        if isinstance(error, VlmError):
            return cls(RefusalCode.MODEL_ERROR, str(error))
        _log.error("the target failed on a round", exc_info=error)
        return cls(RefusalCode.MODEL_ERROR, FAILED)

    def message(self, draft: Draft) -> Refusal:
        """The message that refuses ``draft``."""
        return Refusal(draft.session, draft.reply, draft.round, self.code, str(self)[:1024])


@dataclass(frozen=True)
class PendingRound:
    """A draft that is in step with its reply, for a target to verify. In mode stream the engine writes it."""

    session: Session
    reply: ReplyState
    draft: Draft

    @property
    def exits(self) -> ExitRules | None:
        """The early exits that speak in this round, if any."""
        return self.session.exits

    def outcome(self, verdict: DraftVerdict, layer: int, confidence: float, ran_us: int, final: bool) -> Outcome:
        """The message for a verdict that took ``ran_us`` microseconds; WireError when no message holds it."""
        return Outcome(
            session=self.session.id,
            reply=self.reply.number,
            round=self.draft.round,
            layer=layer,
            accepted=verdict.accepted,
            next_token=verdict.next_token,
            confidence=confidence,
            is_final=final,
            compute_us=ran_us + (0 if self.reply.outcomes else self.reply.prefill_us),
            distribution=_packed(self.draft, verdict),
        )


@dataclass(frozen=True)
class PendingPrompt:
    """The next ``tokens`` of a reply's prompt, for a target to read."""

    session: Session
    reply: ReplyState
    tokens: int

    def refuse(self, error: RoundRefused) -> Refusal:
        """Give the reply up: its prompt cannot be read. The message that answers all its rounds."""
        reply = self.reply
        reply.sequence, reply.refusal = None, Refusal(self.session.id, reply.number, 0, error.code, str(error)[:1024])
        return reply.refusal


Work = PendingRound | PendingPrompt
OnEarly = Callable[[PendingRound, Outcome], object]


class TargetModel(Protocol):
    """What a verifier reports about its model."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def tokenizer_fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...


class Target(Protocol):
    """What any target says of itself, and how a reply begins."""

    @property
    def model(self) -> TargetModel: ...

    @property
    def exit_layers(self) -> tuple[int, ...]:
        """The layers that can forecast a round's outcome; empty when there are none."""

    def check(self, request: SessionRequest, sampling: SamplingSettings) -> None:
        """ValueError, one sentence, for a session that this target cannot serve."""

    def prefill(self, image: np.ndarray | None, instruction: str, history: Sequence[tuple[np.ndarray, str]]) -> Prefix:
        """Read an observation: RGB uint8 (H, W, 3) and, oldest first, earlier pictures with their actions.

        The prompt may stay ``unread``. VlmError for what the model cannot read. Called by several threads, also during
        a pass.
        """


@runtime_checkable
class VerifyingTarget(Target, Protocol):
    """Makes one pass for all rounds. The engine's worker thread calls ``verify``."""

    def verify(self, work: Sequence[Work], on_early: OnEarly) -> Iterator[tuple[Work, Outcome | RoundRefused | None]]:
        """Verify at most one round of each reply, and leave each reply's prefix at its verified tokens.

        What is unread of a round's own prompt is read first. A ``PendingPrompt`` comes only for a prefix that is
        ``unread``; its result is None. ``on_early`` gets the outcomes of early exits in the meantime. Each item is
        yielded once, in any order, as soon as its result is known. A refused round leaves its reply unchanged. Never
        raises for one item.
        """


@dataclass(eq=False)
class Generation:
    """A reply that a target decodes at its own speed, from the tokens that are verified when it begins."""

    session: Session
    reply: ReplyState
    take: Callable[[Generation, list[int] | RoundRefused, float], object]
    """Gets each step's tokens, or why there are no more, and the step's seconds; from any thread."""
    stopped: bool = False  # the rest of the reply is not needed


@runtime_checkable
class GeneratingTarget(Target, Protocol):
    """Decodes replies of mode stream by itself and batches them itself. No call waits for the model."""

    def generate(self, generation: Generation) -> None:
        """Decode a reply on, until an end token, its longest length, or ``stopped``."""

    def draft(self, message: DraftTokens) -> None:
        """What a robot's draft says comes next; the target's next step may verify it."""


def _packed(draft: Draft, verdict: DraftVerdict) -> bytes:
    """The rows of p that the robot needs to go on after a rejection; WireError when no message holds them."""
    if verdict.target is None:
        return b""
    packed = split.pack_target(verdict.target, bool(draft.parents))
    if len(packed) > MAX_EVIDENCE_BYTES:
        raise WireError(
            f"{len(verdict.target)} distributions of the target over {verdict.target.shape[-1]} tokens take "
            f"{len(packed)} bytes, and a message holds {MAX_EVIDENCE_BYTES}; draft smaller trees, or sample with top_k"
        )
    return packed
