"""One observation read, one round verified: what a turn of the engine does with the target."""

from __future__ import annotations

import logging
import math
import time

import torch

from dsd_ros.cloud.sessions import Reply, Session
from dsd_ros.decoding.acceptance import Verdict, check_distributions, verify_draft, verify_greedy
from dsd_ros.decoding.sampling import SamplingError, generator_for, transform
from dsd_ros.vlm.errors import VlmError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.codec import WireError, unpack_distributions
from dsd_ros.wire.messages import Draft, Observation, Outcome, Refusal, RefusalCode
from dsd_ros.wire.pictures import decode_picture

_log = logging.getLogger(__name__)
_FAILED = "the verifier's model failed on this; the verifier's log says how"


class Refused(Exception):
    """A round cannot be served; one sentence and the code that goes with it."""

    def __init__(self, code: RefusalCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def open_reply(model: VisionLanguageModel, observation: Observation) -> Reply:
    """Read the observation with the target. A failure is kept in the reply, to answer all its rounds."""
    began = time.perf_counter()
    code, sentence = RefusalCode.BAD_OBSERVATION, ""
    try:
        sequence = model.prefill(decode_picture(observation), observation.instruction)
        return Reply(observation.reply, sequence, _microseconds(began))
    except (VlmError, WireError) as error:
        sentence = str(error)
    except Exception:
        _log.exception("the target failed on an observation")
        code, sentence = RefusalCode.MODEL_ERROR, _FAILED
    refusal = Refusal(observation.session, observation.reply, 0, code, sentence[:1024])
    return Reply(observation.reply, None, refusal=refusal)


def verify_round(
    model: VisionLanguageModel, session: Session, reply: Reply, draft: Draft
) -> Outcome:
    """Verify a draft in one pass of the target and leave its sequence at the verified tokens.

    Refused when the round is out of step or its draft cannot be used; the sequence is then unchanged.
    """
    sequence = reply.sequence
    assert sequence is not None
    confirmed = len(sequence.tokens)
    number = len(reply.outcomes) + 1
    if draft.round != number or draft.confirmed != confirmed:
        raise Refused(
            RefusalCode.OUT_OF_STEP,
            f"round {draft.round} behind {draft.confirmed} tokens is out of step: the verifier is at "
            f"round {number} behind {confirmed}",
        )
    if draft.parents:
        raise Refused(RefusalCode.UNSUPPORTED, "this verifier does not take token trees")
    tokens = draft.tokens
    # What is beyond the context cannot be verified: a shorter draft is as exact.
    room = max(0, model.max_length - sequence.prompt_length - confirmed)
    try:
        q = _draft_distributions(session, draft)[:room]
        tokens = tokens[:room]
        began = time.perf_counter()
        # An id the target does not have is rejected whatever follows, so any other stands in for it.
        logits = sequence.verify([t if t < model.vocab_size else 0 for t in tokens])
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        compute_us = _microseconds(began)
        verdict = _judge(session, reply, number, tokens, q, logits)
        confidence = _confidence(logits[verdict.accepted])
        sequence.rollback(confirmed + verdict.accepted)
        sequence.append([verdict.next_token])
    except Exception as error:
        if len(sequence.tokens) > confirmed:
            sequence.rollback(confirmed)
        raise _refusal(error) from error
    return Outcome(
        session=session.id,
        reply=reply.number,
        round=number,
        layer=model.num_layers,
        accepted=verdict.accepted,
        next_token=verdict.next_token,
        confidence=confidence,
        is_final=True,
        compute_us=compute_us + (reply.prefill_us if number == 1 else 0),
    )


def _draft_distributions(session: Session, draft: Draft) -> torch.Tensor:
    """q (gamma, V) of the draft, checked; with no rows in greedy, where the ids suffice."""
    if session.sampling.greedy or not draft.tokens:
        return torch.empty(0, 0)
    if not draft.distributions:
        raise SamplingError("a sampled draft was sent without its distributions")
    q = unpack_distributions(draft.distributions, len(draft.tokens), session.request.vocab_size)
    check_distributions(draft.tokens, q)
    return q


def _judge(
    session: Session,
    reply: Reply,
    number: int,
    tokens: list[int],
    q: torch.Tensor,
    logits: torch.Tensor,
) -> Verdict:
    if session.sampling.greedy:
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise FloatingPointError("the target's logits are not finite")
        return verify_greedy(tokens, logits.argmax(dim=-1).tolist())
    p = transform(logits, session.sampling).cpu()
    generator = generator_for("verifier", session.request.seed, reply.number, number)
    return verify_draft(tokens, q, p, generator)


def _confidence(logits: torch.Tensor) -> float:
    """The largest softmax probability of one row of logits (V,), whatever the temperature in use."""
    return min(1.0, math.exp(float(logits.amax() - logits.logsumexp(dim=-1))))


def _refusal(error: Exception) -> Refused:
    if isinstance(error, (SamplingError, WireError)):
        return Refused(RefusalCode.BAD_DISTRIBUTION, str(error))
    if isinstance(error, VlmError):
        return Refused(RefusalCode.MODEL_ERROR, str(error))
    _log.error("the target failed on a round", exc_info=error)
    return Refused(RefusalCode.MODEL_ERROR, _FAILED)


def _microseconds(began: float) -> int:
    return min(int((time.perf_counter() - began) * 1e6), (1 << 32) - 1)
