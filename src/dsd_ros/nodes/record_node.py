"""Records a run into a bag: everything needed to look at it, and to replay it.

Messages are taken as raw CDR and written as they came, with their types' definitions; only the camera's pictures
are compressed, as PNG, which loses nothing. A thread writes, and saves every half second.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message

from dsd_msgs.msg import ReplyProgress
from dsd_ros.nodes.record_facts import ParameterCollector, versions
from dsd_ros.nodes.record_types import TypeUnknown, definition, message_class
from dsd_ros.observe.bag.writer import BagWriter, RecordError
from dsd_ros.observe.ros.bag_pictures import Pictures
from dsd_ros.ros import health
from dsd_ros.ros.images import ImageError
from dsd_ros.ros.parameters import declare, refuse_unknown
from dsd_ros.ros.record_topics import (
    CAMERA,
    PICTURE_TYPE,
    PICTURES,
    TOPICS,
    WHERE_THERE,
    as_recorded,
    first_profile,
    fitting_profile,
)
from dsd_ros.ros.running import StartError
from dsd_ros.ros.running import main as run_main
from dsd_ros.ros.settings import RecordNodeSettings

_SAVE_S = 0.5
_LOOK_S = 1.0  # between two looks at who publishes
_CLOSE_S = 0.7


class RecordNode(Node):
    """See the module. Only the writer's thread touches the bag."""

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        """``given``: parameters beside those of the command line."""
        overrides = [Parameter(name, value=value) for name, value in (given or {}).items()]
        super().__init__("record_node", parameter_overrides=overrides)
        self.failure: str | None = None
        self._settings = declare(self, RecordNodeSettings)
        refuse_unknown(self)
        if not self._settings.directory:
            raise StartError("The parameter 'directory' is empty: name a folder for the bag.")
        self._pictures = Pictures(self._settings.camera_hz)
        self._room = self._settings.queue_mb << 20
        self._lock = threading.Lock()
        self._waiting = self.dropped = 0
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._listening: dict[str, tuple[Any, QoSProfile]] = {}
        self._kinds = dict(TOPICS)
        self._extra = [*WHERE_THERE, *filter(None, map(str.strip, self._settings.topics.split(",")))]
        self._unknown: set[str] = set()
        # Topics of which every publisher is matched at the last look; and at the last two, so that the publishers
        # have had time to find out, too.
        self._matched: set[str] = set()
        self._heard: list[str] = []
        self._stop = threading.Event()
        self._health = health.Health(self)
        started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, args=(started,), name="bag writer", daemon=True)
        self._thread.start()
        refusal = started.get()
        if refusal:
            raise StartError(refusal)
        self._group = MutuallyExclusiveCallbackGroup()
        self._facts = ParameterCollector(self, self._group, lambda text: self._queue.put(("parameters", text)))
        for name in TOPICS:
            self._subscribe(name, first_profile(name))
        self._timer = self.create_timer(_LOOK_S, self._look, self._group, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self.get_logger().info(f"recording into {self._settings.directory}")

    def close(self) -> None:
        """End the bag with all that has come."""
        self._stop.set()
        self._queue.put(None)
        self._thread.join(timeout=_CLOSE_S)

    # -- subscriptions -------------------------------------------------------------------------

    def _subscribe(self, name: str, qos: QoSProfile) -> None:
        """Listen to a topic, anew if it is listened to in another way."""
        old = self._listening.get(name)
        if old is not None:
            self.destroy_subscription(old[0])
        kind = self._kinds[name]
        topic = self.resolve_topic_name(name)
        kept = self.resolve_topic_name(PICTURES) if name == CAMERA else topic
        recorded = [as_recorded(qos)]

        def receive(payload: bytes) -> None:
            self._put(name, kept, kind, recorded, payload)

        made = self.create_subscription(message_class(kind), name, receive, qos, callback_group=self._group, raw=True)
        self._listening[name] = made, qos

    def _look(self) -> None:
        """Find publishers that have come: of topics that may be there, and with another quality of service."""
        matched = set()
        for name in (*TOPICS, *self._extra):
            offers = self.get_publishers_info_by_topic(self.resolve_topic_name(name))
            if not offers or name in self._unknown:
                continue
            self._kinds.setdefault(name, offers[0].topic_type)
            wanted = fitting_profile(name, [offer.qos_profile for offer in offers])
            known = self._listening.get(name)
            if known is not None and known[1] == wanted:
                ours = [offer for offer in offers if offer.topic_type == self._kinds[name]]
                if 0 < len(ours) <= known[0].get_publisher_count():
                    matched.add(name)
                continue
            try:
                definition(self._kinds[name])
                self._subscribe(name, wanted)
            except TypeUnknown as error:
                self._unknown.add(name)
                self.get_logger().warning(f"{name} is not recorded: {error}")
        self._heard, self._matched = sorted(matched & self._matched), matched
        self._facts.look()

    def _put(self, name: str, topic: str, kind: str, qos: list[Any], payload: bytes) -> None:
        size = len(payload) + 200
        with self._lock:
            # Pictures are what fills the room; what is said about them shall have some left.
            if self._waiting + size > (self._room // 2 if name == CAMERA else self._room):
                self.dropped += 1
                return
            self._waiting += size
        self._queue.put((name, topic, kind, qos, time.time_ns(), payload))

    # -- the writer's thread -------------------------------------------------------------------

    def _write(self, started: queue.SimpleQueue[str]) -> None:
        try:
            bag = BagWriter(Path(self._settings.directory), definition, self._settings.storage)
            bag.set_metadata("versions", json.dumps(versions()))
            settings = {"camera_hz": self._settings.camera_hz, "camera": "png, without loss"}
            bag.set_metadata("recording", json.dumps(settings))
        except (RecordError, OSError) as error:
            started.put(str(error))
            return
        started.put("")
        try:
            self._write_all(bag)
        except Exception as error:  # a full disk; a defect
            # The robot's run does not end with its recording: the node goes on, and says that it records nothing.
            self._health.report(health.ERROR, str(error))
            bag.close()
            while self._queue.get() is not None:
                continue

    def _write_all(self, bag: BagWriter) -> None:
        saved = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=_SAVE_S / 2)
            except queue.Empty:
                item = ("", "")
            if item is None:
                break
            if item[0] == "parameters":
                bag.set_metadata("parameters", item[1])
            elif item[0]:
                self._write_one(bag, *item)
            if time.monotonic() - saved > _SAVE_S:
                bag.save()
                saved = time.monotonic()
                self._report(bag)
        if self.dropped:
            bag.set_metadata("dropped", str(self.dropped))
        bag.close()

    def _write_one(
        self, bag: BagWriter, name: str, topic: str, kind: str, qos: list[Any], at: int, data: bytes
    ) -> None:
        with self._lock:
            self._waiting -= len(data) + 200
        if name == CAMERA:
            self._write_picture(bag, topic, qos, lambda: self._pictures.take(data, at))
            return
        if name == "reply_progress" and self._settings.camera_hz > 0.0:
            stamp = deserialize_message(data, ReplyProgress).header.stamp
            pictures = self.resolve_topic_name(PICTURES)
            known = self._listening[CAMERA][1]
            number = stamp.sec * 1_000_000_000 + stamp.nanosec
            self._write_picture(bag, pictures, [as_recorded(known)], lambda: self._pictures.named(number))
        bag.write(topic, kind, qos, at, data)

    def _write_picture(self, bag: BagWriter, topic: str, qos: list[Any], choose: Any) -> None:
        try:
            chosen = choose()
        except ImageError as error:
            self.get_logger().warning(f"a picture is left out: {error}", throttle_duration_sec=10.0)
            return
        if chosen is not None:
            bag.write(topic, PICTURE_TYPE, qos, *chosen)

    def _report(self, bag: BagWriter) -> None:
        figures = {"messages": bag.messages, "left out": self.dropped, health.HEARD: ", ".join(self._heard)}
        if self.dropped:
            sentence = f"{self.dropped} messages left out: the disk is too slow"
            self._health.report(health.WARN, sentence, figures)
        else:
            self._health.report(health.OK, f"recording into {self._settings.directory}", figures)


def main() -> None:
    run_main(RecordNode)
