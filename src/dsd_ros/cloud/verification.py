# SPDX-License-Identifier: Apache-2.0
"""Checks one observation or one round before a target sees it, and makes the messages that answer it."""

from __future__ import annotations

import logging
import time

import numpy as np

from dsd_ros.cloud.rounds import FAILED, ReplyState, RoundRefused, Target
from dsd_ros.decoding.settings import SamplingError
from dsd_ros.vlm.errors import VlmError
from dsd_ros.vlm.prompts import Chat
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import Draft, Observation, Refusal, RefusalCode, prefix_digest
from dsd_ros.wire.pictures import LastPictures, UnknownPicture, read_pictures

_log = logging.getLogger(__name__)


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
        told = observation.messages.decode(errors="replace")
        instruction = Chat(told) if told else observation.instruction
        sequence = target.prefill(image, instruction, history)
        sequence.append(observation.verified)  # they ride along with the next draft
        return ReplyState(observation.reply, sequence, microseconds_since(began), begun_at=observation.rounds)
    except UnknownPicture:
        raise
    except (VlmError, WireError) as error:
        sentence = str(error)
    except Exception:
        _log.exception("the target failed on an observation")
        code, sentence = RefusalCode.MODEL_ERROR, FAILED
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


def microseconds_since(began: float) -> int:
    """Microseconds since ``began`` of time.perf_counter(), as many as a message can carry."""
    return min(int((time.perf_counter() - began) * 1e6), (1 << 32) - 1)
