"""What a cloud agrees to when it is asked a question."""

from __future__ import annotations

from typing import Any

from dsd_ros.dragon.settings import EVIDENCE, RANDOMNESS, SCHEDULES, SIDES
from dsd_ros.wire.messages import PROTOCOL_VERSION, EndCode, Question, QuestionEnd

_MAX_TOKENS = 4096
_PADDING = 1024  # rows of an LM head that stand for no token, and an eighth of the rows


def refusal_of(model: Any, question: Question, scale: str = "") -> str:
    """Why a question cannot be answered with ``model``, "" if it can; one sentence.

    ``scale``: of this side's relevances (``retrieval.scale_of``).
    """
    if question.protocol_version != PROTOCOL_VERSION:
        return (
            f"the robot speaks protocol version {question.protocol_version} and the cloud {PROTOCOL_VERSION}; "
            "install the same release of dsd_ros on both sides"
        )
    if question.tokenizer_fingerprint != model.tokenizer_fingerprint:
        return (
            f"the robot's tokenizer ({question.tokenizer_fingerprint or 'none'}) is not that of the cloud's "
            f"{model.name} ({model.tokenizer_fingerprint}); use models that share one"
        )
    if question.documents and question.relevance_fingerprint != scale:
        return (
            f"the robot's relevances are of another scale ({question.relevance_fingerprint or 'unnamed'}) than the "
            f"cloud's ({scale or 'unnamed'}), so that documents cannot be weighed against each other; use the same "
            "embedding model and release on both sides"
        )
    for name, choices in (
        ("randomness", RANDOMNESS), ("evidence", EVIDENCE), ("schedule", SCHEDULES), ("aggregator", SIDES),
    ):  # fmt: skip
        if getattr(question, name) not in choices:
            return f"the cloud knows no {name} {getattr(question, name)!r}; use one of {', '.join(choices)}"
    if not 1 <= question.max_tokens <= _MAX_TOKENS:
        return f"an answer of {question.max_tokens} tokens was asked for; use 1 to {_MAX_TOKENS}"
    if abs(question.vocab_size - model.vocab_size) > _PADDING + model.vocab_size // 8:
        return (
            f"the robot's vocabulary has {question.vocab_size} tokens and the cloud's {model.vocab_size}; they may "
            "differ by padding alone"
        )
    if any(token >= model.vocab_size for token in question.answered):
        return "the answer so far holds a token that the cloud's model does not have"
    if len(question.answered) >= question.max_tokens:
        return "the answer so far is as long as it may become"
    return ""


def name_of(model: Any) -> tuple[str, str, int, list[int]]:
    """Name, fingerprint, vocabulary's size and ends, as a QuestionReply tells them."""
    return (
        model.name[:256], model.fingerprint[:256], model.vocab_size, sorted(model.eos_token_ids)[:16],
    )  # fmt: skip


def end_of(about: Any, code: EndCode, sentence: str) -> QuestionEnd:
    """That it is over with the question that a message is about."""
    return QuestionEnd(about.ask, about.attempt, code, sentence[:1024])
