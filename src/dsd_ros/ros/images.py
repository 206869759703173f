"""ROS Image messages to RGB arrays and back: by cv_bridge where it is installed, else by its
equivalent here.

Both honour ``step`` (rows may be padded) and check the sizes, so that a damaged message is refused.
"""

from __future__ import annotations

import array
import functools
import importlib.util

import numpy as np
from sensor_msgs.msg import Image

from dsd_ros.wire.messages import MAX_SIDE

# Channels of each encoding, and where red, green and blue are in a pixel.
_LAYOUT: dict[str, tuple[int, tuple[int, int, int]]] = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
}
ENCODINGS = tuple(_LAYOUT)


class ImageError(ValueError):
    """An Image message that holds no picture; one sentence."""


@functools.cache
def has_cv_bridge() -> bool:
    """Whether ROS's own converter is installed (its namesake for ROS 1 on PyPI does not count)."""
    if importlib.util.find_spec("cv_bridge") is None:
        return False
    return importlib.util.find_spec("cv_bridge.core") is not None


def to_rgb(message: Image) -> np.ndarray:
    """The picture as uint8 (height, width, 3), RGB, contiguous.

    ``is_bigendian`` concerns samples wider than a byte, which none of the known encodings has.

    :raises ImageError: for an unknown encoding, or sizes that do not fit the data.
    """
    _check(message)
    if has_cv_bridge():
        return _by_cv_bridge(message)
    return by_numpy(message)


def to_bgr(message: Image) -> np.ndarray:
    """:func:`to_rgb` with blue first; without a copy where the message is so: do not write to it."""
    _check(message)
    if message.encoding != "bgr8":
        return np.ascontiguousarray(to_rgb(message)[..., ::-1])
    height, width, step = message.height, message.width, message.step
    rows = np.frombuffer(memoryview(message.data), dtype=np.uint8)[: height * step]
    return rows.reshape(height, step)[:, : width * 3].reshape(height, width, 3)


def by_numpy(message: Image) -> np.ndarray:
    """:func:`to_rgb` without cv_bridge."""
    _check(message)
    channels, order = _LAYOUT[message.encoding]
    height, width, step = message.height, message.width, message.step
    rows = np.frombuffer(memoryview(message.data), dtype=np.uint8)[: height * step]
    pixels = rows.reshape(height, step)[:, : width * channels].reshape(height, width, channels)
    return np.ascontiguousarray(pixels[..., order])


def from_rgb(image: np.ndarray, encoding: str = "bgr8") -> Image:
    """An Image message (header left empty) of uint8 (height, width, 3) RGB, as rgb8 or bgr8.

    :raises ImageError: for another shape, type or encoding.
    """
    if encoding not in ("rgb8", "bgr8"):
        raise ImageError(f"Pictures are published as rgb8 or bgr8, not as {encoding!r}.")
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ImageError(f"A picture is uint8 (height, width, 3), not {image.dtype} {image.shape}.")
    pixels = image if encoding == "rgb8" else image[..., ::-1]
    height, width = image.shape[:2]
    data = array.array("B")
    data.frombytes(memoryview(np.ascontiguousarray(pixels)).cast("B"))
    return Image(
        height=height,
        width=width,
        encoding=encoding,
        is_bigendian=0,
        step=3 * width,
        # An array is taken over as it is; bytes or lists would be checked value by value.
        data=data,
    )


def _check(message: Image) -> None:
    if message.encoding not in _LAYOUT:
        raise ImageError(
            f"The camera sends pictures encoded as {message.encoding!r}; known are {', '.join(ENCODINGS)}."
        )
    height, width = message.height, message.width
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ImageError(f"The camera sent a picture of {width} x {height} pixels.")
    row = width * _LAYOUT[message.encoding][0]
    if message.step < row or len(message.data) < message.step * height:
        raise ImageError(
            f"The camera sent {len(message.data)} bytes with a step of {message.step} for a "
            f"picture of {width} x {height} pixels in {message.encoding}."
        )


def _by_cv_bridge(message: Image) -> np.ndarray:
    from cv_bridge import CvBridge, CvBridgeError

    try:
        return np.ascontiguousarray(CvBridge().imgmsg_to_cv2(message, desired_encoding="rgb8"))
    except CvBridgeError as error:
        raise ImageError(f"cv_bridge cannot convert the camera's picture: {error}") from error
