# SPDX-License-Identifier: Apache-2.0
"""Collect what the views show from the topics of a running system."""

from __future__ import annotations

import contextlib
import math
import re
import struct
import time
from collections import deque
from dataclasses import fields, replace
from typing import Any

from builtin_interfaces.msg import Duration
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.serialization import deserialize_message

from dsd_msgs.msg import DecodeStats, MemoryAnswer, NavAction, ReplyProgress, RoundStats, SafetyState
from dsd_ros.navigation.run.actions import ANY, Action, action_of, format_action
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.observe.view.events import memory_event, stats_event, step_event
from dsd_ros.observe.view.figures import Figures, ReplyFigures
from dsd_ros.observe.view.state import Overlay, Pose, Round, ShownMemory, ShownReply, ShownStep, Walk
from dsd_ros.ros import qos
from dsd_ros.ros.camera import LOOK_S, CameraTopic
from dsd_ros.ros.images import RawImage, read_image, read_pose
from dsd_ros.ros.polled import Polled, take, take_raw
from dsd_ros.ros.settings import CameraSettings
from dsd_ros.ros.stamps import seconds
from dsd_ros.shown import seconds_name

LINK_NODES = ("draft_node", "bridge_node")
_NAVIGATION = "navigation_node"
_HEARD_NAMES = tuple(name.encode() for name in (*LINK_NODES, _NAVIGATION))
_END = re.compile(r"([A-Z][A-Z_]+): (.*)", re.DOTALL)  # outcome of a goal in the navigation node's diagnostics
_SILENT_S = 4.0  # a node that publishes its diagnostics every second and is silent for this long has ended
_GONE = "{} is silent: its session is closed, or the connection to it is lost"
_NEWS = 4096
_CAUSES = {cause.value: cause.name for cause in Cause}
_POLL_S = 0.19  # minimum interval between two polls of everything but pictures; people read no faster
_DEAF_S = 3.0  # resubscribe to a camera that is silent for this long


