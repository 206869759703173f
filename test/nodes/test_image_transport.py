# SPDX-License-Identifier: Apache-2.0
"""Pictures on camera/image_raw or camera/image_raw/compressed: every node that looks at them takes either."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
import rclpy
from builtin_interfaces.msg import Duration
from PIL import Image as PillowImage
from rclpy.context import Context
from rclpy.serialization import serialize_message
from ros_rig import picture, repeating
from sensor_msgs.msg import CompressedImage, Image

from dsd_msgs.msg import Observation, SafetyState
from dsd_msgs.srv import Decode
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.pictures import read_picture
from dsd_ros.ros import qos
from dsd_ros.ros.camera import CameraTopic
from dsd_ros.ros.images import from_rgb, to_rgb
from dsd_ros.ros.record_topics import TOPICS


def jpeg(pixels: np.ndarray, form: str = "bgr8; jpeg compressed bgr8") -> CompressedImage:
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "jpeg", quality=80)
    return CompressedImage(format=form, data=file.getvalue())


class CompressedCamera:
    """Publishes as a camera with image_transport's compressed plug-in alone does."""

    def __init__(self, rig) -> None:
        self.rig = rig
        self.publisher = rig.node.create_publisher(CompressedImage, "camera/image_raw/compressed", qos.CAMERA)
        self.stamps: set[tuple[int, int]] = set()

    def show(self, message: CompressedImage) -> CompressedImage:
        message.header.stamp = self.rig.node.get_clock().now().to_msg()
        message.header.frame_id = "front"
        self.publisher.publish(message)
        self.stamps.add((message.header.stamp.sec, message.header.stamp.nanosec))
        return message

    def ask(self, message: CompressedImage):
        """A decode about a picture from now on, which is shown again and again."""
        stamp = self.rig.node.get_clock().now().to_msg()
        request = Decode.Request(instruction="find it", not_before=stamp, timeout=Duration(sec=20))
        with repeating(lambda: self.show(message), 0.05):
            return self.rig.call(Decode, "dsd/decode", request)


