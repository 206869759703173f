"""Pictures and poses between their serialised form and plain values, without the message objects between.

ROS sends plain CDR (OMG DDSI-RTPS 2.3, 10; DDS-XTypes 1.3, 7.4.3): four bytes that name the byte order, then the
fields, each aligned to its size counted from behind those four. A picture of 225 kB is copied three times on its way
into and out of a message, and an Odometry is 17 objects; both come many times a second. What is not little-endian goes
the long way.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image
from std_msgs.msg import Header

from dsd_ros.ros.stamps import pose_of

_LITTLE_ENDIAN = b"\x00\x01\x00\x00"
_START = len(_LITTLE_ENDIAN)
_STAMP = 8  # bytes
_COUNT = struct.Struct("<I")
_PLACE = struct.Struct("<7d")  # position x, y, z; orientation x, y, z, w


@dataclass(frozen=True)
class Picture:
    """A sensor_msgs/Image as it came; :func:`dsd_ros.ros.images.to_bgr` takes it for one.

    ``header``: its std_msgs/Header as it was sent.
    """

    header: bytes
    height: int
    width: int
    encoding: str
    step: int
    data: memoryview


class PictureOut:
    """A serialised Image, bgr8, whose pixels are drawn in place. Its memory serves again and again."""

    def __init__(self) -> None:
        self.sent = bytearray()  # to publish
        self._head = b""
        self._pixels = np.empty((0, 0, 3), np.uint8)

    def canvas(self, header: bytes, height: int, width: int) -> np.ndarray:
        """Where to draw: uint8 (height, width, 3); ``header`` as :class:`Picture` has it.

        The same array as before, with what was drawn on it, unless the size has changed.
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


def picture_in(sent: bytes) -> Picture:
    """A serialised Image. The pixels are not copied."""
    if sent[:_START] != _LITTLE_ENDIAN:
        message = deserialize_message(sent, Image)
        return Picture(
            _header_out(message.header),
            message.height,
            message.width,
            message.encoding,
            message.step,
            memoryview(message.data),
        )
    _, header_end = _text(sent, _START + _STAMP)
    height, width = struct.unpack_from("<2I", sent, at := _aligned(header_end, 4))
    encoding, end = _text(sent, at + 8)
    step, count = struct.unpack_from("<2I", sent, at := _aligned(end + 1, 4))  # behind is_bigendian
    pixels = memoryview(sent)[at + 8 : at + 8 + count]
    return Picture(sent[_START:header_end], height, width, encoding, step, pixels)


def pose_in(sent: bytes) -> tuple[tuple[float, float, float], str]:
    """Pose (m, rad) and frame of a serialised Odometry."""
    if sent[:_START] != _LITTLE_ENDIAN:
        message = deserialize_message(sent, Odometry)
        at = pose_of(message)
        return (at.x, at.y, at.yaw), message.header.frame_id
    frame, end = _text(sent, _START + _STAMP)
    _, end = _text(sent, _aligned(end, 4))  # child_frame_id
    x, y, _, qx, qy, qz, qw = _PLACE.unpack_from(sent, _aligned(end, 8))
    yaw = math.atan2(2.0 * (qw * qz + qx * qy), 1.0 - 2.0 * (qy * qy + qz * qz))
    return (x, y, yaw), frame


def _text(sent: bytes, at: int) -> tuple[str, int]:
    """A string and where it ends."""
    (count,) = _COUNT.unpack_from(sent, at)
    end = at + 4 + count
    return sent[at + 4 : end - 1].decode("utf-8", "replace"), end


def _aligned(at: int, size: int) -> int:
    return at + (_START - at) % size


def _header_out(header: Header) -> bytes:
    frame = header.frame_id.encode() + b"\x00"
    return struct.pack("<iII", header.stamp.sec, header.stamp.nanosec, len(frame)) + frame
