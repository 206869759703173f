"""Messages to bytes and back: MessagePack arrays ``[tag, field, ...]``, validated as they are read.

Fields at the end of a message that have their defaults are not sent: most drafts are a dozen bytes.

Not pickle, which would run whatever a peer sends. Nothing but ``WireError`` comes out of ``decode``.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dsd_ros.wire.frames import DraftFrame, FrameError, ObservationFrame, OutcomeFrame
from dsd_ros.wire.messages import (
    MAX_FRAME_BYTES,
    Draft,
    Message,
    Observation,
    Outcome,
    Proposal,
    Question,
    QuestionEnd,
    QuestionReply,
    Refusal,
    Reveal,
    SessionClose,
    SessionReply,
    SessionRequest,
    Verdict,
)

if TYPE_CHECKING:  # a relay that packs no distributions must not have to load torch
    import torch


class WireError(ValueError):
    """Bytes that are no message of this protocol, or a message that holds nonsense; one sentence."""


_Frame = (
    SessionRequest
    | SessionReply
    | ObservationFrame
    | DraftFrame
    | OutcomeFrame
    | Refusal
    | SessionClose
    | Question
    | QuestionReply
    | Proposal
    | Verdict
    | Reveal
    | QuestionEnd
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


def encode(message: Message) -> bytes:
    """The bytes of one message, MAX_FRAME_BYTES at most. Last fields at their defaults are left out.

    WireError for a message that is too long or cannot be written down.
    """
    frame: _Frame
    try:
        if isinstance(message, Draft):
            frame = DraftFrame.of(message)
        elif isinstance(message, Outcome):
            frame = OutcomeFrame.of(message)
        elif isinstance(message, Observation):
            frame = ObservationFrame.of(message)
        else:
            frame = message
    except (ValueError, OverflowError) as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    values = msgspec.structs.astuple(frame)
    defaults = _defaults(type(frame))
    needed, optional = len(values), len(defaults)
    while optional and values[needed - 1] == defaults[optional - 1]:
        needed, optional = needed - 1, optional - 1
    data = _encoder.encode((frame.__struct_config__.tag, *values[:needed]))
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return data


@functools.cache
def _defaults(struct: type[msgspec.Struct]) -> tuple[object, ...]:
    """The values that the last fields of a struct have when they are not given."""
    return tuple(
        default.factory() if hasattr(default, "factory") else default for default in struct.__struct_defaults__
    )


def decode(data: bytes) -> Message:
    """One message with every bound checked; WireError for anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        frame = _decoder.decode(data)
        if isinstance(frame, (ObservationFrame, DraftFrame, OutcomeFrame)):
            message: Message = frame.message()
        else:
            message = frame
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FrameError) as error:
        raise WireError(f"a frame is no message of this protocol: {error}") from error
    # Comparisons with NaN pass msgspec's bounds.
    if isinstance(message, SessionRequest):
        _check_finite(message.temperature, message.top_p, message.min_exit_confidence)
    elif isinstance(message, Question):
        _check_finite(message.temperature)
    elif isinstance(message, Proposal):
        _check_finite(message.log_weight)
    return message


def _check_finite(*values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise WireError("a frame holds a number that is not finite")


def pack_distributions(q: torch.Tensor) -> bytes:
    """Distributions (gamma, V) as little-endian float32, row by row."""
    return q.detach().cpu().float().contiguous().numpy().astype("<f4", copy=False).tobytes()


def unpack_distributions(data: bytes, rows: int, vocab_size: int) -> torch.Tensor:
    """(rows, vocab_size) float32 from ``pack_distributions``; WireError when the size is another.

    Sizes only: whether the rows are distributions is checked where they are used.
    """
    if len(data) != 4 * rows * vocab_size:
        raise WireError(
            f"distributions of {rows} tokens over a vocabulary of {vocab_size} take "
            f"{4 * rows * vocab_size} bytes, not {len(data)}"
        )
    values = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=True)
    import torch

    return torch.from_numpy(values).reshape(rows, vocab_size)