class Live:
    """The current state of a robot and its decoder. Call :meth:`poll` for every frame drawn.

    :param image_transport: raw, compressed or auto, as for CameraTopic.
    """

    def __init__(self, node: Node, image_transport: str = CameraSettings.image_transport) -> None:
        self._subscriptions = subscriptions = Polled(node)
        # Best effort: acknowledging odometry would wake both sides 50 times a second.
        self._odometry = subscriptions.subscribe(Odometry, "odom", qos.SENSOR)
        self._progress = subscriptions.subscribe(ReplyProgress, "dsd/reply_progress", qos.LINK)
        self._stats = subscriptions.subscribe(DecodeStats, "dsd/decode_stats", qos.STATE)
        self._actions = subscriptions.subscribe(NavAction, "dsd/nav_action", qos.STATE)
        self._safety = subscriptions.subscribe(SafetyState, "dsd/safety_state", qos.LATCHED)
        self._memory = subscriptions.subscribe(MemoryAnswer, "dsd/memory_answer", qos.LATCHED)
        self._health = subscriptions.subscribe(DiagnosticArray, "/diagnostics", qos.STATE)
        self._topic, self._looked = CameraTopic(node, image_transport), float("-inf")
        self._camera: object = None
        self._polled = float("-inf")
        self._heard = 0.0  # when the last picture arrived, monotonic s
        self.overlay = Overlay()
        self.figures = Figures()
        self.walk = Walk()
        self.steps: list[ShownStep] = []
        self.pose: Pose | None = None
        self.frame = "odom"  # frame_id of the odometry
        self.replies = self.rounds = self.runs = 0  # numbers of complete ones
        # What happened since a view took it, oldest first, as (kind, value): "reply" (number, ShownReply), and "stats",
        # "step", "memory", "hold", "link" and "end" as the page's events. Views that do not ask lose the oldest.
        self.news: deque[tuple[str, Any]] = deque(maxlen=_NEWS)
        self.begun = 0  # number of replies begun
        self.heard = 0.0  # when anything came last, monotonic s
        self._space = node.get_namespace().strip("/")
        self._links: dict[str, tuple[bytes, str, float]] = {}
        self._last: dict[str, Any] = {}

    def close(self) -> None:
        self._subscriptions.close()

    def poll(self) -> None:
        """Process the messages since the last call, at most every _POLL_S."""
        now = time.monotonic()
        if now - self._polled < _POLL_S:
            return
        self._polled = now
        for sent in take_raw(self._odometry):
            self.heard = now
            self._on_odometry(sent)
        for memory in take(self._memory):
            self.overlay = replace(self.overlay, memory=ShownMemory.of(memory))
            self._report("memory", memory_event(self.overlay.memory))
        for progress in take(self._progress):
            self._on_progress(progress)
        for stats in take(self._stats):
            self._on_stats(stats)
        for action in take(self._actions):
            self._on_action(action)
        for safety in take(self._safety):
            self._on_safety(safety)
        for sent in take_raw(self._health):
            if any(name in sent for name in _HEARD_NAMES):  # most are from other nodes
                self.heard = now
                self._on_health(sent, now)
        self._show_link(now)

    def picture(self) -> RawImage | None:
        """The newest picture since the last call, if any. Subscribes to the camera on the first call."""
        now = time.monotonic()
        other = False
        if now - self._looked >= LOOK_S:
            self._looked, other = now, self._topic.look()
        if self._camera is not None and (other or now - self._heard > _DEAF_S):
            self.rest_camera()  # a best-effort reader can stall when a sender dies in mid-picture
        if self._camera is None:
            self._camera = self._subscriptions.subscribe(self._topic.kind, self._topic.name, self._topic.profile)
            self._heard = now
        pictures = take_raw(self._camera)
        if not pictures:
            return None
        self._heard = self.heard = now
        return read_image(pictures[-1], self._topic.kind)

    def rest_camera(self) -> None:
        """Unsubscribe from the camera until the next call of :meth:`picture`."""
        if self._camera is not None:
            self._subscriptions.unsubscribe(self._camera)
            self._camera = None

    def _on_odometry(self, sent: bytes) -> None:
        with contextlib.suppress(struct.error, RuntimeError, OdometryError):  # damaged
            self.pose, self.frame = read_pose(sent)
            self.walk.add(self.pose)

    def _on_progress(self, message: ReplyProgress) -> None:
        picture = seconds(message.header.stamp)
        reply = self.overlay.reply
        fresh = picture != reply.picture or (reply.done and not message.done)
        if fresh:
            reply = ShownReply(message.instruction, picture=picture, mode=message.mode)
            self.begun += 1
        if not message.done or fresh:
            reply = reply.with_round(round_from(message.last_round))
            self.rounds += 1
        reply = replace(reply, text=message.text, done=message.done)
        self.overlay = replace(self.overlay, reply=reply)
        if reply.done:
            self.news.append(("reply", (self.begun, reply)))

    def _on_stats(self, message: DecodeStats) -> None:
        newest = reply_figures(message)
        self.figures.add_reply(newest)
        self.replies += 1
        self.news.append(("stats", stats_event(self.figures)))
        self.overlay = replace(self.overlay, newest=newest)

    def _on_action(self, message: NavAction) -> None:
        step = step_from(message, self.pose or (0.0, 0.0, 0.0))
        if step.number <= 1:
            self.runs += 1
            self.steps.clear()
            self.walk = Walk(changes=self.walk.changes + 1)
        self.steps.append(step)
        self.news.append(("step", step_event(step)))
        self.figures.add_step(seconds(message.step_time))
        self.overlay = replace(self.overlay, action=step.phrase, verified=step.verified)

    def _on_safety(self, message: SafetyState) -> None:
        self.overlay = replace(self.overlay, causes=tuple(message.sentences), stopped=message.stopped)
        names = [_CAUSES.get(int(cause), f"CAUSE_{cause}") for cause in message.causes]
        held = bool(message.stopped) and bool(names) and names != ["NO_ACTION"]
        self._report("hold", {"on": held, "causes": names * held, "sentences": list(message.sentences) * held})

    def _on_health(self, sent: bytes, now: float) -> None:
        try:
            message = deserialize_message(sent, DiagnosticArray)
        except RuntimeError:  # damaged
            return
        for status in message.status:
            space, _, name = status.name.rpartition("/")
            if space.strip("/") != self._space:  # /diagnostics is shared by all robots of a ROS domain
                continue
            if name in LINK_NODES:
                self._links[name] = (status.level, status.message, now)
            elif name == _NAVIGATION:
                end = _END.fullmatch(status.message)
                outcome, sentence = end.groups() if end else ("", "")
                self._report("end", {"outcome": outcome, "sentence": sentence, "good": outcome == "ARRIVED"})

    def _show_link(self, now: float) -> None:
        """Show the worst of the link's nodes; one that has been silent for long counts as bad."""
        if not self._links:
            return
        bad = [(text, False) for level, text, _ in self._links.values() if level != DiagnosticStatus.OK]
        gone = [(_GONE.format(name), True) for name, (_, _, at) in self._links.items() if now - at > _SILENT_S]
        text, silent = (gone + bad + [(next(iter(self._links.values()))[1], False)])[0]
        self.overlay = replace(self.overlay, link=text, link_ok=not bad and not gone)
        levels = {level for level, _, _ in self._links.values()} - {DiagnosticStatus.OK}
        starting = levels == {DiagnosticStatus.STALE} and not gone
        self._report("link", {"ok": None if starting else not bad and not gone, "text": text, "gone": silent})

    def _report(self, kind: str, value: dict[str, Any]) -> None:
        """Add a state to the news if it has changed."""
        if self._last.get(kind) != value:
            self._last[kind] = value
            self.news.append((kind, value))


