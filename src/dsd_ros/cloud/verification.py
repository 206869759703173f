# SPDX-License-Identifier: Apache-2.0
"""Checks one observation or one round before a target sees it, and makes the messages that answer it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsd_ros.cloud.exits import ExitRules
from dsd_ros.cloud.sessions import ReplyState, Session
from dsd_ros.decoding.methods import DraftVerdict, split
from dsd_ros.decoding.packing import PackingError
from dsd_ros.decoding.settings import SamplingError, TreeError
from dsd_ros.vlm.errors import VlmError
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_EVIDENCE_BYTES, Draft, Observation, Outcome, Refusal, RefusalCode, prefix_digest
from dsd_ros.wire.pictures import LastPictures, UnknownPicture, read_pictures

if TYPE_CHECKING:
    from dsd_ros.cloud.target import Target

_log = logging.getLogger(__name__)
_FAILED = "the verifier's model failed on this; the verifier's log says how"


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
        return cls(RefusalCode.MODEL_ERROR, _FAILED)

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


def open_reply(target: Target, observation: Observation, kept: LastPictures[np.ndarray]) -> ReplyState:
    """Let the target begin to read the observation. A failure is kept in the reply, to answer all its rounds.

    ``kept``: the session's last pictures by digest. UnknownPicture when one of the history is not there.
    """
    began = time.perf_counter()
    code, sentence = RefusalCode.BAD_OBSERVATION, ""
    try:
        _check_progress(observation, target.model.vocab_size)
        with kept.lock:
            image, history = read_pictures(observation, kept)
        sequence = target.prefill(image, observation.instruction, history)
        sequence.append(observation.verified)  # they ride along with the next draft
        return ReplyState(observation.reply, sequence, microseconds_since(began), begun_at=observation.rounds)
    except UnknownPicture:
        raise
    except (VlmError, WireError) as error:
        sentence = str(error)
    except Exception:
        _log.exception("the target failed on an observation")
        code, sentence = RefusalCode.MODEL_ERROR, _FAILED
    refusal = Refusal(observation.session, observation.reply, 0, code, sentence[:1024])
    return ReplyState(observation.reply, None, refusal=refusal)


def _check_progress(observation: Observation, vocab_size: int) -> None:
    """WireError for an impossible beginning of a reply, as stated by the robot: each round gives at least a token."""
    verified, rounds = observation.verified, observation.rounds
    if rounds > len(verified):
        raise WireError(f"{rounds} rounds do not give the {len(verified)} tokens of a reply so far")
    if verified and max(verified) >= vocab_size:
        raise WireError(f"token {max(verified)} is not in the target's vocabulary of {vocab_size}")


def check_in_step(reply: ReplyState, draft: Draft) -> None:
    """RoundRefused when a draft is not the next round, or was sent ahead after tokens that did not come true."""
    number = reply.rounds + 1
    in_step = draft.round == number and _follows(reply, draft)
    if draft.assumed and not (in_step and draft.assumed == prefix_digest(reply.tokens)):
        raise RoundRefused(
            RefusalCode.ASSUMPTION_FAILED,
            f"round {draft.round} was sent ahead after tokens that did not come true; draft it again",
        )
    if not in_step:
        raise RoundRefused(
            RefusalCode.OUT_OF_STEP,
            f"round {draft.round} after {draft.confirmed} tokens is out of step: the verifier is at "
            f"round {number} after {_known(reply)}",
        )


def end_reply(reply: ReplyState, draft: Draft, vocab_size: int) -> None:
    """Append a reply's last tokens, which the robot drew itself; RoundRefused when they cannot be those."""
    if not _follows(reply, draft):
        raise RoundRefused(
            RefusalCode.OUT_OF_STEP,
            f"{len(draft.resampled)} tokens that make {draft.confirmed} are no end of a reply of {_known(reply)}",
        )
    try:
        take_recovered(reply, draft.resampled, vocab_size)
    except SamplingError as error:
        raise RoundRefused.of(error) from error


def take_recovered(reply: ReplyState, recovered: list[int], vocab_size: int) -> None:
    """Append the tokens that the robot drew after the last round's rejection; none: no change.

    SamplingError when one of them is no token of the target.
    """
    if not recovered:
        return
    if max(recovered) >= vocab_size:
        raise SamplingError(f"token {max(recovered)} cannot follow a rejection: the target has {vocab_size} tokens")
    assert reply.sequence is not None
    reply.sequence.append(recovered)
    reply.owed = 0


def _follows(reply: ReplyState, draft: Draft) -> bool:
    """Whether a draft brings the recovered tokens that the robot owes, if any, and its token count is right."""
    recovered = len(draft.resampled)
    fits = 1 <= recovered <= reply.owed if reply.owed else not recovered
    return fits and draft.confirmed == len(reply.tokens) + recovered


def _known(reply: ReplyState) -> str:
    """How many tokens a reply is known to have, in words."""
    known = len(reply.tokens)
    return f"{known}, and 1 to {reply.owed} that the robot draws" if reply.owed else f"{known}"


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


def microseconds_since(began: float) -> int:
    """Microseconds since ``began`` of time.perf_counter(), as many as a message can carry."""
    return min(int((time.perf_counter() - began) * 1e6), (1 << 32) - 1)
