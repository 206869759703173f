# SPDX-License-Identifier: Apache-2.0
"""Messages to bytes and back: MessagePack arrays ``[tag, field, ...]``, validated as they are read.

Fields at the end of a message that have their defaults are not sent: most drafts take a dozen bytes. A message with a
``LAYOUT`` travels as a struct that is derived from it (``FRAMES``). Nothing but ``WireError`` comes out of ``decode``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from dsd_ros.wire.messages import MAX_FRAME_BYTES, MAX_VOCABULARY, Fields, Message, UInt16

_NO_DEFAULT = msgspec.NODEFAULT
_ID_BYTES = 3  # of a varint: 21 bits hold any token id


class WireError(ValueError):
    """Bytes that are not a message of this protocol, or a message with invalid contents; one sentence."""


def pack_varints(ids: Sequence[int]) -> bytes:
    """Token ids as LEB128: seven bits a byte, the lowest first; all but an id's last byte have the top bit set."""
    data = bytearray()
    for value in ids:
        if not 0 <= value < MAX_VOCABULARY:
            raise WireError(f"{value} is not a token id; use 0 to {MAX_VOCABULARY - 1}")
        while value >= 0x80:
            data.append(value & 0x7F | 0x80)
            value >>= 7
        data.append(value)
    return bytes(data)


def unpack_varints(data: bytes, most: int) -> list[int]:
    """The ids of ``pack_varints``, at most ``most``; WireError for anything else."""
    ids: list[int] = []
    value = shift = 0
    if data.isascii():  # every id takes one byte
        ids += data
    else:
        for byte in data:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80 and value < MAX_VOCABULARY:
                ids.append(value)
                value = shift = 0
            elif byte < 0x80 or shift >= 7 * _ID_BYTES:
                break
    if shift or len(ids) > most:
        raise WireError(f"{len(data)} bytes are not varints of up to {most} token ids below {MAX_VOCABULARY}")
    return ids


class _Compact:
    """How messages of a class with a LAYOUT travel, derived from the class: ``frame`` is what bytes are decoded as."""

    def __init__(self, cls: type[Fields]) -> None:
        fields = {field.name: field for field in msgspec.structs.fields(cls)}
        self._cls = cls
        self._values = operator.attrgetter(*cls.LAYOUT)
        self._packs: list[tuple[int, Callable[[Any], Any]]] = []
        self._optional: list[tuple[int, Any]] = []  # position, default as packed
        self._unpacks: list[tuple[int, Callable[[Any], Any] | None, Any]] = []  # position, unpack, default
        columns: list[Any] = []
        for at, name in enumerate(cls.LAYOUT):
            if name in fields:
                kind, default = fields[name].type, _default(fields[name])
            else:  # a property that stands for fields
                kind, default = get_type_hints(getattr(cls, name).fget, include_extras=True)["return"], _NO_DEFAULT
            kind, pack, unpack = _packed(kind)
            columns.append((name, kind) if default is _NO_DEFAULT else (name, kind | None, None))
            if pack is not None:
                self._packs.append((at, pack))
            if unpack is not None or default is not _NO_DEFAULT:
                self._unpacks.append((at, unpack, default))
            if default is not _NO_DEFAULT:
                self._optional.append((at, default if pack is None else pack(default)))
        places = {name: at for at, name in enumerate((*cls.LAYOUT, "next_token", "distribution"))}
        self._order = operator.itemgetter(*(places[name] for name in fields))
        self._next = places.get("next")
        tag = cls.__struct_config__.tag
        self.frame = msgspec.defstruct(f"{cls.__name__}Frame", columns, bases=(Fields,), frozen=True, tag=tag)

    def pack(self, message: Message) -> list[Any]:
        """The fields as they travel, nil for defaults. ValueError or OverflowError for what cannot be packed."""
        values = list(self._values(message))
        for at, pack in self._packs:
            values[at] = pack(values[at])
        for at, default in self._optional:
            if values[at] == default:
                values[at] = None
        while values[-1] is None:
            values.pop()
        return values

    def unpack(self, frame: msgspec.Struct) -> Message:
        """The message of a frame; WireError."""
        values = list(msgspec.structs.astuple(frame))
        for at, unpack, default in self._unpacks:
            value = values[at]
            if value is None:
                values[at] = default or type(default)()
            elif unpack is not None:
                values[at] = unpack(value)
        if self._next is not None:
            after = values[self._next]
            values += (0, after) if isinstance(after, bytes) else (after, b"")
        return self._cls(*self._order(values))  # type: ignore[return-value]


def _packed(kind: Any) -> tuple[Any, Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
    """A field's type on the wire, and how its values are packed and unpacked (None: they travel as they are)."""
    limits = next(iter(getattr(kind, "__metadata__", ())), Meta())
    match (limits.extra or {}).get("packed"):
        case "varints":
            most = limits.max_length or 0
            kind = Annotated[bytes, Meta(max_length=_ID_BYTES * most)]
            return kind, pack_varints, lambda data: unpack_varints(data, most)
        case "uint16":
            return UInt16, lambda share: round(share * 65535), lambda units: units / 65535
    return kind, None, None


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is _NO_DEFAULT else field.default_factory()


@functools.cache
def _defaults(struct: type[msgspec.Struct]) -> list[Any]:
    """The defaults of a struct's last fields."""
    found = [_default(field) for field in msgspec.structs.fields(struct)]
    return [default for default in found if default is not _NO_DEFAULT]


_COMPACT = {cls: _Compact(cls) for cls in get_args(Message) if cls.LAYOUT}
FRAMES = {cls: compact.frame for cls, compact in _COMPACT.items()}  # what messages with a LAYOUT are decoded as
_OF_FRAMES = {compact.frame: compact for compact in _COMPACT.values()}
_FLOATS = {cls: [name for name, hint in get_type_hints(cls).items() if hint is float] for cls in get_args(Message)}
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    functools.reduce(operator.or_, (FRAMES.get(cls, cls) for cls in get_args(Message)))
)


def encode(message: Message) -> bytes:
    """The bytes of one message, at most MAX_FRAME_BYTES; WireError for one that is longer or cannot be packed."""
    compact = _COMPACT.get(type(message))
    if compact is None:
        values: Sequence[Any] = msgspec.structs.astuple(message)
        defaults = _defaults(type(message))
        needed, optional = len(values), len(defaults)
        while optional and values[needed - 1] == defaults[optional - 1]:
            needed, optional = needed - 1, optional - 1
        values = values[:needed]
    else:
        try:
            values = compact.pack(message)
        except (ValueError, OverflowError) as error:
            raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    data = _encoder.encode((message.__struct_config__.tag, *values))
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """One message with every bound checked; WireError for anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        frame = _decoder.decode(data)
        compact = _OF_FRAMES.get(type(frame))
        if compact is not None:
            return compact.unpack(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"a frame is not a message of this protocol: {error}") from error
    message: Message = frame
    check_finite(message)
    return message


def check_finite(message: Message) -> None:
    """WireError for NaN or infinity in a message: comparisons with NaN pass msgspec's bounds."""
    for name in _FLOATS[type(message)]:
        if not math.isfinite(getattr(message, name)):
            raise WireError(f"a {type(message).__name__} whose {name} is not a finite number")
