"""Image messages to RGB and back: every encoding, padded rows, damaged messages."""

from __future__ import annotations

import array

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sensor_msgs.msg import Image

from dsd_ros.ros.images import ENCODINGS, ImageMessageError, from_rgb, to_rgb

CHANNELS = {"rgb8": 3, "bgr8": 3, "rgba8": 4, "bgra8": 4, "mono8": 1}


def encode(rgb: np.ndarray, encoding: str, padding: int, bigendian: int = 0) -> Image:
    """An Image as a driver might send it; alpha and padding hold rubbish."""
    height, width = rgb.shape[:2]
    rubbish = np.random.default_rng(0).integers(0, 256, (height, width, 1), dtype=np.uint8)
    pixels = {
        "rgb8": rgb,
        "bgr8": rgb[..., ::-1],
        "rgba8": np.concatenate([rgb, rubbish], axis=2),
        "bgra8": np.concatenate([rgb[..., ::-1], rubbish], axis=2),
        "mono8": rgb[..., :1],
    }[encoding]
    rows = pixels.reshape(height, -1)
    rows = np.concatenate([rows, np.full((height, padding), 99, np.uint8)], axis=1)
    return Image(
        height=height,
        width=width,
        encoding=encoding,
        step=rows.shape[1],
        is_bigendian=bigendian,
        data=array.array("B", rows.tobytes()),
    )


@given(
    st.sampled_from(ENCODINGS),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(0, 1),
    st.integers(0, 1000),
)
def test_every_encoding_with_padded_rows(encoding, height, width, padding, bigendian, seed):
    rgb = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    expected = np.repeat(rgb[..., :1], 3, axis=2) if encoding == "mono8" else rgb
    message = encode(rgb, encoding, padding, bigendian)
    found = to_rgb(message)
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_there_and_back(encoding):
    rgb = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    message = from_rgb(rgb, encoding)
    assert message.step == 21 and len(message.data) == 105
    assert np.array_equal(to_rgb(message), rgb)


def test_the_picture_does_not_change_with_the_message():
    message = from_rgb(np.zeros((2, 2, 3), np.uint8))
    found = to_rgb(message)
    message.data[0] = 200
    assert found.max() == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"encoding": "yuv422"}, "encoded as 'yuv422'"),
        ({"encoding": ""}, "known are rgb8"),
        ({"height": 0}, "4 x 0 pixels"),
        ({"width": 100_000}, "100000 x 3 pixels"),
        ({"step": 11}, "step of 11"),
        ({"height": 4}, "36 bytes"),
        ({"data": array.array("B", [1, 2, 3])}, "3 bytes"),
    ],
)
def test_a_damaged_message_is_refused(change, sentence):
    message = from_rgb(np.zeros((3, 4, 3), np.uint8))
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(ImageMessageError, match=sentence):
        to_rgb(message)


@pytest.mark.parametrize(
    "picture", [np.zeros((3, 4), np.uint8), np.zeros((3, 4, 4), np.uint8), np.zeros((3, 4, 3), np.float32)]
)
def test_only_rgb_bytes_are_published(picture):
    with pytest.raises(ImageMessageError):
        from_rgb(picture)
    with pytest.raises(ImageMessageError, match="not as 'mono8'"):
        from_rgb(np.zeros((3, 4, 3), np.uint8), "mono8")