def round_from(message: RoundStats) -> Round:
    """A Round from its message."""
    same = ("drafted", "source", "ready", "first_exit", "predrafts", "bytes_up", "bytes_down", "depth")
    figures: dict[str, Any] = {name: getattr(message, name) for name in same}
    figures |= {name: seconds(getattr(message, f"{name}_time")) for name in ("draft", "wait", "verify", "model")}
    return Round(
        **figures,
        began=seconds(message.start_offset),
        accepted=min(message.accepted, len(message.gained)),
        gained=tuple(message.gained),
        rejected=tuple(message.rejected),
        exits=tuple(zip(map(int, message.exit_layers), map(seconds, message.exit_times), strict=False)),
    )


def reply_figures(message: DecodeStats) -> ReplyFigures:
    """The figures of a reply from its message."""
    values: dict[str, Any] = {}
    for name in message.get_fields_and_field_types():
        value = getattr(message, name)
        if isinstance(value, Duration):
            values[seconds_name(name)] = seconds(value)
        else:
            values[name] = 0.0 if isinstance(value, float) and not math.isfinite(value) else value
    return ReplyFigures(**{field.name: values[field.name] for field in fields(ReplyFigures)})


def step_from(message: NavAction, pose: Pose) -> ShownStep:
    """An announced action that begins at ``pose``."""
    try:
        action: Action | None = action_of(message, ANY)
    except ValueError:
        action = None
    age = seconds(message.header.stamp) - seconds(message.observation_stamp)
    return ShownStep(
        number=message.step,
        phrase=format_action(action) if action is not None else "unknown action",
        ahead=action.metres if action is not None else 0.0,
        turn=action.radians if action is not None else 0.0,
        verified=message.verified,
        pose=pose,
        reasoning=message.reasoning,
        retracing=message.retracing,
        age=age,
    )
