# SPDX-License-Identifier: Apache-2.0
"""Bags of `ros2 bag record --all`: hidden topics, service events, raw beside compressed pictures, no parameters."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from mcap.writer import Writer
from PIL import Image as PillowImage
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage

from dsd_ros.observe.bag.reader import open_bag
from dsd_ros.observe.bag.replay import ReplayOptions, history_of, prepare
from dsd_ros.observe.bag.run import pictures_of, read_run
from dsd_ros.observe.ros.message_types import TypeUnknown, definition
from dsd_ros.pictures import read_picture
from dsd_ros.ros.images import from_rgb, to_rgb

SHIPPED = Path(__file__).parents[2] / "bags" / "straight"
PICTURES = "/camera/image_raw/compressed"
HIDDEN = {
    "/dsd/decode/_service_event": "dsd_msgs/srv/Decode_Event",
    "/dsd/navigate/_action/feedback": "dsd_msgs/action/Navigate_FeedbackMessage",
    "/dsd/navigate/_action/status": "action_msgs/msg/GoalStatusArray",
    "/parameter_events": "rcl_interfaces/msg/ParameterEvent",
    "/events/write_split": "rosbag2_interfaces/msg/WriteSplitEvent",
}


def defined(kind: str) -> tuple[str, str]:
    """What rosbag2 stores: it finds no .msg file of a service event or an action's feedback."""
    try:
        return "ros2msg", definition(kind)[0]
    except TypeUnknown:
        return "", ""


def record_all(path: Path) -> Path:
    """The shipped run as `ros2 bag record --all` would have it beside image_transport's compressed plug-in."""
    bag = open_bag(SHIPPED)
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="libmcap")
        schemas, channels = {}, {}

        def write(topic: str, kind: str, at: int, data: bytes) -> None:
            if kind not in schemas:
                found = bag.definitions.get(kind)
                form, text = ("ros2msg", found.data) if found else defined(kind)
                schemas[kind] = writer.register_schema(kind, form, text.encode())
            if topic not in channels:
                channels[topic] = writer.register_channel(topic, "cdr", schemas[kind])
            writer.add_message(channels[topic], at, data, at)

        for number, record in enumerate(bag.messages()):
            if record.topic != PICTURES:
                write(record.topic, record.kind, record.at, record.data)
            else:
                lossless = deserialize_message(record.data, CompressedImage)
                raw = from_rgb(read_picture(bytes(lossless.data)), "bgr8")
                raw.header = lossless.header
                out = io.BytesIO()
                PillowImage.fromarray(to_rgb(raw)).save(out, "jpeg", quality=80)
                small = CompressedImage(header=raw.header, format="bgr8; jpeg compressed bgr8", data=out.getvalue())
                write(PICTURES, record.kind, record.at, serialize_message(small))
                write("/camera/image_raw", "sensor_msgs/msg/Image", record.at, serialize_message(raw))
            if number % 1000 == 0:
                for topic, kind in HIDDEN.items():
                    write(topic, kind, record.at, b"\0\1\0\0" + bytes(16))
        writer.finish()
    return path


def test_it_asks_what_the_shipped_bag_asks(tmp_path):
    bag, own = open_bag(record_all(tmp_path / "all.mcap")), open_bag(SHIPPED)
    run, recorded = read_run(bag), read_run(own)
    assert bag.whole and not bag.notes
    task, expected = prepare(bag, run, ReplayOptions()), prepare(own, recorded, ReplayOptions())
    assert task.draft == expected.draft and task.target == expected.target
    for name in ("mode", "proven_by", "sampling", "seed"):
        assert getattr(task.settings, name) == getattr(expected.settings, name)
    for (step, picture), (same, wanted) in zip(task.steps, expected.steps, strict=True):
        assert (step.tokens, step.stamp, step.instruction) == (same.tokens, same.stamp, same.instruction)
        assert history_of(run, step) == history_of(recorded, same)
        assert np.array_equal(read_picture(picture), read_picture(wanted))
    stamps = {step.stamp for step, _ in task.steps}
    found, wanted = pictures_of(bag, stamps), pictures_of(own, stamps)
    assert found.keys() == wanted.keys() == stamps  # of raw and compressed ones, the raw ones count
    for stamp in stamps:
        assert np.array_equal(read_picture(found[stamp]), read_picture(wanted[stamp]))
