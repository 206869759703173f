"""One observation read, one round verified: what a turn of the engine does with the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from dsd_ros.cloud.exits import ExitListener, confidence_of
from dsd_ros.cloud.sessions import Reply, Session
from dsd_ros.decoding.acceptance import (
    Verdict,
    check_distributions,
    verify_coupled,
    verify_draft,
    verify_greedy,
    verify_split,
)
from dsd_ros.decoding.coupling import gumbel
from dsd_ros.decoding.modes import Proof
from dsd_ros.decoding.sampling import SamplingError, generator_for, transform
from dsd_ros.decoding.truncation import restored
from dsd_ros.vlm.errors import VlmError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.codec import WireError, unpack_distributions
from dsd_ros.wire.messages import (
    Draft,
    Observation,
    Outcome,
    Refusal,
    RefusalCode,
    prefix_digest,
)
from dsd_ros.wire.packing import pack_distribution, unpack_chances, unpack_kept
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
    model: VisionLanguageModel,
    session: Session,
    reply: Reply,
    draft: Draft,
    early: Callable[[Outcome], object] | None = None,
) -> Outcome:
    """Verify a draft in one pass of the target and leave its sequence at the verified tokens.

    ``early`` is given the outcomes of the session's exits during the pass; None: no exits this time.
    Refused when the round is out of step or its draft cannot be used; the sequence is then unchanged.
    """
    sequence = reply.sequence
    assert sequence is not None
    before = len(sequence.tokens)
    confirmed = before + len(draft.resampled)
    number = len(reply.outcomes) + 1
    in_step = (
        draft.round == number
        and draft.confirmed == confirmed
        and len(draft.resampled) == int(reply.owed)
    )
    if draft.assumed and not (in_step and draft.assumed == prefix_digest(sequence.tokens)):
        raise Refused(
            RefusalCode.ASSUMPTION_FAILED,
            f"round {draft.round} was sent ahead behind tokens that did not come true; draft it again",
        )
    if not in_step:
        raise Refused(
            RefusalCode.OUT_OF_STEP,
            f"round {draft.round} behind {draft.confirmed} tokens is out of step: the verifier is at "
            f"round {number} behind {before + int(reply.owed)}",
        )
    if draft.parents:
        raise Refused(RefusalCode.UNSUPPORTED, "this verifier does not take token trees")
    # What is beyond the context cannot be verified: a shorter draft is as exact.
    room = max(0, model.max_length - sequence.prompt_length - confirmed)
    tokens = draft.tokens[:room]
    try:
        if draft.resampled:
            take_resampled(model, reply, draft.resampled[0])
        judge = _judge_of(session, reply, draft, confirmed, tokens)
        began = time.perf_counter()

        def outcome(verdict: Verdict, layer: int, confidence: float, ran_us: int) -> Outcome:
            return Outcome(
                session=session.id,
                reply=reply.number,
                round=number,
                layer=layer,
                accepted=verdict.accepted,
                next_token=verdict.next_token,
                confidence=confidence,
                is_final=layer == model.num_layers,
                compute_us=ran_us + (reply.prefill_us if number == 1 else 0),
                distribution=b"" if verdict.target is None else _packed(verdict.target),
            )

        def say(verdict: Verdict, layer: int, confidence: float) -> None:
            assert early is not None
            early(outcome(verdict, layer, confidence, _microseconds(began)))

        listener = None
        # Behind the prompt the next token is known: without a draft there is no pass to run ahead of.
        if early is not None and session.exits is not None and (tokens or confirmed):
            listener = ExitListener(model, session.exits, judge, say)
        # An id the target does not have is rejected whatever follows, so any other stands in for it.
        logits = sequence.verify([t if t < model.vocab_size else 0 for t in tokens], listener)
        if listener is not None:
            listener.harvest()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        ran_us = _microseconds(began)
        verdict = judge(logits)
        # What is drawn from p needs no word on how likely its likeliest token is.
        confidence = confidence_of(logits[verdict.accepted]) if verdict.target is None else 0.0
        sequence.rollback(confirmed + verdict.accepted)
        if verdict.target is None:
            sequence.append([verdict.next_token])
    except Exception as error:
        if len(sequence.tokens) > before:
            sequence.rollback(before)
        reply.owed = bool(draft.resampled)
        raise _refusal(error) from error
    reply.owed = verdict.target is not None
    return outcome(verdict, model.num_layers, confidence, ran_us)


def take_resampled(model: VisionLanguageModel, reply: Reply, token: int) -> None:
    """The robot tells which token it drew behind the rejection that the last round ended with."""
    if token >= model.vocab_size:
        raise SamplingError(
            f"token {token} cannot follow a rejection: the target has {model.vocab_size} tokens"
        )
    assert reply.sequence is not None
    reply.sequence.append([token])
    reply.owed = False


def _judge_of(
    session: Session, reply: Reply, draft: Draft, confirmed: int, tokens: list[int]
) -> Callable[[torch.Tensor], Verdict]:
    """What turns logits (len(tokens) + 1, V) into a verdict on ``tokens``, the draft as far as there is room.

    SamplingError or WireError when what the draft brings does not prove it.
    """
    sampling, seed = session.sampling, session.request.seed

    def by_argmax(logits: torch.Tensor) -> Verdict:
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise FloatingPointError("the target's logits are not finite")
        return verify_greedy(tokens, logits.argmax(dim=-1).tolist())

    def by_noise(logits: torch.Tensor) -> Verdict:
        p = transform(logits, sampling).cpu()
        return verify_coupled(
            tokens, p, lambda i: gumbel(seed, reply.number, confirmed + i, p.shape[-1])
        )

    def by_chances(logits: torch.Tensor) -> Verdict:
        generator = generator_for("verifier", seed, reply.number, draft.round)
        return verify_split(tokens, chances, transform(logits, sampling).cpu(), generator)

    def by_distributions(logits: torch.Tensor) -> Verdict:
        generator = generator_for("verifier", seed, reply.number, draft.round)
        return verify_draft(tokens, q, transform(logits, sampling).cpu(), generator)

    if sampling.greedy:
        return by_argmax
    if session.proof is Proof.COUPLED:
        return by_noise
    if session.proof is Proof.SPLIT:
        chances = unpack_chances(draft.evidence, len(draft.tokens))[: len(tokens)].tolist()
        return by_chances
    if session.proof is Proof.TRUNCATED:
        q = _truncated_distributions(session, draft)[: len(tokens)]
        return by_distributions
    q = _draft_distributions(session, draft)[: len(tokens)]
    return by_distributions


def _draft_distributions(session: Session, draft: Draft) -> torch.Tensor:
    """q (gamma, V) that the draft was drawn from, checked."""
    if not draft.tokens:
        return torch.empty(0, 0)
    if not draft.evidence:
        raise SamplingError("a sampled draft was sent without its distributions")
    q = unpack_distributions(draft.evidence, len(draft.tokens), session.request.vocab_size)
    check_distributions(draft.tokens, q)
    return q


def _truncated_distributions(session: Session, draft: Draft) -> torch.Tensor:
    """q_hat (gamma, V) that the draft was drawn from, checked."""
    size = session.request.vocab_size
    if not draft.tokens:
        return torch.empty(0, 0)
    kept = unpack_kept(draft.evidence, len(draft.tokens), size)
    q = torch.stack([restored(*row, size) for row in kept])
    check_distributions(draft.tokens, q)
    return q


def _packed(p: torch.Tensor) -> bytes:
    return pack_distribution(p.numpy())


def _refusal(error: Exception) -> Refused:
    if isinstance(error, (SamplingError, WireError)):
        return Refused(RefusalCode.BAD_DISTRIBUTION, str(error))
    if isinstance(error, VlmError):
        return Refused(RefusalCode.MODEL_ERROR, str(error))
    _log.error("the target failed on a round", exc_info=error)
    return Refused(RefusalCode.MODEL_ERROR, _FAILED)


def _microseconds(began: float) -> int:
    return min(int((time.perf_counter() - began) * 1e6), (1 << 32) - 1)
