"""One observation read, one round verified: what a turn of the engine does with the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from dsd_ros.cloud.exits import ExitListener, confidence_of
from dsd_ros.cloud.judges import judge_of, most_owed
from dsd_ros.cloud.sessions import Reply, Session
from dsd_ros.decoding.rejection import Verdict
from dsd_ros.decoding.sampling import SamplingError
from dsd_ros.decoding.tree import TokenTree, TreeError
from dsd_ros.vlm.errors import VlmError
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.vlm.sequence import Sequence
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import MAX_EVIDENCE_BYTES, Draft, Observation, Outcome, Refusal, RefusalCode, prefix_digest
from dsd_ros.wire.packing import pack_distribution, pack_rows
from dsd_ros.wire.pictures import LastPictures, UnknownPicture, read_pictures

_log = logging.getLogger(__name__)
_FAILED = "the verifier's model failed on this; the verifier's log says how"


class Refused(Exception):
    """A round cannot be served; one sentence and the code that goes with it."""

    def __init__(self, code: RefusalCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def open_reply(model: VisionLanguageModel, observation: Observation, kept: LastPictures[np.ndarray]) -> Reply:
    """Read the observation with the target. A failure is kept in the reply, to answer all its rounds.

    ``kept``: the session's last pictures by digest. UnknownPicture when one of the history is not there.
    """
    began = time.perf_counter()
    code, sentence = RefusalCode.BAD_OBSERVATION, ""
    try:
        _check_progress(model, observation)
        image, history = read_pictures(observation, kept)
        sequence = model.prefill(image, observation.instruction, history)
        sequence.append(observation.verified)  # they ride along with the next draft
        rounds = observation.rounds
        return Reply(observation.reply, sequence, _microseconds(began), begun_at=rounds)
    except UnknownPicture:
        raise
    except (VlmError, WireError) as error:
        sentence = str(error)
    except Exception:
        _log.exception("the target failed on an observation")
        code, sentence = RefusalCode.MODEL_ERROR, _FAILED
    refusal = Refusal(observation.session, observation.reply, 0, code, sentence[:1024])
    return Reply(observation.reply, None, refusal=refusal)


def _check_progress(model: VisionLanguageModel, observation: Observation) -> None:
    """WireError when what a robot tells of its reply's beginning cannot be: each round gives a token at least."""
    verified, rounds = observation.verified, observation.rounds
    if rounds > len(verified) or bool(rounds) != bool(verified):
        raise WireError(f"{rounds} rounds do not give the {len(verified)} tokens of a reply so far")
    if verified and max(verified) >= model.vocab_size:
        raise WireError(f"token {max(verified)} is none of the target's, which has {model.vocab_size}")


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
    before, owed = len(sequence.tokens), reply.owed
    number = reply.rounds + 1
    in_step = draft.round == number and _follows(reply, draft)
    if draft.assumed and not (in_step and draft.assumed == prefix_digest(sequence.tokens)):
        raise Refused(
            RefusalCode.ASSUMPTION_FAILED,
            f"round {draft.round} was sent ahead behind tokens that did not come true; draft it again",
        )
    if not in_step:
        raise Refused(
            RefusalCode.OUT_OF_STEP,
            f"round {draft.round} behind {draft.confirmed} tokens is out of step: the verifier is at "
            f"round {number} behind {_known(reply)}",
        )
    # What is beyond the context cannot be verified: a shorter draft is as exact.
    room = max(0, model.max_length - sequence.prompt_length - draft.confirmed)
    try:
        drafted = TokenTree.from_bytes(draft.tokens, draft.parents)
        tree = drafted.cut(room)
        judge = judge_of(session, draft, drafted, room)
        _take(model, reply, draft.resampled)
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
                compute_us=ran_us + (0 if reply.outcomes else reply.prefill_us),
                distribution=_packed(draft, verdict),
            )

        def say(verdict: Verdict, layer: int, confidence: float) -> None:
            assert early is not None
            early(outcome(verdict, layer, confidence, _microseconds(began)))

        listener = None
        # Behind the prompt the next token is known: without a draft there is no pass to run ahead of.
        if early is not None and session.exits is not None and (len(tree) or draft.confirmed):
            listener = ExitListener(model, session.exits, judge, say)
        logits = _pass(model, sequence, tree, listener)
        if listener is not None:
            listener.harvest()
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        ran_us = _microseconds(began)
        verdict = judge(logits)
        # What is drawn from p needs no word on how likely its likeliest token is.
        confidence = confidence_of(logits[verdict.accepted]) if verdict.target is None else 0.0
        last = verdict.accepted - 1
        if tree.branches:
            sequence.keep_path(tree.path_to(last))
        else:
            sequence.rollback(draft.confirmed + verdict.accepted)
        if verdict.target is None:
            sequence.append([verdict.next_token])
        else:
            reply.owed = most_owed(tree, last)
        return outcome(verdict, model.num_layers, confidence, ran_us)
    except Exception as error:
        sequence.rollback(before)
        reply.owed = owed
        raise _refusal(error) from error


