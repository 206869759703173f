"""What views show, gathered from the topics of a running system."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from nav_msgs.msg import Odometry
from rclpy.node import Node
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image

from dsd_msgs.msg import DecodeStats, NavAction, ReplyProgress, RoundStats, SafetyState
from dsd_ros.observe.view.figures import Figures, ReplyFigures
from dsd_ros.observe.view.state import Overlay, Pose, Round, ShownReply, ShownStep, Walk
from dsd_ros.ros import qos
from dsd_ros.ros.images import RawImage, read_image, read_pose
from dsd_ros.ros.polled import Polled, take, take_raw
from dsd_ros.ros.stamps import seconds

LINK_NODES = ("draft_node", "bridge_node")
_LINK_NAMES = tuple(name.encode() for name in LINK_NODES)
_LOOK_S = 0.19  # least time between two looks at all but pictures: people read no faster, and the map shows no more
_DEAF_S = 3.0  # a camera silent for so long is subscribed to anew
_PHRASES = {
    NavAction.STOP: "stop",
    NavAction.FORWARD: "forward {} cm",
    NavAction.TURN_LEFT: "turn left {} degrees",
    NavAction.TURN_RIGHT: "turn right {} degrees",
}


class Live:
    """The present state of a robot and its decoder. Call :meth:`poll` as often as a view is drawn."""

    def __init__(self, node: Node) -> None:
        self._ears = ears = Polled(node)
        # Only the newest matters, so none is acknowledged: that would wake both sides 50 times a second.
        self._odometry = ears.subscribe(Odometry, "odom", qos.SENSOR)
        self._progress = ears.subscribe(ReplyProgress, "reply_progress", qos.LINK)
        self._stats = ears.subscribe(DecodeStats, "decode_stats", qos.STATE)
        self._actions = ears.subscribe(NavAction, "nav_action", qos.STATE)
        self._safety = ears.subscribe(SafetyState, "safety_state", qos.LATCHED)
        self._health = ears.subscribe(DiagnosticArray, "/diagnostics", qos.STATE)
        self._camera: object = None
        self._heard = 0.0  # the last picture, monotonic

        self.overlay = Overlay()
        self.figures = Figures()
        self.walk = Walk()
        self.steps: list[ShownStep] = []
        self.pose: Pose | None = None
        self.frame = "odom"  # of poses, as odometry names it
        self.replies = 0  # grows with every complete reply
        self._looked = float("-inf")
        self.rounds = 0  # grows with every round
        self.runs = 0  # grows with every run
        self._links: dict[str, tuple[bool, str]] = {}

    def close(self) -> None:
        self._ears.close()

    def poll(self) -> None:
        """Take in what has come since the last time, a few times a second."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        for odometry in take_raw(self._odometry):
            self.pose, self.frame = read_pose(odometry)
            self.walk.add(self.pose)
        for progress in take(self._progress):
            self._on_progress(progress)
        for stats in take(self._stats):
            self._on_stats(stats)
        for action in take(self._actions):
            self._on_action(action)
        for safety in take(self._safety):
            causes = tuple(safety.sentences)
            self.overlay = replace(self.overlay, causes=causes, stopped=safety.stopped)
        for sent in take_raw(self._health):
            if any(name in sent for name in _LINK_NAMES):  # most of them are others'
                self._on_health(deserialize_message(sent, DiagnosticArray))

    def picture(self) -> RawImage | None:
        """The newest picture since the last call, if any. Listens to the camera from the first call on."""
        now = time.monotonic()
        if self._camera is not None and now - self._heard > _DEAF_S:
            self.rest_camera()  # a best-effort reader can stay deaf when a sender died in mid-picture
        if self._camera is None:
            self._camera = self._ears.subscribe(Image, "camera/image_raw", qos.CAMERA)
            self._heard = now
        pictures = take_raw(self._camera)
        if not pictures:
            return None
        self._heard = now
        return read_image(pictures[-1])

    def rest_camera(self) -> None:
        """Do not listen to the camera while nobody wants pictures."""
        if self._camera is not None:
            self._ears.drop(self._camera)
            self._camera = None

    def _on_progress(self, message: ReplyProgress) -> None:
        picture = seconds(message.header.stamp)
        reply = self.overlay.reply
        fresh = picture != reply.picture or (reply.done and not message.done)
        if fresh:
            reply = ShownReply(message.instruction, picture=picture)
        if not message.done or fresh:
            reply = reply.with_round(round_from(message.last_round))
            self.rounds += 1
        self.overlay = replace(self.overlay, reply=replace(reply, text=message.text, done=message.done))

    def _on_stats(self, message: DecodeStats) -> None:
        self.figures.add_reply(reply_figures(message))
        self.replies += 1
        self.overlay = replace(
            self.overlay, mode=message.mode, tau=message.tau, seconds=message.seconds, age=message.observation_age
        )

    def _on_action(self, message: NavAction) -> None:
        step = step_from(message, self.pose or (0.0, 0.0, 0.0))
        if step.number <= 1:
            self.runs += 1
            self.steps.clear()
            self.walk = Walk(changes=self.walk.changes + 1)
        self.steps.append(step)
        self.figures.add_step(float(message.step_seconds))
        self.overlay = replace(self.overlay, action=step.phrase, verified=step.verified)

    def _on_health(self, message: DiagnosticArray) -> None:
        for status in message.status:
            name = status.name.rpartition("/")[2]
            if name in LINK_NODES:
                self._links[name] = (status.level == DiagnosticStatus.OK, status.message)
        if not self._links:
            return
        bad = [text for fine, text in self._links.values() if not fine]
        text = bad[0] if bad else next(iter(self._links.values()))[1]
        self.overlay = replace(self.overlay, link=text, link_ok=not bad)


