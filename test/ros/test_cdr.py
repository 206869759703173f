# SPDX-License-Identifier: Apache-2.0
"""Pictures and poses read from CDR equal what the middleware deserializes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Quaternion
from nav_msgs.msg import Odometry
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import Image

from dsd_ros.ros.images import ImageBuffer, RawImage, from_rgb, read_image, read_pose, to_bgr
from dsd_ros.ros.stamps import pose_of

FRAMES = ("", "o", "odom", "front_camera_optical_frame", "ns/base_link")


def sent_on(picture: RawImage) -> bytearray:
    out = ImageBuffer()
    out.canvas(picture.header, picture.height, picture.width)[:] = to_bgr(picture)
    return out.sent


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("encoding", ["rgb8", "bgr8"])
def test_a_picture_comes_in_as_the_middleware_sent_it(frame, encoding):
    pixels = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    message = from_rgb(pixels, encoding)
    message.header.stamp, message.header.frame_id = Time(sec=-3, nanosec=999_999_999), frame
    picture = read_image(serialize_message(message))
    assert (picture.height, picture.width, picture.encoding, picture.step) == (5, 7, encoding, 21)
    assert np.array_equal(to_bgr(picture), pixels[..., ::-1])
    again = deserialize_message(bytes(sent_on(picture)), Image)
    expected = from_rgb(pixels)
    expected.header = message.header
    assert again == expected


@pytest.mark.parametrize("child", FRAMES)
@pytest.mark.parametrize("frame", FRAMES)
def test_a_pose_is_the_middlewares(frame, child):
    message = Odometry(child_frame_id=child)
    message.header.frame_id = frame
    place = message.pose.pose
    place.position.x, place.position.y, place.position.z = 1.25, -7.5, 0.3
    place.orientation = Quaternion(x=0.1, y=-0.2, z=0.3, w=0.927)
    at = pose_of(message)
    assert read_pose(serialize_message(message)) == ((at.x, at.y, at.yaw), frame)


def test_the_other_order_of_bytes_goes_the_long_way():
    head = struct.pack(">4BiI", 0, 0, 0, 0, 5, 6)
    name = struct.pack(">I5s3x", 5, b"odom\0")
    picture = struct.pack(">2II6sB", 1, 2, 6, b"mono8\0", 0) + b"\0" + struct.pack(">2I", 2, 2) + b"\7\x08"
    seen = read_image(head + name + picture)
    assert (seen.height, seen.width, seen.encoding, seen.step) == (1, 2, "mono8", 2)
    assert to_bgr(seen).tolist() == [[[7] * 3, [8] * 3]]
    again = deserialize_message(bytes(sent_on(seen)), Image)
    assert (again.header.stamp, again.header.frame_id) == (Time(sec=5, nanosec=6), "odom")
    place = struct.pack(">7d", 1.5, 2.5, 0.0, 0.0, 0.0, 0.0, 1.0)
    odometry = head + name + name + place + bytes(8 * (36 + 6 + 36))
    if (len(head) - 4 + 2 * len(name)) % 8:
        odometry = head + name + name + bytes(4) + place + bytes(8 * (36 + 6 + 36))
    assert read_pose(odometry) == ((1.5, 2.5, 0.0), "odom")
