# SPDX-License-Identifier: Apache-2.0
"""The recorder beside real publishers: it keeps messages bit by bit, and a kill loses almost nothing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message, serialize_message
from ros_rig import picture
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String

from dsd_msgs.msg import NavAction, ReplyProgress, SafetyState
from dsd_ros.nodes.record_node import RecordNode
from dsd_ros.observe.bag.reader import BagError, open_bag
from dsd_ros.observe.bag.writer import BagWriter
from dsd_ros.observe.ros import bag_pictures as record_pictures
from dsd_ros.observe.ros.bag_pictures import PictureSelector
from dsd_ros.pictures import read_picture
from dsd_ros.ros import qos
from dsd_ros.ros.dds_channel import TopicSet, VerifierTopics
from dsd_ros.ros.health import HEARD
from dsd_ros.ros.images import from_rgb
from dsd_ros.wire import messages as wire


class Stage:
    """Publishes what a robot would: a latched state, pictures, and now and then a reply about one."""

    def __init__(self, rig) -> None:
        self.node = rig.node
        self.camera = rig.node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self.progress = rig.node.create_publisher(ReplyProgress, "dsd/reply_progress", qos.STATE)
        self.actions = rig.node.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
        state = rig.node.create_publisher(SafetyState, "dsd/safety_state", qos.LATCHED)
        state.publish(SafetyState(stopped=True))
        best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        self.gossip = rig.node.create_publisher(String, "gossip", best_effort)
        self.pictures: dict[int, np.ndarray] = {}
        self.named: set[int] = set()
        self.actions_sent = 0

    def act(self) -> None:
        number = len(self.pictures) + 1
        message = from_rgb(picture(number), "rgb8" if number % 2 else "bgr8")
        message.header.stamp.sec = number
        self.pictures[number] = picture(number)
        self.camera.publish(message)
        if number % 7 == 0:  # a reply about the picture before the newest
            progress = ReplyProgress()
            progress.header.stamp.sec = number - 1
            self.named.add(number - 1)
            self.progress.publish(progress)
        self.gossip.publish(String(data=f"{number}"))
        self.actions_sent += 1
        self.actions.publish(NavAction(step=self.actions_sent))
        time.sleep(0.02)


def read(path):
    try:
        return open_bag(path)
    except BagError:
        return None


def written(path, actions: int, pictures: int) -> bool:
    """Whether the bag holds more than so many of each."""
    counts = {} if (bag := read(path)) is None else bag.counts
    seen = counts.get("/camera/image_raw/compressed", 0)
    return counts.get("/dsd/nav_action", 0) > actions and seen > pictures


def hearing(rig, topics: set[str]):
    """Returns a function that tells whether the recorder says that it hears all of these."""
    said: list[set[str]] = [set()]

    def look(message: DiagnosticArray) -> None:
        for status in message.status:
            said.extend(set(v.value.split(", ")) for v in status.values if v.key == HEARD)

    rig.node.create_subscription(DiagnosticArray, "/diagnostics", look, 10)
    return lambda: topics <= said[-1] and said[-1]


def steps_in(bag) -> list[int]:
    return [bag.decode(record).step for record in bag.messages([bag.topic("dsd/nav_action")])]


def test_what_is_sent_is_kept_and_a_kill_takes_next_to_nothing(rig, tmp_path):
    stage = Stage(rig)
    rig.node.declare_parameter("camera", "rtsp://operator:hunter2@camera/1")  # as other vendors' nodes have them
    recorder = rig.start("record_node", directory=tmp_path / "bag", camera_hz=1.0, topics="gossip")

    def recorded(topic: str, count: int) -> bool:
        stage.act()
        stage.camera.wait_for_all_acked()  # a lost picture is sent again, but only while it is the newest
        bag = read(tmp_path / "bag") if stage.actions_sent % 10 == 0 else None
        return bag is not None and bag.counts.get(topic, 0) >= count

    hears = hearing(rig, {"camera/image_raw", "dsd/reply_progress", "dsd/nav_action"})
    rig.until(lambda: (stage.act(), hears())[1], what="a recorder that hears")
    since = stage.actions_sent
    rig.until(lambda: recorded("/dsd/nav_action", since + 40), what="actions in the bag")
    rig.until(lambda: recorded("/gossip", 5), what="another topic in the bag")
    rig.until(
        lambda: (
            {"record_node", "rtsp"} <= set(re.findall(r"\w+", open_bag(tmp_path / "bag").custom.get("parameters", "")))
        ),
        what="parameters",
    )
    newest = stage.actions_sent
    rig.until(lambda: steps_in(open_bag(tmp_path / "bag"))[-1] >= newest, what="the last action")
    recorder.process.send_signal(signal.SIGKILL)
    recorder.process.wait()

    bag = open_bag(tmp_path / "bag")
    assert "was not closed" in bag.notes[0] and not bag.whole
    steps = steps_in(bag)
    assert steps == list(range(steps[0], newest + 1)) and steps[0] <= since
    assert bag.counts["/dsd/safety_state"] == 1  # latched: from before the recorder was there
    kept = {}
    for record in bag.messages(["/camera/image_raw/compressed"]):
        message = bag.decode(record)
        kept[message.header.stamp.sec] = message.format.partition(";")[0]
        assert np.array_equal(read_picture(message.data.tobytes()), stage.pictures[message.header.stamp.sec])
    assert all(encoding == ("rgb8" if number % 2 else "bgr8") for number, encoding in kept.items())
    heard = {number for number in stage.named if number > since}
    assert heard and heard <= kept.keys()
    assert len(kept) < len(stage.pictures) / 2
    assert json.loads(bag.custom["versions"])["dsd_ros"]
    (parameters,) = (v for k, v in json.loads(bag.custom["parameters"]).items() if "record" in k)
    assert parameters["camera_hz"] == 1.0
    assert "rtsp://***@camera/1" in bag.custom["parameters"] and "hunter2" not in bag.custom["parameters"]

    recorder = rig.start("record_node", directory=tmp_path / "second")
    rig.until(lambda: (stage.act(), written(tmp_path / "second", 10, 5))[1])
    recorder.process.send_signal(signal.SIGINT)
    assert recorder.process.wait(30) == 0
    second = open_bag(tmp_path / "second")
    assert not second.notes and second.counts["/dsd/nav_action"] > 10
    assert second.counts["/camera/image_raw/compressed"] > 5  # all of them, and not one a second

    taken = rig.start("record_node", directory=tmp_path / "second")
    assert taken.process.wait(60) == 2
    rig.until(lambda: any("exists already" in line for line in rig.lines))
    assert not any("Traceback" in line for line in rig.lines)


def cdr(number: int, side: int = 8) -> bytes:
    message = from_rgb(picture(number, side, side))
    message.header.stamp.sec = number
    return serialize_message(message)


def kept(chosen) -> int | None:
    if chosen is None:
        return None
    return deserialize_message(chosen[1], CompressedImage).header.stamp.sec


def test_nothing_is_missed_from_when_it_says_that_it_hears(rig, tmp_path):
    stage = Stage(rig)
    hears = hearing(rig, {"camera/image_raw", "dsd/reply_progress", "dsd/nav_action", "dsd/safety_state"})
    foreign = rig.node.create_publisher(String, "odom", 10)  # of another type
    rig.host("record_node", directory=tmp_path / "bag")
    rig.until(hears, what="a recorder that hears")
    assert not hears() & {"dsd/draft", "odom"}  # those have no publisher
    foreign.publish(String())
    for _ in range(20):
        stage.act()
    rig.until(lambda: written(tmp_path / "bag", 19, 5), what="actions in the bag")
    assert steps_in(read(tmp_path / "bag")) == list(range(1, 21))


def test_messages_that_were_left_out_fail_the_process(rig, tmp_path):
    stage = Stage(rig)
    recorder = rig.start("record_node", directory=tmp_path / "bag", queue_mb=1)
    huge = from_rgb(picture(1, 500, 500))  # more than pictures may take of a queue of 1 MB
    rig.until(lambda: (stage.act(), written(tmp_path / "bag", 10, 5))[1], what="a bag")
    rig.until(
        lambda: (
            stage.camera.publish(huge),
            time.sleep(0.1),
            any("left out: they came faster" in line for line in rig.lines),
        )[2],
        what="a loss",
    )
    recorder.process.send_signal(signal.SIGINT)
    assert recorder.process.wait(30) == 1
    rig.until(lambda: any("The bag is not whole: " in line for line in rig.lines), what="the loss as the last word")
    assert any("left out of" in line for line in rig.lines)
    assert open_bag(tmp_path / "bag").whole


def test_a_recorder_writes_what_waits_before_it_ends(rig, tmp_path, monkeypatch):
    write = BagWriter.write
    monkeypatch.setattr(BagWriter, "write", lambda *given: (time.sleep(0.02), write(*given))[1])  # a busy machine
    node = RecordNode({"directory": str(tmp_path / "bag")})
    for step in range(60):
        node._put(
            "dsd/nav_action", "/dsd/nav_action", "dsd_msgs/msg/NavAction", [], serialize_message(NavAction(step=step))
        )
    sender = rig.node.create_publisher(NavAction, "dsd/nav_action", qos.STATE)
    rig.until(lambda: sender.get_subscription_count() == 1)
    sender.publish(NavAction(step=60))
    assert sender.wait_for_all_acked()  # it has come, but nobody spins the recorder
    node.close()
    node.destroy_node()
    assert node.failure is None
    assert open_bag(tmp_path / "bag").whole and steps_in(read(tmp_path / "bag")) == list(range(61))


# In a mount namespace of its own: a file system of 6 MB, and a recorder that is interrupted after a line on stdin.
SMALL_DISK = """
mount -t tmpfs -o size=6m none "$1" || exit 77
"$2" -m dsd_ros.ros.entry record_node --ros-args -p directory:="$1/bag" &
node=$!
read line
kill -INT $node; wait $node; code=$?
cp -r "$1/bag" "$3"
exit $code
"""


def test_a_disk_that_is_really_full_leaves_a_readable_bag_and_a_sentence(rig, tmp_path):
    (tmp_path / "disk").mkdir()
    places = [str(tmp_path / "disk"), sys.executable, str(tmp_path / "bag")]
    command = ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c", SMALL_DISK, "sh", *places]
    if shutil.which("unshare") is None:
        pytest.skip("util-linux is not installed here")
    stage, reports = Stage(rig), [""]

    def look(message: DiagnosticArray) -> None:
        reports.extend(status.message for status in message.status if status.name == "record_node")

    rig.node.create_subscription(DiagnosticArray, "/diagnostics", look, 10)
    large = from_rgb(picture(1, 300, 300))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        full = "cannot be written any further: No space left on device. It can be read up to here."
        try:
            rig.until(
                lambda: (stage.act(), stage.camera.publish(large), process.poll() is not None or full in reports[-1])[
                    2
                ],
                what="a full disk",
            )
            _, told = process.communicate("enough\n", timeout=60.0)
        finally:
            process.kill()
    if process.returncode == 77:
        pytest.skip("no file system may be mounted here")
    assert process.returncode == 1 and f"The bag is not whole: The bag {places[0]}/bag {full}" in told, told
    bag = open_bag(tmp_path / "bag")
    assert not bag.whole and bag.counts["/camera/image_raw/compressed"] >= 5 and steps_in(bag)
    assert sum(file.stat().st_size for file in (tmp_path / "bag").iterdir()) > 2 << 20


def test_a_session_opened_before_the_recorder_was_discovered_is_kept(rig, tmp_path):
    verifier = VerifierTopics(rig.node, lambda _: None, TopicSet({}, {wire.SessionReply: "dsd/session_reply"}))
    verifier.publish(wire.SessionReply(1, 7, "", "big", "f", 512))
    try:
        rig.host("record_node", directory=tmp_path / "bag")
        rig.until(lambda: (bag := read(tmp_path / "bag")) and "/dsd/session_reply" in bag.counts, what="the session")
    finally:
        verifier.close()
    bag = open_bag(tmp_path / "bag")
    (record,) = bag.messages(["/dsd/session_reply"])
    assert bag.decode(record).target_fingerprint == "f"


def test_pictures_are_chosen_by_time_and_by_what_replies_are_about():
    second = 1_000_000_000
    pictures = PictureSelector(1.0)
    chosen = [kept(pictures.take(cdr(n), n * second // 10)) for n in range(1, 31)]
    assert [n for n in chosen if n] == [1, 11, 21]
    assert kept(pictures.named(15 * second)) == 15
    assert pictures.named(15 * second) is None and pictures.named(11 * second) is None  # kept already
    assert pictures.named(31 * second) is None  # not here yet
    assert kept(pictures.take(cdr(31), 3_100_000_000)) == 31
    assert all(kept(PictureSelector(0.0).take(cdr(n), n)) == n for n in range(1, 5))


def test_what_is_held_of_pictures_is_bounded(monkeypatch):
    monkeypatch.setattr(record_pictures, "_HELD_BYTES", 100_000)
    pictures = PictureSelector(0.001)
    for number in range(1, 200):
        pictures.take(cdr(number, 40), number)
    assert pictures.named(150_000_000_000) is None
    assert kept(pictures.named(199_000_000_000)) == 199
    assert sum(len(item[2]) for item in pictures._held) <= 100_000