def end_reply(model: VisionLanguageModel, reply: Reply, draft: Draft) -> None:
    """Take in a reply's last tokens, which the robot found itself; Refused when they cannot be those."""
    if not _follows(reply, draft):
        raise Refused(
            RefusalCode.OUT_OF_STEP,
            f"{len(draft.resampled)} tokens that make {draft.confirmed} are no end of a reply of {_known(reply)}",
        )
    try:
        _take(model, reply, draft.resampled)
    except SamplingError as error:
        raise _refusal(error) from error


def _follows(reply: Reply, draft: Draft) -> bool:
    """Whether a draft tells the tokens that the robot found, if it was to find any, and counts all rightly."""
    assert reply.sequence is not None
    found = len(draft.resampled)
    fits = 1 <= found <= reply.owed if reply.owed else not found
    return fits and draft.confirmed == len(reply.sequence.tokens) + found


def _known(reply: Reply) -> str:
    """How many tokens a reply is known to have, in words."""
    assert reply.sequence is not None
    known = len(reply.sequence.tokens)
    return f"{known}, and 1 to {reply.owed} that the robot finds" if reply.owed else f"{known}"


def _take(model: VisionLanguageModel, reply: Reply, found: list[int]) -> None:
    """Take in what the robot found behind the rejection that the last round ended with; none: no change.

    SamplingError when one of them is no token of the target.
    """
    if not found:
        return
    if max(found) >= model.vocab_size:
        raise SamplingError(f"token {max(found)} cannot follow a rejection: the target has {model.vocab_size} tokens")
    assert reply.sequence is not None
    reply.sequence.append(found)
    reply.owed = 0


def _pass(
    model: VisionLanguageModel, sequence: Sequence, tree: TokenTree, listener: ExitListener | None
) -> torch.Tensor:
    """Logits (nodes + 1, V) in front of the tree and behind each node."""
    # An id the target does not have is rejected whatever follows, so any other stands in for it.
    tokens = [token if token < model.vocab_size else 0 for token in tree.tokens]
    if tree.branches:
        return sequence.verify_tree(tokens, tree.parents, listener)
    return sequence.verify(tokens, listener)


def _packed(draft: Draft, verdict: Verdict) -> bytes:
    """What the robot needs of p to go on from a rejection; WireError when no message holds it."""
    if verdict.target is None:
        return b""
    rows = verdict.target.numpy()
    packed = pack_rows(list(rows)) if draft.parents else pack_distribution(rows[0])
    if len(packed) > MAX_EVIDENCE_BYTES:
        raise WireError(
            f"{len(rows)} distributions of the target over {len(rows[0])} tokens take {len(packed)} "
            f"bytes, and a message holds {MAX_EVIDENCE_BYTES}; draft smaller trees, or sample with top_k"
        )
    return packed


def _refusal(error: Exception) -> Refused:
    if isinstance(error, (SamplingError, TreeError, WireError)):
        return Refused(RefusalCode.BAD_DISTRIBUTION, str(error))
    if isinstance(error, VlmError):
        return Refused(RefusalCode.MODEL_ERROR, str(error))
    _log.error("the target failed on a round", exc_info=error)
    return Refused(RefusalCode.MODEL_ERROR, _FAILED)


def _microseconds(began: float) -> int:
    return min(int((time.perf_counter() - began) * 1e6), (1 << 32) - 1)
