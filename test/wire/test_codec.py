# SPDX-License-Identifier: Apache-2.0
"""Every message survives its bytes, every bound of every field is checked, and nothing else comes out of bytes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from any_message import KINDS, MESSAGES, fields_of, high, low, plain
from hypothesis import given, settings as profile, strategies as st
from msgspec import inspect
from msgspec.structs import replace
from wire_samples import SAMPLES

from dsd_ros.wire import messages as m
from dsd_ros.wire.codec import WireError, decode, encode


@given(MESSAGES)
@profile(max_examples=150)
def test_messages_survive(message):
    assert decode(encode(message)) == message


@given(st.binary(max_size=200))
@profile(max_examples=200)
def test_arbitrary_bytes_raise_nothing_but_wire_errors(data):
    try:
        decode(data)
    except WireError as error:
        assert str(error)


@given(MESSAGES, st.data())
@profile(max_examples=150)
def test_damaged_messages_raise_nothing_but_wire_errors(message, data):
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut]), b"\x91" * 10_000 + bytes(damaged)):
        try:
            again = decode(candidate)
        except WireError:
            continue
        assert decode(encode(again)) == again


def beyond(kind: inspect.Type, value: Any) -> list[Any]:
    """``value``, of this type, made one too small, one too large, one too long, and so on."""
    match kind:
        case inspect.IntType():
            return [low(kind) - 1, high(kind) + 1]
        case inspect.FloatType():
            found = [low(kind) - 0.5, high(kind) + 0.5, float("nan"), float("inf")]
            return found if kind.ge is not None else [*found, float(low(kind))]
        case inspect.StrType() | inspect.BytesType():
            one = "x" if isinstance(value, str) else b"x"
            return [one * (kind.max_length + 1), *([one * (kind.min_length - 1)] if kind.min_length else [])]
        case inspect.ListType():
            too_many = [[value[0]] * (kind.max_length + 1), *([[]] if kind.min_length else [])]
            inner = plain(kind.item_type)
            if isinstance(inner, inspect.StructType):
                return [*too_many, *([one] for one in broken(value[0]))]
            return [*too_many, *([one] for one in beyond(inner, value[0]))]
    return []


def broken(message: Any) -> list[Any]:
    """The message with each of its fields beyond each of its bounds."""
    return [
        replace(message, **{name: value})
        for name, kind in fields_of(type(message)).items()
        for value in beyond(kind, getattr(message, name))
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_bound_is_checked(kind):
    message = kind(**SAMPLES[kind])
    assert decode(encode(message)) == message or kind is m.Outcome
    for wrong in broken(message):
        with pytest.raises((WireError, msgspec.ValidationError)):
            decode(encode(wrong))


def test_oversized_frames_are_neither_made_nor_read():
    huge = m.Draft(1, 1, 1, 0, [1], evidence=bytes(m.MAX_FRAME_BYTES))
    with pytest.raises(WireError, match="over the limit"):
        encode(huge)
    with pytest.raises(WireError, match="over the limit"):
        decode(bytes(m.MAX_FRAME_BYTES + 1))


def test_what_a_relay_imports_does_not_load_torch():
    names = ", ".join(f"dsd_ros.wire.{name}" for name in ("messages", "codec", "channel", "outbox", "websocket"))
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_prefix_has_one_digest_and_another_prefix_another():
    # BLAKE2b of the ids as little-endian uint32; a robot and a verifier of other builds must agree.
    assert m.prefix_digest([]).hex() == "e4a6a0577479b2b4"
    assert m.prefix_digest([1, 152_063]).hex() == "6889f3df6eabdb63"
    prefixes = [[], [0], [0, 0], [1], [1, 0], [0, 1], [256], [1 << 16], [m.MAX_VOCABULARY - 1]]
    assert len({m.prefix_digest(prefix) for prefix in prefixes}) == len(prefixes)
