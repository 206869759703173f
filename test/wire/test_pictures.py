# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings as profile, strategies as st
from PIL import Image

from dsd_ros.limits import ENCODINGS, LOSSLESS
from dsd_ros.wire.codec import WireError
from dsd_ros.wire.messages import Observation
from dsd_ros.wire.pictures import decode_bytes, decode_picture, encode_picture, name_of, picture_digest


def observation(height: int, width: int, encoding: str, data: bytes) -> Observation:
    return Observation(1, 1, "go", height, width, encoding, data)


@pytest.mark.parametrize("encoding", LOSSLESS)
@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 13, 3), (120, 160, 3)])
def test_pictures_survive_bit_by_bit(encoding, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    data = encode_picture(image, encoding)
    assert np.array_equal(decode_picture(observation(*shape[:2], encoding, data)), image)
    assert encode_picture(image[::-1], encoding) == encode_picture(image[::-1].copy(), encoding)


@pytest.mark.parametrize("encoding", sorted(set(ENCODINGS) - set(LOSSLESS)))
@pytest.mark.parametrize("shape", [(1, 1, 3), (7, 13, 3), (120, 160, 3)])
def test_lossy_pictures_come_out_the_same_on_both_sides(encoding, shape):
    """And near what went in; they are named by their bytes."""
    place = sum(np.indices(shape[:2])).reshape(*shape[:2], 1)
    image = (127 + 100 * np.sin(place / 40 + np.arange(3))).astype(np.uint8)
    data = encode_picture(image, encoding)
    seen = decode_bytes(data, encoding, *shape[:2])
    assert np.array_equal(decode_picture(observation(*shape[:2], encoding, data)), seen)
    assert np.abs(seen.astype(int) - image).mean() < 12
    assert name_of(seen, data, encoding) == name_of(image, data, encoding) != name_of(seen, data + b"!", encoding)
    assert name_of(seen, b"", "png") == name_of(seen, b"!", "rgb8") == picture_digest(seen)


def test_a_digest_distinguishes_pictures_by_pixels_and_sides():
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    others = [image.reshape(6, 4, 3), image[::-1], image[:, ::-1], image[:3]]
    assert picture_digest(image) == picture_digest(np.asfortranarray(image))
    assert len({picture_digest(one) for one in (image, *others)}) == 5


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)],
)  # fmt: skip
def test_other_arrays_are_refused(image):
    with pytest.raises(WireError, match="RGB"):
        encode_picture(image)


def test_too_large_pictures_are_refused_before_they_are_encoded():
    huge = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (9000, 10, 3))
    with pytest.raises(WireError, match="9000"):
        encode_picture(huge)


def png(mode: str, size: tuple[int, int]) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A small PNG that unpacks to a gigabyte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99)))


@pytest.mark.parametrize(
    ("height", "width", "encoding", "data"),
    [
        (4, 4, "rgb8", bytes(47)),
        (4, 4, "jpeg", bytes(48)),
        (4, 4, "png", b"no picture"),
        (4, 4, "png", b""),
        (4, 4, "png", png("RGB", (5, 4))),
        (4, 4, "png", png("L", (4, 4))),
        (4, 4, "png", png("RGBA", (4, 4))),
        (4, 4, "png", png("RGB", (4, 4))[:-30]),
        (8192, 8192, "rgb8", b""),
        (100, 100, "png", bomb()),
    ],
)
def test_what_is_no_such_picture_is_refused(height, width, encoding, data):
    with pytest.raises(WireError, match="picture"):
        decode_picture(observation(height, width, encoding, data))


@given(st.data())
@profile(max_examples=100)
def test_damaged_pictures_raise_nothing_but_wire_errors(data):
    image = np.random.default_rng(1).integers(0, 256, (9, 9, 3), np.uint8)
    damaged = bytearray(encode_picture(image))
    for _ in range(3):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        assert decode_picture(observation(9, 9, "png", bytes(damaged))).shape == (9, 9, 3)


def test_an_observation_may_have_no_picture():
    assert decode_picture(observation(0, 0, "none", b"")) is None
    for height, width, data in ((1, 0, b""), (0, 1, b""), (0, 0, b"?")):
        with pytest.raises(WireError, match="without a picture"):
            decode_picture(observation(height, width, "none", data))
    for encoding in ENCODINGS:
        with pytest.raises(WireError, match="0 x 0 pixels"):
            decode_picture(observation(0, 0, encoding, b""))
