"""Image messages to RGB and back: every encoding, padded rows, damaged messages."""

from __future__ import annotations

import array
import sys
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, strategies as st
from sensor_msgs.msg import Image

from dsd_ros.ros.images import ENCODINGS, ImageMessageError, by_numpy, from_rgb, has_cv_bridge, to_rgb

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
