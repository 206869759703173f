# SPDX-License-Identifier: Apache-2.0
"""Random ROS messages of any type: odd, hostile and ordinary values, and damaged serialized ones."""

from __future__ import annotations

import importlib
import math
import random
import re
from typing import Any

from rclpy.serialization import serialize_message

_DOUBLES = [0.0, -0.0, 1.0, 0.5, -3.0, 1e3, 1e9, 1e308, -1e308, 1e300, 5e-324, math.nan, math.inf, -math.inf]
_FLOATS = [0.0, 1.0, -2.5, 1e-30, 3e38, -3e38, math.nan, math.inf, -math.inf]
_TEXTS = [
    "", "draft_node", "navigation_node", "go2_node", "bgr8", "rgb8", "mono8", "32FC1", "16UC1", "odom", "x" * 600,
    "\U0001f916" * 300, "a\tb\x1b[31m\n", "../..", "turn left 30 degrees",
]  # fmt: skip
_BITS = re.compile(r"(u?)int(\d+)")
_ARRAY = re.compile(r"(.+)\[(\d+)\]")
_SEQUENCE = re.compile(r"sequence<(.+?)(?:, (\d+))?>$")


def message(kind: type, rng: random.Random) -> Any:
    """A message of this type with random fields."""
    made = kind()
    for name, text in kind.get_fields_and_field_types().items():
        setattr(made, name, _value(text, rng))
    return made


def damaged(sent: bytes, rng: random.Random) -> bytes:
    """A serialized message cut off, overwritten, or as it is."""
    data = bytearray(sent)
    choice = rng.randrange(4)
    if choice == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if choice == 1:
        return rng.randbytes(rng.randrange(64))
    for _ in range(rng.randrange(1, 8) if choice == 2 else 0):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def damaged_message(kind: type, rng: random.Random) -> bytes:
    return damaged(serialize_message(message(kind, rng)), rng)


def _value(text: str, rng: random.Random) -> Any:
    if found := _SEQUENCE.match(text):
        most = min(int(found[2] or 24), 24)
        return _many(found[1], rng.choice([0, 1, most, rng.randrange(most + 1)]), rng)
    if found := _ARRAY.match(text):
        return _many(found[1], int(found[2]), rng)
    if text in ("double", "float"):
        return rng.choice([*(_DOUBLES if text == "double" else _FLOATS), rng.uniform(-10.0, 10.0)])
    if text == "boolean":
        return rng.random() < 0.5
    if text == "octet":
        return bytes([rng.choice([0, 1, 2, 3, 255])])
    if text.startswith(("string", "wstring")):
        limit = int(found[0]) if (found := re.findall(r"\d+", text)) else 1 << 20
        return rng.choice(_TEXTS)[:limit]
    if found := _BITS.fullmatch(text):
        half = 2 ** (int(found[2]) - 1)
        low, high = (0, 2 * half - 1) if found[1] else (-half, half - 1)
        return rng.choice([0, 1, 2, 3, low, high, rng.randint(low, high), min(high, 50)])
    package, name = text.split("/")
    return message(getattr(importlib.import_module(f"{package}.msg"), name), rng)


def _many(text: str, count: int, rng: random.Random) -> list[Any]:
    return [_value(text, rng) for _ in range(count)]
