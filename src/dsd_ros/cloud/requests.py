"""What a verifier agrees to when a session is asked for."""

from __future__ import annotations

from dsd_ros.decoding.modes import ModeError, Proof, mode
from dsd_ros.decoding.sampling import SamplingError, SamplingSettings
from dsd_ros.vlm.model import VisionLanguageModel
from dsd_ros.wire.messages import EXIT_POLICIES, PROTOCOL_VERSION, Question, QuestionReply, SessionRequest


def check_request(model: VisionLanguageModel, request: SessionRequest) -> SamplingSettings:
    """How a session samples; ValueError, one sentence, for a request that a verifier of ``model`` cannot serve."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise ValueError(
            f"the robot speaks protocol version {request.protocol_version} and the verifier "
            f"{PROTOCOL_VERSION}; install the same release of dsd_ros on both sides"
        )
    try:
        preset = mode(request.mode)
        sampling = SamplingSettings(request.temperature, request.top_k, request.top_p)
    except (ModeError, SamplingError) as error:
        raise ValueError(f"the verifier cannot serve this: {error}") from error
    if request.proof not in ("", *Proof):
        raise ValueError(f"the verifier knows no proof {request.proof!r}; use one of {', '.join(Proof)}")
    if request.exit_policy not in EXIT_POLICIES:
        raise ValueError(
            f"the verifier knows no exit policy {request.exit_policy!r}; use one of {', '.join(EXIT_POLICIES)}"
        )
    ours, theirs = model.tokenizer_fingerprint, request.tokenizer_fingerprint
    # Without drafts a robot may do without a tokenizer: only ids of the target travel.
    if theirs != ours and (theirs or preset.drafts):
        raise ValueError(
            f"the robot's tokenizer ({theirs or 'none'}) is not that of the target "
            f"{model.name} ({ours}); use a draft that shares it, or give the robot the target's "
            "own (target_tokenizer) in mode dsd, temperature 0 and shape sequence"
        )
    return sampling


def without_documents(model: VisionLanguageModel, question: Question) -> QuestionReply:
    """What a verifier that has no documents says to a question."""
    sentence = (
        "this verifier was started without documents and answers no questions; start it with --documents FOLDER "
        "(the node: documents)"
    )
    return QuestionReply(
        question.ask, question.attempt, sentence, model.name[:256], model.fingerprint[:256],
        model.vocab_size,
    )  # fmt: skip
