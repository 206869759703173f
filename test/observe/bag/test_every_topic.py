# SPDX-License-Identifier: Apache-2.0
"""Bags of `ros2 bag record --all`: hidden topics, service events, raw beside compressed pictures, no parameters."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from mcap.writer import Writer
from PIL import Image as PillowImage
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage

from dsd_ros.cli.main import main
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.replay import ReplayOptions, history_of, prepare
from dsd_ros.observe.bag.run import pictures_of, read_run
from dsd_ros.observe.ros.message_types import TypeUnknown, definition
from dsd_ros.pictures import read_picture
from dsd_ros.ros.images import from_rgb, to_rgb

SHIPPED = Path(__file__).parents[2] / "bags" / "straight"
REPLIES = len(read_run(open_bag(SHIPPED)).steps)
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


def record_all(path: Path, without: tuple[str, ...] = ()) -> Path:
    """The shipped run as `ros2 bag record --all` would have it beside image_transport's compressed plug-in."""
    bag = open_bag(SHIPPED)
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="libmcap")
        schemas, channels = {}, {}

        def write(topic: str, kind: str, at: int, data: bytes) -> None:
            if topic in without:
                return
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


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    return record_all(tmp_path_factory.mktemp("all") / "all.mcap")


def test_it_asks_what_the_shipped_bag_asks(everything):
    bag, own = open_bag(everything), open_bag(SHIPPED)
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


def test_the_raw_picture_counts_where_both_are(everything):
    stamps = {step.stamp for step in read_run(open_bag(SHIPPED)).steps}
    found, expected = pictures_of(open_bag(everything), stamps), pictures_of(open_bag(SHIPPED), stamps)
    assert found.keys() == expected.keys() == stamps
    for stamp in stamps:
        assert np.array_equal(read_picture(found[stamp]), read_picture(expected[stamp]))


def test_it_is_inspected(everything, tmp_path, capsys):
    assert main(["inspect", str(everything), "--html", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    assert f"{REPLIES} replies" in told
    assert (tmp_path / "page.html").read_text().count("<img") == REPLIES


@pytest.mark.parametrize("lost", ["observation", "decode_stats"])
def test_what_a_replay_lacks_is_named(tmp_path, lost):
    topic = next(name for name in open_bag(SHIPPED).counts if name.endswith(f"/{lost}"))
    bag = open_bag(record_all(tmp_path / "lacking.mcap", (topic,)))
    with pytest.raises(
        BagError, match=rf"has nothing to replay\. .*It has no messages on /dsd/{lost}: record these topics"
    ):
        prepare(bag, read_run(bag), ReplayOptions())


def test_it_replays_as_recorded(everything, capsys):
    assert main(["replay", str(everything)]) == 0
    assert f"{REPLIES} replies replayed" in capsys.readouterr().out
