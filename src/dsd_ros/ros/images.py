# SPDX-License-Identifier: Apache-2.0
"""Convert Image and CompressedImage messages to arrays and back, and read images and poses straight from CDR.

Conversions of Image use cv_bridge where it works, else numpy. They honour ``step`` (padded rows) and check sizes, so a
damaged message is refused. A compressed picture is decoded once, here: what is sent to the verifier are its pixels.

CDR (OMG DDSI-RTPS 2.3, 10; DDS-XTypes 1.3, 7.4.3) is four bytes that name the byte order, then the fields, each
aligned to its size from there. Reading it directly saves copies of a picture and the 17 objects of an Odometry, many
times a second. Big-endian data is deserialized normally.
"""

from __future__ import annotations

import array
import contextlib
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from dsd_ros.navigation.safety.odometry import checked_pose
from dsd_ros.pictures import RAW_LAYOUTS, PictureError, raw_pixels, raw_rgb, read_picture
from dsd_ros.ros.stamps import pose_of

ENCODINGS = tuple(RAW_LAYOUTS)
_CONTAINERS = ("JPEG", "PNG")  # of compressed pictures
Picture: TypeAlias = Image | CompressedImage


class ImageMessageError(PictureError):
    """The message holds no valid picture; one sentence."""


def to_rgb(message: Picture | RawImage) -> np.ndarray:
    """The picture as uint8 (height, width, 3), RGB, contiguous.

    :raises ImageMessageError: for damaged data, an unknown encoding, or sizes that do not fit the data.
    """
    if isinstance(message, CompressedImage):
        return from_compressed(message.data, message.format)
    return _by_cv_bridge(message) if has_cv_bridge() else by_numpy(message)


def from_compressed(data: Any, form: str) -> np.ndarray:
    """The pixels, as :func:`to_rgb`, of a CompressedImage with this ``format``.

    The format may name the encoding before compression, as image_transport does ("bgr8; jpeg compressed bgr8"). The
    data alone decides: a JPEG or PNG file says which sample is red, and publishers disagree about the rest.
    """
    with _as_message_error():
        return read_picture(bytes(data), f"the camera's picture of format {form[:60]!r}", containers=_CONTAINERS)


def by_numpy(message: Image | RawImage) -> np.ndarray:
    """:func:`to_rgb` of an uncompressed picture without cv_bridge."""
    with _as_message_error():
        return raw_rgb(message)


@contextlib.contextmanager
def _as_message_error() -> Iterator[None]:
    try:
        yield
    except PictureError as error:
        raise ImageMessageError(str(error)) from error


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

    with _as_message_error():  # without the padding: cv_bridge misreads rows that are padded by part of a pixel
        pixels = raw_pixels(message)
    try:
        return np.ascontiguousarray(CvBridge().imgmsg_to_cv2(_message(pixels, message.encoding), "rgb8"))
    except CvBridgeError as error:
        raise ImageMessageError(f"cv_bridge cannot convert the camera's picture: {error}") from error


def to_bgr(message: Image | RawImage) -> np.ndarray:
    """Like :func:`to_rgb`, as BGR. A view of the message where that is bgr8, so do not write to it."""
    if message.encoding != "bgr8":
        return np.ascontiguousarray(to_rgb(message)[..., ::-1])
    with _as_message_error():
        return raw_pixels(message)


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
        self._pixels: np.ndarray = np.empty((0, 0, 3), np.uint8)

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


def read_image(sent: bytes, kind: type[Picture] = Image) -> RawImage:
    """Parse a serialized Image without copying its pixels, or decode a serialized CompressedImage.

    :raises ImageMessageError: when the bytes end too early, or are no picture.
    """
    try:
        return _read_image(sent) if kind is Image else _read_compressed(sent)
    except (struct.error, RuntimeError) as error:
        raise ImageMessageError(f"The camera sent {len(sent)} bytes that are no {kind.__name__} message.") from error


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


def _read_compressed(sent: bytes) -> RawImage:
    message = deserialize_message(sent, CompressedImage)
    pixels = np.ascontiguousarray(to_rgb(message)[..., ::-1])
    height, width = pixels.shape[:2]
    return RawImage(_header_out(message.header), height, width, "bgr8", 3 * width, memoryview(pixels.tobytes()))


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
