"""Convert ROS Image messages to arrays and back, and read images and poses straight from CDR.

Conversions use cv_bridge where it works, else numpy. They honour ``step`` (padded rows) and check sizes, so a damaged
message is refused.

CDR (OMG DDSI-RTPS 2.3, 10; DDS-XTypes 1.3, 7.4.3) is four bytes that name the byte order, then the fields, each
aligned to its size from there. Reading it directly saves copies of a picture and the 17 objects of an Odometry, many
times a second. Big-endian data is deserialized normally.
"""

from __future__ import annotations

import array
import functools
import struct
from dataclasses import dataclass

import numpy as np
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image
from std_msgs.msg import Header

from dsd_ros.limits import MAX_SIDE
from dsd_ros.navigation.odometry import checked_pose
from dsd_ros.ros.stamps import pose_of

# Encoding -> channels, and the indices of red, green and blue in a pixel.
_LAYOUT: dict[str, tuple[int, tuple[int, int, int]]] = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
    "mono8": (1, (0, 0, 0)),
}
ENCODINGS = tuple(_LAYOUT)


class ImageMessageError(ValueError):
    """The Image message holds no valid picture; one sentence."""


def to_rgb(message: Image | RawImage) -> np.ndarray:
    """The picture as uint8 (height, width, 3), RGB, contiguous.

    ``is_bigendian`` does not matter: all known encodings have one byte per sample.

    :raises ImageMessageError: for an unknown encoding, or sizes that do not fit the data.
    """
    return _by_cv_bridge(message) if has_cv_bridge() else by_numpy(message)


def by_numpy(message: Image | RawImage) -> np.ndarray:
    """:func:`to_rgb` without cv_bridge."""
    channels, order = _LAYOUT[_check(message).encoding]
    return np.ascontiguousarray(_pixels(message, channels)[..., order])