def test_models_see_what_a_compressed_camera_saw(rig, tiny_pair):
    observed: list[Observation] = []
    topic = next(name for name in TOPICS if name.endswith("observation"))
    hearing = rig.node.create_subscription(Observation, topic, observed.append, qos.LINK)
    rig.host("verifier_node", model__path=tiny_pair[0])
    rig.host("draft_node", model__path=tiny_pair[1], decode__max_tokens=8)
    rig.until_active()
    rig.until_linked("draft_node", hearing)
    camera = CompressedCamera(rig)
    message = jpeg(picture(3))
    pixels = to_rgb(message)
    first = camera.ask(message)
    assert first.success, first.message
    assert (first.observation_stamp.sec, first.observation_stamp.nanosec) in camera.stamps
    rig.until(lambda: observed)
    assert np.array_equal(read_picture(bytes(observed[-1].image)), pixels)  # decoded once, and sent as they are

    # Damage is a sentence, and the next picture is decoded.
    cut = jpeg(picture(4))
    cut.data = cut.data[: len(cut.data) // 2]
    answer = camera.ask(cut)
    assert (answer.success, answer.code) == (False, Decode.Response.NO_IMAGE)
    assert "the camera's picture of format 'bgr8; jpeg compressed bgr8' cannot be read" in answer.message
    assert camera.ask(message).text == first.text

    # A raw publisher counts for more, with the same pixels.
    raw = rig.node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
    rig.until(raw.get_subscription_count, what="the draft node on the raw topic")
    rig.until(lambda: not camera.publisher.get_subscription_count(), what="the compressed topic left alone")
    shown = from_rgb(pixels)
    shown.header.stamp = rig.node.get_clock().now().to_msg()
    request = Decode.Request(instruction="find it", not_before=shown.header.stamp, timeout=Duration(sec=20))
    with repeating(lambda: raw.publish(shown), 0.05):
        assert rig.call(Decode, "dsd/decode", request).text == first.text
    assert not any("Traceback" in line for line in rig.lines)


def test_the_supervisor_watches_a_compressed_camera(rig):
    states: list[SafetyState] = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", states.append, qos.LATCHED)
    rig.host("supervisor_node")
    rig.until(lambda: states and Cause.CAMERA_STALE in states[-1].causes, what="a missing camera")
    camera = CompressedCamera(rig)
    small = jpeg(picture(1))
    rig.until(
        lambda: (camera.show(small), time.sleep(0.05), Cause.CAMERA_STALE not in states[-1].causes)[2],
        what="a camera that is heard",
    )
    rig.until(lambda: Cause.CAMERA_STALE in states[-1].causes, what="a camera that is silent again")


def test_the_overlay_is_drawn_on_compressed_pictures(rig):
    drawn: list[Image] = []
    rig.node.create_subscription(Image, "dsd/visual/image", drawn.append, qos.NEWEST_STATE)
    rig.host("visual_node")
    camera = CompressedCamera(rig)
    blue = np.zeros((112, 168, 3), np.uint8)
    blue[..., 2] = 255
    broken = CompressedImage(format="jpeg", data=b"\xff\xd8 no picture")
    rig.until(lambda: (camera.show(broken), camera.publisher.get_subscription_count())[1], what="a subscription")
    rig.until(lambda: (camera.show(jpeg(blue, "jpeg")), time.sleep(0.05), drawn)[2], what="a drawn picture")
    pixel = to_rgb(drawn[-1])[100, 20].astype(int)
    assert pixel[2] > 200 and pixel[0] < 60 and drawn[-1].header.frame_id == "front"


def test_a_compressed_camera_is_recorded_as_it_came_and_a_raw_one_as_png(rig, tmp_path):
    camera = CompressedCamera(rig)
    rig.host("record_node", directory=tmp_path / "bag")
    topic = "/camera/image_raw/compressed"

    def kept() -> list[CompressedImage]:
        try:
            bag = open_bag(tmp_path / "bag")
        except BagError:
            return []
        return [bag.decode(record) for record in bag.messages([topic])]

    def shown(message: CompressedImage) -> bool:
        for _ in range(10):
            camera.show(message)
            time.sleep(0.03)
        return len(kept()) > 3

    message = jpeg(picture(5))
    rig.until(lambda: shown(message), what="compressed pictures in the bag")
    assert {(found.data.tobytes(), found.format) for found in kept()} == {(bytes(message.data), message.format)}

    raw = rig.node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
    rig.until(raw.get_subscription_count, what="the recorder on the raw topic")
    rig.until(
        lambda: (raw.publish(from_rgb(picture(6))), time.sleep(0.1), "png" in kept()[-1].format)[2],
        what="a raw picture in the bag",
    )
    assert np.array_equal(to_rgb(CompressedImage(format="png", data=kept()[-1].data.tobytes())), picture(6))


@pytest.fixture
def context(ros_domain):
    made = Context()
    rclpy.init(context=made)
    yield made
    rclpy.shutdown(context=made)


def test_auto_takes_what_is_published_and_raw_where_both_are(context):
    node = rclpy.create_node("looker", context=context, namespace="go2")
    topic = CameraTopic(node, "auto")
    assert (topic.name, topic.kind, topic.look()) == ("/go2/camera/image_raw", Image, False)  # nobody publishes

    def until(name: str) -> None:
        end = time.monotonic() + 20.0
        while topic.name != name and time.monotonic() < end:
            topic.look()
            time.sleep(0.02)
        assert topic.name == name

    compressed = node.create_publisher(CompressedImage, "camera/image_raw/compressed", qos.CAMERA)
    until("/go2/camera/image_raw/compressed")
    assert topic.kind is CompressedImage and topic.type_name == "sensor_msgs/msg/CompressedImage"
    raw = node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
    until("/go2/camera/image_raw")
    node.destroy_publisher(raw)
    until("/go2/camera/image_raw/compressed")
    node.destroy_publisher(compressed)
    assert not topic.look()  # it may come back
    fixed = {form: CameraTopic(node, form) for form in ("raw", "compressed")}
    raw = node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
    until("/go2/camera/image_raw")
    for one in fixed.values():
        one.look()
    assert fixed["raw"].kind is Image and fixed["compressed"].kind is CompressedImage
    node.destroy_node()


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (["camera/image_raw:=/front/image"], "/front/image/compressed"),  # as image_transport does
        (["camera/image_raw/compressed:=jpeg"], "/jpeg"),
        (["camera/image_raw:=/front/image", "/front/image/compressed:=/jpeg"], "/jpeg"),
    ],
)
def test_remapping_the_camera_remaps_its_compressed_topic(context, rules, name):
    words = ["--ros-args", *(word for rule in rules for word in ("-r", rule))]
    node = rclpy.create_node("looker", context=context, cli_args=words)
    assert CameraTopic(node, "compressed").name == name
    heard: list[CompressedImage] = []
    topic = CameraTopic(node, "compressed")
    subscription = node.create_subscription(topic.kind, topic.name, heard.append, qos.CAMERA)
    assert subscription.topic_name == name
    node.destroy_node()


def test_what_a_message_of_compressed_data_is_worth_is_in_its_bytes():
    pixels = picture(9)
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "png")
    for form in ("rgb8; png compressed bgr8", "bgr8; png compressed bgr8", "rgb8; png compressed", "png", ""):
        assert np.array_equal(to_rgb(CompressedImage(format=form, data=file.getvalue())), pixels), form
    grey = io.BytesIO()
    PillowImage.fromarray(pixels[..., 0]).save(grey, "png")
    found = to_rgb(CompressedImage(format="mono8; png compressed mono8", data=grey.getvalue()))
    assert np.array_equal(found, np.repeat(pixels[..., :1], 3, axis=2))
    assert len(serialize_message(jpeg(pixels))) < pixels.nbytes
