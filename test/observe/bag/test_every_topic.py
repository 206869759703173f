# SPDX-License-Identifier: Apache-2.0
"""Bags of `ros2 bag record --all`: hidden topics, service events, raw beside compressed pictures, no parameters."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from mcap.writer import Writer
from PIL import Image as PillowImage
from rclpy.serialization import deserialize_message, serialize_message
from sensor_msgs.msg import CompressedImage

from dsd_ros.cli.main import main
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.replay import ReplayOptions, prepare
from dsd_ros.observe.bag.run import pictures_of, read_run
from dsd_ros.observe.ros.bag_pictures import from_bag
from dsd_ros.observe.ros.message_types import TypeUnknown, definition
from dsd_ros.ros.images import to_rgb

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
        return "msg", definition(kind)[0]
    except TypeUnknown:
        return "", ""


def record_all(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """The shipped run as `ros2 bag record --all` would have it beside image_transport's compressed plug-in."""
    bag = open_bag(SHIPPED)
    folder.mkdir()
    count = 0
    with (folder / f"{folder.name}_0.mcap").open("wb") as file:
        writer = Writer(file)
        writer.start(profile="ros2", library="libmcap")
        schemas, channels = {}, {}

        def write(topic: str, kind: str, at: int, data: bytes) -> None:
            nonlocal count
            if topic in without:
                return
            if kind not in schemas:
                form, text = bag.definitions.get(kind) or defined(kind)
                schemas[kind] = writer.register_schema(kind, f"ros2{form}" if form else "", text.encode())
            if topic not in channels:
                channels[topic] = writer.register_channel(topic, "cdr", schemas[kind])
            writer.add_message(channels[topic], at, data, at)
            count += 1

        for number, record in enumerate(bag.messages()):
            if record.topic != PICTURES:
                write(record.topic, record.kind, record.at, record.data)
            else:
                lossless = deserialize_message(record.data, CompressedImage)
                raw = from_bag(bytes(lossless.data), lossless.format)
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
    about = {"message_count": count, "relative_file_paths": [f"{folder.name}_0.mcap"], "custom_data": {}}
    (folder / "metadata.yaml").write_text(yaml.safe_dump({"rosbag2_bagfile_information": about}))
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> Path:
    return record_all(tmp_path_factory.mktemp("all") / "all")


def test_it_asks_what_the_shipped_bag_asks(everything):
    bag, own = open_bag(everything), open_bag(SHIPPED)
    run, recorded = read_run(bag), read_run(own)
    assert bag.whole and len(bag.notes) == 1 and "are left out: " in bag.notes[0]
    task, expected = prepare(bag, run, ReplayOptions()), prepare(own, recorded, ReplayOptions())
    assert task.mode == expected.mode and task.plan.transport == expected.plan.transport
    assert task.plan.draft["decode.seed"] == expected.plan.draft["decode.seed"]
    assert [step.tokens for step, _ in task.asked] == [step.tokens for step, _ in expected.asked]
    for (_, question), (_, wanted) in zip(task.asked, expected.asked, strict=True):
        assert (question.stamp, question.instruction, question.history) == (
            wanted.stamp, wanted.instruction, wanted.history,
        )  # fmt: skip
        pixels = [to_rgb(from_bag(one.picture, one.format)) for one in (question, wanted)]
        assert np.array_equal(*pixels)


def test_the_raw_picture_counts_where_both_are(everything):
    stamps = {step.stamp for step in read_run(open_bag(SHIPPED)).steps}
    found, expected = pictures_of(open_bag(everything), stamps), pictures_of(open_bag(SHIPPED), stamps)
    assert found.keys() == expected.keys() == stamps
    for stamp in stamps:
        assert np.array_equal(to_rgb(from_bag(*found[stamp])), to_rgb(from_bag(*expected[stamp])))


def test_it_is_inspected(everything, tmp_path, capsys):
    assert main(["inspect", str(everything), "--html", str(tmp_path / "page.html")]) == 0
    told = capsys.readouterr().out
    assert f"{REPLIES} replies" in told and "CDR without a ROS 2 type" in told
    assert (tmp_path / "page.html").read_text().count("<img") == REPLIES + 4  # and the plots


@pytest.mark.parametrize("lost", ["observation", "decode_stats"])
def test_what_a_replay_lacks_is_named(tmp_path, lost):
    topic = next(name for name in open_bag(SHIPPED).counts if name.endswith(f"/{lost}"))
    bag = open_bag(record_all(tmp_path / "lacking", (topic,)))
    with pytest.raises(
        BagError, match=rf"has nothing to replay\. .*It has no messages on /dsd/{lost}: record these topics"
    ):
        prepare(bag, read_run(bag), ReplayOptions())


@pytest.mark.slow
def test_it_replays_as_recorded(ros_domain, everything, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsd_ros.cli", "replay", str(everything), "--json", str(report)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(report.read_text())["same"] and f"{REPLIES} replies replayed" in result.stdout
