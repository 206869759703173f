"""Messages to bytes and back: MessagePack arrays ``[tag, field, ...]``, validated as they are read.

Fields at the end of a message that have their defaults are not sent: most drafts are a few dozen bytes.

Not pickle, which would run whatever a peer sends. Nothing but ``WireError`` comes out of ``decode``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

import msgspec
import numpy as np

from dsd_ros.wire.messages import MAX_FRAME_BYTES, Message, Outcome, SessionRequest

if TYPE_CHECKING:  # a relay that packs no distributions must not have to load torch
    import torch


class WireError(ValueError):
    """Bytes that are no message of this protocol, or a message that holds nonsense; one sentence."""


def _defaults(struct: type[msgspec.Struct]) -> tuple[object, ...]:
    """The values that the last fields of a struct have when they are not given."""
    return tuple(
        default.factory() if hasattr(default, "factory") else default
        for default in struct.__struct_defaults__
    )


_encoder = msgspec.msgpack.Encoder()
_DEFAULTS = {struct: _defaults(struct) for struct in get_args(Message)}
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of one message, MAX_FRAME_BYTES at most. Last fields at their defaults are left out."""
    values = msgspec.structs.astuple(message)
    defaults = _DEFAULTS[type(message)]
    needed, optional = len(values), len(defaults)
    while optional and values[needed - 1] == defaults[optional - 1]:
        needed, optional = needed - 1, optional - 1
    data = _encoder.encode((type(message).__struct_config__.tag, *values[:needed]))
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """One message with every bound checked; WireError for anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame is no message of this protocol: {error}") from error
    # Comparisons with NaN pass msgspec's bounds.
    if isinstance(message, Outcome):
        _check_finite(message.confidence)
    elif isinstance(message, SessionRequest):
        _check_finite(message.temperature, message.top_p, message.min_exit_confidence)
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