@functools.cache
def has_cv_bridge() -> bool:
    """Whether cv_bridge is installed and converts a picture; one built for ROS 1 or for another numpy does not."""
    probe = from_rgb(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    try:
        return np.array_equal(_by_cv_bridge(probe), by_numpy(probe))
    except Exception:  # a broken installation raises anything
        return False


def _by_cv_bridge(message: Image | RawImage) -> np.ndarray:
    from cv_bridge import CvBridge, CvBridgeError

    # Without the padding, because cv_bridge misreads rows that are padded by part of a pixel.
    pixels = _pixels(message, _LAYOUT[_check(message).encoding][0])
    try:
        return np.ascontiguousarray(CvBridge().imgmsg_to_cv2(_message(pixels, message.encoding), "rgb8"))
    except CvBridgeError as error:
        raise ImageMessageError(f"cv_bridge cannot convert the camera's picture: {error}") from error


def to_bgr(message: Image | RawImage) -> np.ndarray:
    """Like :func:`to_rgb`, as BGR. A view of the message where that is bgr8, so do not write to it."""
    if message.encoding != "bgr8":
        return np.ascontiguousarray(to_rgb(message)[..., ::-1])
    return _pixels(_check(message), 3)


def _pixels(message: Image | RawImage, channels: int) -> np.ndarray:
    """A view of the pixels without the rows' padding."""
    height, width, step = message.height, message.width, message.step
    rows = np.frombuffer(memoryview(message.data), dtype=np.uint8)[: height * step]
    return rows.reshape(height, step)[:, : width * channels].reshape(height, width, channels)


def from_rgb(image: np.ndarray, encoding: str = "bgr8") -> Image:
    """An Image message (empty header) from uint8 (height, width, 3) RGB, encoded as rgb8 or bgr8.

    :raises ImageMessageError: for another shape, type or encoding.
    """
    if encoding not in ("rgb8", "bgr8"):
        raise ImageMessageError(f"Pictures are published as rgb8 or bgr8, not as {encoding!r}.")
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ImageMessageError(f"A picture is uint8 (height, width, 3), not {image.dtype} {image.shape}.")
    return _message(image if encoding == "rgb8" else image[..., ::-1], encoding)


def _message(pixels: np.ndarray, encoding: str) -> Image:
    height, width, channels = pixels.shape
    data = array.array("B")
    data.frombytes(np.ascontiguousarray(pixels).data.cast("B"))
    # An array is used as it is; bytes or lists would be checked value by value.
    return Image(height=height, width=width, encoding=encoding, is_bigendian=0, step=channels * width, data=data)


def _check(message: Image | RawImage) -> Image | RawImage:
    if message.encoding not in _LAYOUT:
        known = ", ".join(ENCODINGS)
        raise ImageMessageError(f"The camera sends pictures encoded as {message.encoding[:40]!r}; known are {known}.")
    height, width = message.height, message.width
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise ImageMessageError(f"The camera sent a picture of {width} x {height} pixels.")
    row = width * _LAYOUT[message.encoding][0]
    if message.step < row or len(message.data) < message.step * height:
        raise ImageMessageError(
            f"The camera sent {len(message.data)} bytes with a step of {message.step} for a "
            f"picture of {width} x {height} pixels in {message.encoding}."
        )
    return message


_LITTLE_ENDIAN = b"\x00\x01\x00\x00"
_START = len(_LITTLE_ENDIAN)
_STAMP = 8  # bytes
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<7d")  # position x, y, z; orientation x, y, z, w


@dataclass(frozen=True)
class RawImage:
    """A serialized sensor_msgs/Image, accepted by :func:`to_bgr`. ``header`` is the CDR of its std_msgs/Header."""

    header: bytes
    height: int
    width: int
    encoding: str
    step: int
    data: memoryview


class ImageBuffer:
    """A serialized bgr8 Image whose pixels are drawn in place; the memory is reused."""

    def __init__(self) -> None:
        self.sent = bytearray()  # to publish
        self._head = b""
        self._pixels = np.empty((0, 0, 3), np.uint8)

    def canvas(self, header: bytes, height: int, width: int) -> np.ndarray:
        """The pixels to draw on, uint8 (height, width, 3); ``header`` as in :class:`RawImage`.

        The same array as before, with its content, unless the size has changed.
        """
        shape, count = (height, width, 3), 3 * height * width
        head = _LITTLE_ENDIAN + header + bytes(-len(header) % 4)
        head += struct.pack("<3I", height, width, 5) + b"bgr8\x00" + b"\x00"  # not big-endian
        head += bytes(-(len(head) - _START) % 4) + struct.pack("<2I", 3 * width, count)
        if len(self._head) != len(head) or self._pixels.shape != shape:
            self.sent = bytearray(len(head) + count)
            pixels = np.frombuffer(self.sent, np.uint8, count, len(head))
            self._head, self._pixels = head, pixels.reshape(shape)
        self.sent[: len(head)] = head
        return self._pixels


def read_image(sent: bytes) -> RawImage:
    """Parse a serialized Image without copying its pixels.

    :raises ImageMessageError: when the bytes end too early.
    """
    try:
        return _read_image(sent)
    except (struct.error, RuntimeError) as error:
        raise ImageMessageError(f"The camera sent {len(sent)} bytes that are no Image message.") from error


def _read_image(sent: bytes) -> RawImage:
    if sent[:_START] != _LITTLE_ENDIAN:
        m = deserialize_message(sent, Image)
        return RawImage(_header_out(m.header), m.height, m.width, m.encoding, m.step, memoryview(m.data))
    _, header_end = _text(sent, _START + _STAMP)
    height, width = struct.unpack_from("<2I", sent, at := _aligned(header_end, 4))
    encoding, end = _text(sent, at + 8)
    step, count = struct.unpack_from("<2I", sent, at := _aligned(end + 1, 4))  # after is_bigendian
    pixels = memoryview(sent)[at + 8 : at + 8 + count]
    return RawImage(sent[_START:header_end], height, width, encoding, step, pixels)


def read_pose(sent: bytes) -> tuple[tuple[float, float, float], str]:
    """Pose (x, y in m, yaw in rad) and frame of a serialized Odometry.

    :raises struct.error: for too few bytes.
    :raises OdometryError: where there is no pose in it.
    """
    if sent[:_START] != _LITTLE_ENDIAN:
        message = deserialize_message(sent, Odometry)
        at = pose_of(message)
        return (at.x, at.y, at.yaw), message.header.frame_id
    frame, end = _text(sent, _START + _STAMP)
    _, end = _text(sent, _aligned(end, 4))  # child_frame_id
    x, y, _, qx, qy, qz, qw = _PLACE.unpack_from(sent, _aligned(end, 8))
    at = checked_pose((x, y), (qx, qy, qz, qw))
    return (at.x, at.y, at.yaw), frame


def _text(sent: bytes, at: int) -> tuple[str, int]:
    """A string and the offset of its end."""
    (count,) = _COUNT.unpack_from(sent, at)
    end = at + 4 + count
    return sent[at + 4 : end - 1].decode("utf-8", "replace"), end


def _aligned(at: int, size: int) -> int:
    return at + (_START - at) % size


def _header_out(header: Header) -> bytes:
    frame: bytes = header.frame_id.encode() + b"\x00"
    return struct.pack("<iII", header.stamp.sec, header.stamp.nanosec, len(frame)) + frame
