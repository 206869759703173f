# SPDX-License-Identifier: Apache-2.0
"""Records a run into a bag: everything needed to inspect and to replay it.

Messages are received as raw CDR and written unchanged, with their types' definitions. Only raw pictures of the camera
are compressed, losslessly, as PNG. A thread of its own writes, and saves every half second.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.callback_groups import CallbackGroup, MutuallyExclusiveCallbackGroup
from rclpy.exceptions import InvalidHandle
from rclpy.node import Node
from rclpy.parameter import Parameter, parameter_value_to_python
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message

from dsd_msgs.msg import ReplyProgress
from dsd_ros import __version__
from dsd_ros.observe.bag.writer import BagWriter, RecordError
from dsd_ros.observe.ros.bag_pictures import PictureSelector
from dsd_ros.observe.ros.message_types import TypeUnknown, definition, message_class
from dsd_ros.paths import user_path
from dsd_ros.ros import health
from dsd_ros.ros.camera import CAMERA, CameraTopic
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.record_topics import PICTURE_TYPE, PICTURES, TOPICS, WHERE_THERE, as_recorded, profile
from dsd_ros.ros.running import RCLError, RunnableNode, StartError, run_main, steady_timer
from dsd_ros.ros.settings import RecordNodeSettings
from dsd_ros.shown import counted, machine, masked

_SAVE_S = 0.5
_LOOK_S = 1.0  # between checks for new publishers
_CLOSE_S = 9.0  # `ros2 launch` kills a process 10 s after SIGINT
_TOO_FAST = "they came faster than this machine wrote them"
_OVERHEAD = 200  # bytes that a queued message takes beyond its payload
_ASK_AGAIN = 5  # checks between two questions to a node that did not answer
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "mujoco", "opencv-python-headless", "rosbags")


class RecordNode(RunnableNode):
    """See the module. Only the writer's thread uses the bag."""

    close_s = _CLOSE_S + 0.5

    def __init__(self, given: dict[str, Any] | None = None) -> None:
        """:param given: parameters in addition to those of the command line."""
        overrides = [Parameter(name, value=value) for name, value in (given or {}).items()]
        super().__init__("record_node", parameter_overrides=overrides)
        self._settings = declare(self, RecordNodeSettings, adopt=self._adopt)
        if not self._settings.directory:
            raise StartError("The parameter 'directory' is empty: name a folder for the bag.")
        self._pictures = PictureSelector(self._settings.camera_hz)
        self._lock = threading.Lock()
        self._waiting = self.dropped = 0
        self.bag: BagWriter | None = None
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._listening: dict[str, tuple[Any, QoSProfile]] = {}
        self._camera = CameraTopic(self, self._settings.image_transport)
        self._kinds = TOPICS | {CAMERA: self._camera.type_name}
        self._extra = self._further_topics()  # before anything is written: a wrong name is refused
        self._unknown: set[str] = set()
        self.loss = ""  # what the bag lacks, as a sentence
        # Topics whose publishers were all matched at the last check; and at the last two checks, so that the publishers
        # have had time to match as well.
        self._matched: set[str] = set()
        self._heard: list[str] = []
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
            self._subscribe(name, profile(name))
        self._timer = steady_timer(self, _LOOK_S, self._look, self._group)

    def _adopt(self, settings: RecordNodeSettings) -> None:
        self._settings = settings
        self._pictures.rate = settings.camera_hz

    def close(self) -> None:
        """Write everything that has come, and close the bag; the process fails when the bag lacks something."""
        self._timer.cancel()  # it replaces subscriptions
        for subscription, qos in list(self._listening.values()):
            with contextlib.suppress(InvalidHandle), subscription.handle:
                for _ in range(qos.depth):  # what has come, and had no turn on a busy machine
                    taken = subscription.handle.take_message(subscription.msg_type, True)
                    if taken is None:
                        break
                    subscription.callback(taken[0])
        if self.executor is None:
            self._queue.put(None)
        else:  # which may have taken a message by now: it is heard before the end
            self.executor.create_task(self._queue.put, None)
        self._thread.join(timeout=_CLOSE_S)
        if self._thread.is_alive():
            left = counted(self._queue.qsize(), "message")
            self.loss = f"{self._settings.directory} was not closed within {_CLOSE_S:.0f} s; {left} not written yet."
        if self.loss:
            self.failure = f"The bag is not whole: {self.loss}"

    def _further_topics(self) -> list[str]:
        """Topics besides TOPICS, each once, whatever form its name has.

        :raises StartError: for a name that ROS does not accept.
        """
        further = {self.resolve_topic_name(name): name for name in WHERE_THERE}
        for name in filter(None, map(str.strip, self._settings.topics.split(","))):
            try:
                further.setdefault(self.resolve_topic_name(name), name)
            except RCLError as error:
                reason = str(error).removeprefix("failed to resolve name: ").partition(", at ")[0]
                raise StartError(f"The topic {name!r} cannot be recorded: {reason}. Correct its name.") from None
        known = {self.resolve_topic_name(name) for name in (*TOPICS, PICTURES)}
        return [name for full, name in further.items() if full not in known]

    # -- subscriptions -------------------------------------------------------------------------

    def _subscribe(self, name: str, qos: QoSProfile) -> None:
        """Subscribe to a topic, in place of a subscription with another profile."""
        old = self._listening.get(name)
        if old is not None:
            self.destroy_subscription(old[0])
        kind, topic, recorded = self._kinds[name], self._topic(name), [as_recorded(qos)]
        kept = self.resolve_topic_name(PICTURES) if name == CAMERA else topic

        def receive(payload: bytes) -> None:
            self._put(name, kept, kind, recorded, payload)

        made = self.create_subscription(message_class(kind), topic, receive, qos, callback_group=self._group, raw=True)
        self._listening[name] = made, qos

    def _topic(self, name: str) -> str:
        """The topic to subscribe to."""
        return self._camera.name if name == CAMERA else self.resolve_topic_name(name)

    def _look(self) -> None:
        """Look for new publishers: of optional topics, or with another quality of service."""
        self._facts.look()
        matched = set()
        if self._camera.look():
            self._kinds[CAMERA] = self._camera.type_name
            self._subscribe(CAMERA, profile(CAMERA))
        for name in (*TOPICS, *self._extra):
            offers = self.get_publishers_info_by_topic(self._topic(name))
            if not offers or name in self._unknown:
                continue
            self._kinds.setdefault(name, offers[0].topic_type)
            wanted = profile(name, [offer.qos_profile for offer in offers])
            known = self._listening.get(name)
            if known is not None and known[1] == wanted:
                ours = [offer for offer in offers if offer.topic_type == self._kinds[name]]
                if 0 < len(ours) <= known[0].get_publisher_count():
                    matched.add(name)
                continue
            try:
                definition(self._kinds[name])
                self._subscribe(name, wanted)
            except (TypeUnknown, RCLError, RuntimeError, ValueError) as error:  # loses this topic, and no other
                self._unknown.add(name)
                self.loss = f"{name} is not recorded: {error}"
                self.get_logger().warning(self.loss)
        self._heard, self._matched = sorted(matched & self._matched), matched

    def _put(self, name: str, topic: str, kind: str, qos: list[Any], payload: bytes) -> None:
        size = len(payload) + _OVERHEAD
        with self._lock:
            # Pictures fill the queue; leave room for the messages about them.
            room = self._settings.queue_mb << 20
            if self._waiting + size > (room // 2 if name == CAMERA else room):
                self.dropped += 1
                return
            self._waiting += size
        self._queue.put((name, topic, kind, qos, time.time_ns(), payload))

    # -- the writer's thread -------------------------------------------------------------------

    def _write(self, started: queue.SimpleQueue[str]) -> None:
        try:
            bag = self.bag = BagWriter(user_path(self._settings.directory), definition)
            bag.set_metadata("versions", json.dumps(versions()))
            settings = {"camera_hz": self._settings.camera_hz, "camera": "raw as png, compressed unchanged"}
            bag.set_metadata("recording", json.dumps(settings))
        except ValueError as error:
            started.put(str(error))
            return
        started.put("")
        try:
            self._write_all(bag)
        except Exception as error:  # a full disk; a defect
            # The run does not end with its recording: the node goes on, and reports that it records nothing.
            self.loss = str(error)
            self._health.report(health.ERROR, self.loss)
            with contextlib.suppress(RecordError):
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
            self.loss = f"{counted(self.dropped, 'message')} left out of {self._settings.directory}: {_TOO_FAST}."
            bag.set_metadata("dropped", str(self.dropped))
        bag.close()

    def _write_one(
        self, bag: BagWriter, name: str, topic: str, kind: str, qos: list[Any], at: int, data: bytes
    ) -> None:
        with self._lock:
            self._waiting -= len(data) + _OVERHEAD
        if name == CAMERA:
            self._write_picture(bag, topic, qos, lambda: self._pictures.take(data, at, kind == PICTURE_TYPE))
            return
        if name == "dsd/reply_progress" and self._settings.camera_hz > 0.0:
            pictures = self.resolve_topic_name(PICTURES)
            known = self._listening[CAMERA][1]
            self._write_picture(bag, pictures, [as_recorded(known)], lambda: self._pictures.named(_picture_of(data)))
        bag.write(topic, kind, qos, at, data)

    def _write_picture(self, bag: BagWriter, topic: str, qos: list[Any], choose: Any) -> None:
        try:
            chosen = choose()
        except (ValueError, IndexError, RuntimeError) as error:  # ImageMessageError; damaged messages
            self.get_logger().warning(f"a picture is left out: {error!s:.200}", throttle_duration_sec=10.0)
            return
        if chosen is not None:
            bag.write(topic, PICTURE_TYPE, qos, *chosen)

    def _report(self, bag: BagWriter) -> None:
        figures = {"messages": sum(bag.counts.values()), "left out": self.dropped, health.HEARD: ", ".join(self._heard)}
        level, sentence = health.OK, f"recording into {self._settings.directory}"
        if self.dropped:
            level, sentence = health.WARN, f"{counted(self.dropped, 'message')} left out: {_TOO_FAST}"
        self._health.report(level, sentence, figures)


def _picture_of(progress: bytes) -> int:
    """The stamp (ns) of the picture that a serialized ReplyProgress is about."""
    stamp = deserialize_message(progress, ReplyProgress).header.stamp
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def versions() -> dict[str, str]:
    """Versions of this package, Python, ROS, and the packages that affect a decode."""
    found = {"dsd_ros": __version__, "python": platform.python_version(), "machine": machine()}
    found["ros_distro"] = os.environ.get("ROS_DISTRO", "jazzy (wheels)")
    found["rmw"] = os.environ.get("RMW_IMPLEMENTATION", "default")
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class ParameterCollector:
    """Asks every node of the namespace for its parameters, once; calls ``on_news`` with JSON after each answer."""

    def __init__(self, node: Node, group: CallbackGroup, on_news: Callable[[str], None]) -> None:
        self._node, self._group, self._on_news = node, group, on_news
        self._found: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, int] = {}  # checks since
        self._clients: dict[str, list[Any]] = {}

    def look(self) -> None:
        """Ask new nodes. Call it periodically, in ``group``."""
        for name, namespace in self._node.get_node_names_and_namespaces():
            full = f"{namespace.rstrip('/')}/{name}"
            if namespace != self._node.get_namespace() or full in self._found:
                continue
            self._asked[full] = self._asked.get(full, _ASK_AGAIN) + 1
            if self._asked[full] > _ASK_AGAIN:
                self._asked[full] = 0
                self._ask(full)

    def _ask(self, name: str) -> None:
        self._forget(name)
        listing = self._client(name, ListParameters, "list_parameters")
        getting = self._client(name, GetParameters, "get_parameters")
        if not (listing.service_is_ready() and getting.service_is_ready()):
            self._forget(name)  # a node without parameter services, or not ready yet
            return

        def got(names: list[str], future: Any) -> None:
            answer = future.result()
            if answer is not None:
                values = [parameter_value_to_python(value) for value in answer.values]
                self._found[name] = dict(sorted(zip(names, map(_plain, values), strict=True)))
                self._on_news(json.dumps(self._found, sort_keys=True))
            self._forget(name)

        def listed(future: Any) -> None:
            answer = future.result()
            if answer is not None:
                names = list(answer.result.names)
                call = getting.call_async(GetParameters.Request(names=names))
                call.add_done_callback(lambda done: got(names, done))

        listing.call_async(ListParameters.Request()).add_done_callback(listed)

    def _client(self, name: str, kind: type, service: str) -> Any:
        client = self._node.create_client(kind, f"{name}/{service}", callback_group=self._group)
        self._clients.setdefault(name, []).append(client)
        return client

    def _forget(self, name: str) -> None:
        for client in self._clients.pop(name, []):
            self._node.destroy_client(client)


def _plain(value: Any) -> Any:
    """A parameter's value for the bag, without the passwords of URLs: other nodes have cameras and the like."""
    if hasattr(value, "tolist") or isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return masked(value) if isinstance(value, str) else value


def main() -> None:
    run_main(RecordNode)
