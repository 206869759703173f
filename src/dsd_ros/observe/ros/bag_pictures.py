# SPDX-License-Identifier: Apache-2.0
"""Select the camera pictures that a bag keeps: raw ones as lossless PNG, compressed ones as they came."""

from __future__ import annotations

from collections import deque

import cv2
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage, Image

from dsd_ros.observe.bag.run import header_stamp
from dsd_ros.ros.images import ImageMessageError, to_rgb

_HELD_S = 30.0  # a reply names its picture much sooner than that
_HELD_BYTES = 96 << 20
_LEVEL = 3  # of zlib; 1 ms for a simulator picture


def to_png(message: Image) -> CompressedImage:
    """Compress losslessly, with image_transport's format name. Raises ImageMessageError for an invalid picture."""
    picture = to_rgb(message)
    done, data = cv2.imencode(".png", picture[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, _LEVEL])
    if not done:
        raise ImageMessageError("OpenCV could not encode the camera's picture.")
    result = CompressedImage(header=message.header, format=f"{message.encoding}; png compressed bgr8")
    result.data.frombytes(data.tobytes())
    return result


class PictureSelector:
    """Keeps all pictures (``rate`` 0), or ``rate`` a second plus those that replies are about.

    The others are held for a while, within bounds, in case a reply names them.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._held: deque[tuple[int, int, bytes, bool]] = deque()  # (stamp, received, CDR, compressed)
        self._held_bytes = 0
        self._last = self._newest = -(2**63)
        self._missing: deque[int] = deque(maxlen=16)  # stamps named before their pictures arrived

    def take(self, payload: bytes, received: int, compressed: bool = False) -> tuple[int, bytes] | None:
        """Add a picture (CDR); returns (received, CDR of a CompressedImage) if it is kept now."""
        if self.rate > 0.0:
            stamp = self._newest = header_stamp(payload)
            if stamp in self._missing:
                self._missing.remove(stamp)
            elif received - self._last < 1e9 / self.rate:
                self._hold(stamp, payload, received, compressed)
                return None
            else:
                self._last = received
        return received, _as_recorded(payload, compressed)

    def named(self, stamp: int) -> tuple[int, bytes] | None:
        """A reply names this stamp (ns): its held picture, if any, in the form of :meth:`take`."""
        for item in self._held:
            if item[0] == stamp:
                self._held.remove(item)
                self._held_bytes -= len(item[2])
                return item[1], _as_recorded(item[2], item[3])
        if stamp > self._newest:
            self._missing.append(stamp)
        return None

    def _hold(self, stamp: int, payload: bytes, received: int, compressed: bool) -> None:
        self._held.append((stamp, received, payload, compressed))
        self._held_bytes += len(payload)
        while self._held_bytes > _HELD_BYTES or received - self._held[0][1] > _HELD_S * 1e9:
            self._held_bytes -= len(self._held.popleft()[2])


def _as_recorded(payload: bytes, compressed: bool) -> bytes:
    if compressed:
        return payload
    return serialize_message(to_png(deserialize_message(payload, Image)))
