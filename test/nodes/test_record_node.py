"""The recorder beside real publishers: what it keeps is what was sent, to the bit, and a kill takes next to nothing."""

from __future__ import annotations

import json
import signal
import time

import numpy as np
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_rig import picture
from sensor_msgs.msg import Image
from std_msgs.msg import String

from dsd_msgs.msg import NavAction, ReplyProgress, SafetyState
from dsd_ros.evaluation.bag_reader import BagError, open_bag
from dsd_ros.nodes import qos
from dsd_ros.nodes.images import from_rgb, to_rgb
from dsd_ros.nodes.record_pictures import from_png


class Stage:
    """Publishes what a robot would: a latched state, pictures, and now and then a reply about one."""

    def __init__(self, rig) -> None:
        self.node = rig.node
        self.camera = rig.node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self.progress = rig.node.create_publisher(ReplyProgress, "reply_progress", qos.STATE)
        self.actions = rig.node.create_publisher(NavAction, "nav_action", qos.STATE)
        state = rig.node.create_publisher(SafetyState, "safety_state", qos.LATCHED)
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


def steps_in(bag) -> list[int]:
    return [bag.decode(record).step for record in bag.messages([bag.topic("nav_action")])]


def test_what_is_sent_is_kept_and_a_kill_takes_next_to_nothing(rig, tmp_path):
    stage = Stage(rig)
    recorder = rig.start("record_node", directory=tmp_path / "bag", camera_hz=1.0, topics="gossip")

    def recorded(topic: str, count: int) -> bool:
        stage.act()
        bag = read(tmp_path / "bag") if stage.actions_sent % 10 == 0 else None
        return bag is not None and bag.counts.get(topic, 0) >= count

    rig.until(lambda: recorded("/nav_action", 40), what="actions in the bag")
    rig.until(lambda: recorded("/gossip", 5), what="another topic in the bag")
    rig.until(lambda: "parameters" in open_bag(tmp_path / "bag").custom, what="parameters")
    newest = stage.actions_sent
    rig.until(lambda: steps_in(open_bag(tmp_path / "bag"))[-1] >= newest, what="the last action")
    recorder.process.send_signal(signal.SIGKILL)
    recorder.process.wait()

    bag = open_bag(tmp_path / "bag")
    assert "was not closed" in bag.notes[0]
    steps = steps_in(bag)
    assert steps == list(range(steps[0], newest + 1))
    assert bag.counts["/safety_state"] == 1  # latched: from before the recorder was there
    kept = {}
    for record in bag.messages(["/camera/image_raw/compressed"]):
        message = bag.decode(record)
        image = from_png(message.data.tobytes(), message.format)
        kept[message.header.stamp.sec] = image.encoding
        assert np.array_equal(to_rgb(image), stage.pictures[message.header.stamp.sec])
    assert all(encoding == ("rgb8" if number % 2 else "bgr8") for number, encoding in kept.items())
    heard = {number for number in stage.named if number > steps[0] + 10}
    assert heard and heard <= kept.keys()
    assert len(kept) < len(stage.pictures) / 2
    assert json.loads(bag.custom["versions"])["dsd_ros"]
    (parameters,) = (v for k, v in json.loads(bag.custom["parameters"]).items() if "record" in k)
    assert parameters["camera_hz"] == 1.0

    recorder = rig.start("record_node", directory=tmp_path / "second", storage="sqlite3")
    rig.until(lambda: (stage.act(), (tmp_path / "second" / "metadata.yaml").exists())[1])
    first = stage.actions_sent
    rig.until(lambda: (stage.act(), rig.node.count_subscribers("nav_action"))[1])
    rig.until(lambda: (stage.act(), stage.actions_sent > first + 60)[1])
    recorder.process.send_signal(signal.SIGINT)
    assert recorder.process.wait(30) == 0
    second = open_bag(tmp_path / "second")
    assert not second.notes and second.counts["/nav_action"] > 10
    assert second.counts["/camera/image_raw/compressed"] > 5  # all of them, and not one a second

    taken = rig.start("record_node", directory=tmp_path / "second")
    assert taken.process.wait(60) == 2
    rig.until(lambda: any("is there already" in line for line in rig.lines))
    assert not any("Traceback" in line for line in rig.lines)