def round_from(message: RoundStats) -> Round:
    """A round as it came over the wire."""
    return Round(
        drafted=message.drafted,
        accepted=min(message.accepted, len(message.gained)),
        gained=tuple(message.gained),
        rejected=tuple(message.rejected),
        source=message.source,
        ready=message.ready,
        began=_finite(message.began_seconds),
        draft=_finite(message.draft_seconds),
        wait=_finite(message.wait_seconds),
        verify=_finite(message.verify_seconds),
        model=_finite(message.model_seconds),
        exits=tuple(
            (int(layer), _finite(at)) for layer, at in zip(message.exit_layers, message.exit_seconds, strict=False)
        ),
        first_exit=message.first_exit,
        predrafts=message.predrafts,
        bytes_up=message.bytes_up,
        bytes_down=message.bytes_down,
    )


def reply_figures(message: DecodeStats) -> ReplyFigures:
    """What a reply cost."""
    return ReplyFigures(
        mode=message.mode,
        transport=message.transport,
        tokens=message.tokens,
        rounds=message.rounds,
        tau=_finite(message.tau),
        seconds=_finite(message.seconds),
        verify_seconds=_finite(message.verify_seconds),
        verify_round_seconds=_finite(message.verify_round_seconds),
        link_delay_seconds=_finite(message.link_delay_seconds),
        miss_rate=_finite(message.miss_rate),
        bytes_up=message.bytes_up,
        bytes_down=message.bytes_down,
        predrafts_used=message.predrafts_used,
        predrafts_wasted=message.predrafts_wasted,
        mean_exit=_finite(message.mean_exit),
        observation_age=_finite(message.observation_age),
    )


def step_from(message: NavAction, pose: Pose) -> ShownStep:
    """An announced action, beginning at ``pose``."""
    amount = message.amount
    turns = {NavAction.TURN_LEFT: 1, NavAction.TURN_RIGHT: -1}.get(message.kind, 0)
    age = seconds(message.header.stamp) - seconds(message.observation_stamp)
    return ShownStep(
        number=message.step,
        phrase=_PHRASES.get(message.kind, "unknown action").format(amount),
        ahead=amount / 100.0 if message.kind == NavAction.FORWARD else 0.0,
        turn=turns * math.radians(amount),
        verified=message.verified,
        pose=pose,
        reasoning=message.reasoning,
        retracing=message.retracing,
        age=age,
    )


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0
