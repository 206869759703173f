# SPDX-License-Identifier: Apache-2.0
"""Image and CompressedImage messages to RGB and back: every encoding, padded rows, damaged messages."""

from __future__ import annotations

import array
import io
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image as PillowImage
from rclpy.serialization import serialize_message
from sensor_msgs.msg import CompressedImage, Image

from dsd_ros.ros.images import (
    ENCODINGS,
    ImageMessageError,
    by_numpy,
    from_rgb,
    has_cv_bridge,
    read_image,
    to_bgr,
    to_rgb,
)

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
    for convert in (to_rgb, by_numpy):
        found = convert(message)
        assert found.dtype == np.uint8 and found.flags.c_contiguous
        assert np.array_equal(found, expected)


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


def file_of(kind: str, side: int = 8, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    PillowImage.new(mode, (side, side)).save(out, kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "form", "sentence"),
    [
        (b"", "jpeg", "of format 'jpeg' is no picture, damaged"),
        (
            file_of("jpeg")[:200],
            "bgr8; jpeg compressed bgr8",
            "of format 'bgr8; jpeg compressed bgr8' is damaged|cannot",
        ),
        (file_of("png")[:40], "png", "is no picture, damaged"),
        (file_of("tiff"), "bgr8; tiff compressed ", "in another container; give a picture as JPEG, PNG"),
        (file_of("png", 8200, "1"), "mono8; png compressed mono8", "8200 x 8200 pixels cannot be used"),
        (bytes(1000), "x" * 1000, f"of format '{'x' * 60}' is no picture, damaged"),
    ],
)
def test_damaged_compressed_data_is_refused(data, form, sentence):
    message = CompressedImage(format=form, data=data)
    with pytest.raises(ImageMessageError, match=sentence):
        to_rgb(message)
    with pytest.raises(ImageMessageError, match=sentence):
        read_image(serialize_message(message), CompressedImage)


def test_a_compressed_message_that_is_cut_is_refused():
    sent = serialize_message(CompressedImage(format="jpeg", data=file_of("jpeg")))
    for size in (0, 3, 20, len(sent) - 1):
        with pytest.raises(ImageMessageError):
            read_image(sent[:size], CompressedImage)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_serialized_compressed_picture_is_read(kind):
    message = CompressedImage(format=kind, data=file_of(kind))
    message.header.stamp.sec, message.header.frame_id = 7, "front"
    found = read_image(serialize_message(message), CompressedImage)
    assert found.header == serialize_message(message.header)[4:][: len(found.header)]
    assert np.array_equal(to_bgr(found), to_rgb(message)[..., ::-1])


@settings(max_examples=200)
@given(st.integers(0, 2**31), st.sampled_from(["jpeg", "png"]))
def test_no_compressed_data_does_more_than_raise_a_sentence(seed, kind):
    rng = np.random.default_rng(seed)
    data = bytearray(file_of(kind))
    for at in rng.integers(0, len(data), rng.integers(1, 9)):
        data[at] = rng.integers(0, 256)
    try:
        assert to_rgb(CompressedImage(format=kind, data=bytes(data))).shape[2] == 3
    except ImageMessageError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "picture", [np.zeros((3, 4), np.uint8), np.zeros((3, 4, 4), np.uint8), np.zeros((3, 4, 3), np.float32)]
)
def test_only_rgb_bytes_are_published(picture):
    with pytest.raises(ImageMessageError):
        from_rgb(picture)
    with pytest.raises(ImageMessageError, match="not as 'mono8'"):
        from_rgb(np.zeros((3, 4, 3), np.uint8), "mono8")


@pytest.mark.skipif(not has_cv_bridge(), reason="cv_bridge is not installed here")
@pytest.mark.parametrize("padding", [0, 2, 3])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_like_cv_bridge(encoding, padding):
    rgb = np.random.default_rng(2).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    message = encode(rgb, encoding, padding, bigendian=1)
    assert np.array_equal(to_rgb(message), by_numpy(message))


class NumpyError:
    """A cv_bridge whose compiled part was built for another numpy."""

    def imgmsg_to_cv2(self, message, desired_encoding):
        raise ImportError("numpy.core.multiarray failed to import")


@pytest.mark.parametrize("names", [{}, {"CvBridge": NumpyError, "CvBridgeError": TypeError}])
def test_a_cv_bridge_that_does_not_work_is_not_used(monkeypatch, names):
    broken = ModuleType("cv_bridge")
    vars(broken).update(names)
    monkeypatch.setitem(sys.modules, "cv_bridge", broken)
    has_cv_bridge.cache_clear()
    try:
        rgb = np.random.default_rng(3).integers(0, 256, (4, 3, 3), dtype=np.uint8)
        assert np.array_equal(to_rgb(encode(rgb, "rgb8", 1)), rgb)
    finally:
        has_cv_bridge.cache_clear()
