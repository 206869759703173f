# SPDX-License-Identifier: Apache-2.0
"""The observer of `dsd-lab bench faults`: a ROS node that watches the robot, sends goals, and publishes faults."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from nav_msgs.msg import Odometry
from rclpy.action import ActionClient
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import String
from std_srvs.srv import Trigger

from dsd_lab.faults.judge import Announced, Command, Record, SeenPose, SupervisorVerdict
from dsd_lab.faults.plan import DRAFT, NAVIGATION
from dsd_msgs.action import Navigate
from dsd_msgs.msg import DraftTokens, NavAction, ReplyProgress, SafetyState, VerifiedTokens
from dsd_ros.navigation.run.actions import Action, action_of
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.navigation.safety.causes import REFUSALS, Cause
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.ros import qos
from dsd_ros.ros.images import to_rgb
from dsd_ros.ros.stamps import pose_of, to_duration, velocity_of
from dsd_ros.ros.standalone import SpinningNode

_PICTURES = 900  # kept: a minute of them at 15 a second
_FRESH_S = 0.5
_ACCEPT_S = 5.0  # a goal that is not accepted by then is sent again
_HEARTS = (NAVIGATION, DRAFT)
# The camera's QoS, but no picture is dropped for being the older of two.
WATCHER = "fault_watcher"  # its node
_ALL_PICTURES = QoSProfile(history=HistoryPolicy.KEEP_LAST, depth=60, reliability=ReliabilityPolicy.BEST_EFFORT)


@dataclass
class WatchedRun:
    """One goal. ``outcome`` is empty until the run has ended."""

    number: int
    began: float
    accepted: bool = False
    outcome: str = ""


class Watcher:
    """Spins in a thread of its own. ``lock`` guards ``record``."""

    def __init__(self, instruction: str) -> None:
        self.instruction = instruction
        self.lock = threading.Lock()
        self.record = Record()
        self.run: WatchedRun | None = None
        self._runs = 0
        self._asked = 0.0
        self._pictures: OrderedDict[int, Image] = OrderedDict()
        self._replies: dict[int, tuple[str, int]] = {}
        self._heard: dict[str, float] = {}
        self._returned = self._session_seen = 0.0  # the draft node, and its session with the verifier
        self._ros = SpinningNode(WATCHER)
        node = self._ros.node
        listen = node.create_subscription
        listen(Twist, "cmd_vel", self._on_command, qos.STATE)
        listen(Odometry, "odom", self._on_odometry, qos.STATE)
        listen(NavAction, "dsd/nav_action", self._on_action, qos.STATE)
        listen(SafetyState, "dsd/safety_state", self._on_verdict, qos.LATCHED)
        listen(ReplyProgress, "dsd/reply_progress", self._on_progress, qos.STATE)
        listen(Image, "camera/image_raw", self._on_picture, _ALL_PICTURES)
        listen(String, "dsd/heartbeat", self._on_heartbeat, qos.STATE)
        listen(DiagnosticArray, "/diagnostics", self._on_diagnostics, qos.STATE)
        self._navigate = ActionClient(node, Navigate, "dsd/navigate")
        self._reset = node.create_client(Trigger, "simulator/reset_world")
        self._fault = node.create_publisher(String, "simulator/fault", qos.STATE)
        self._nonsense = {
            "up": node.create_publisher(DraftTokens, "dsd/draft_tokens", qos.LINK),
            "down": node.create_publisher(VerifiedTokens, "dsd/verified_tokens", qos.LINK),
        }
        self._ros.executor.create_task(_take_priority)  # in the spinning thread
        self._ros.start()

    def close(self) -> None:
        self._ros.close()

    # -- goals ---------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether everything publishes, and only the lack of an action keeps the robot from moving."""
        now = time.monotonic()
        with self.lock:
            fresh = all(now - self._heard.get(name, 0.0) < _FRESH_S for name in (*_HEARTS, "odom"))
            session = self._session_seen > self._returned
            pictures = now - self._heard.get("picture", 0.0) < 1.0
            verdict = self.record.verdicts[-1] if self.record.verdicts else None
        if not (fresh and session and pictures and verdict is not None and now - verdict.at < 1.0):
            return False
        return set(verdict.causes) <= _HARMLESS and self._navigate.server_is_ready()

    def state(self) -> str:
        """What has been heard, for a log."""
        now = time.monotonic()
        with self.lock:
            heard = ", ".join(f"{name} {now - at:.1f} s ago" for name, at in self._heard.items())
            verdict = self.record.verdicts[-1:]
        return f"{heard}; {verdict}; {self.run}"

    def carry_back(self) -> None:
        """Put the simulated robot back to its start, if the simulator answers."""
        self.note_reset()
        future = self._reset.call_async(Trigger.Request())
        deadline = time.monotonic() + 3.0
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.01)

    def note_reset(self) -> None:
        with self.lock:
            self.record.resets.append(time.monotonic())

    def send_goal(self, time_limit: float) -> WatchedRun:
        """Ask navigation to begin a run."""
        self._runs += 1
        self.run = run = WatchedRun(self._runs, time.monotonic())
        self._send(run, time_limit)
        return run

    def send_again(self, run: WatchedRun, time_limit: float) -> None:
        """Repeat a goal that was not accepted: one that met a server just being replaced is lost silently."""
        if not run.accepted and not run.outcome and time.monotonic() - self._asked > _ACCEPT_S:
            self._send(run, time_limit)

    def _send(self, run: WatchedRun, time_limit: float) -> None:
        self._asked = time.monotonic()
        goal = Navigate.Goal(instruction=self.instruction, time_limit=to_duration(time_limit))

        def accepted(future: Any) -> None:
            handle = future.result()
            if handle is None or not handle.accepted or run.accepted:
                return  # the goal is sent again
            run.accepted = True
            handle.get_result_async().add_done_callback(ended)

        def ended(future: Any) -> None:
            answer = future.result()
            if answer is None or run.outcome:
                return
            outcome = RunOutcome(answer.result.outcome)
            if outcome is RunOutcome.BAD_GOAL and "under way" in answer.result.message:
                run.accepted = False  # the goal that was sent first is still being wound up
                return
            run.outcome = outcome.name

        # In the spinning thread: rclpy loses an answer that overtakes the asking thread.
        self._ros.executor.create_task(lambda: self._navigate.send_goal_async(goal).add_done_callback(accepted))

    # -- faults that are published -------------------------------------------------------------

    def tell_simulator(self, fault: str) -> None:
        self._fault.publish(String(data=fault))

    def talk_nonsense(self, way: str, source: Any) -> None:
        """Publish on a topic of the link what no robot and no verifier would; ``source``: a random.Random."""
        publisher = self._nonsense[way]
        numbers = [source.getrandbits(32) for _ in range(6)]
        names = {"session": numbers[0], "reply": numbers[1], "tokens": numbers[3:]}
        publisher.publish(
            DraftTokens(**names, stream=numbers[2]) if way == "up" else VerifiedTokens(**names, at=numbers[2])
        )
        publisher.publish(b"\x00\x01\x00\x00" + source.randbytes(source.randrange(4, 200)))

    # -- what is heard -------------------------------------------------------------------------

    def picture(self, stamp: int) -> np.ndarray | None:
        """The picture of a stamp (ns), RGB, if it was heard."""
        with self.lock:
            image = self._pictures.get(stamp)
        return None if image is None else to_rgb(image)

    def reply(self, stamp: int) -> tuple[str, int] | None:
        """The whole reply to the picture of a stamp, and its number of tokens, if it was heard."""
        with self.lock:
            return self._replies.get(stamp)

    def moving(self) -> bool:
        """Whether the newest command moves the robot."""
        with self.lock:
            commands = self.record.commands
            fresh = commands and time.monotonic() - commands[-1].at < 0.2
            return bool(fresh and commands[-1].moves)

    def _on_command(self, message: Twist, info: Any) -> None:
        linear = message.linear
        command = Command(_said_at(info), linear.x, linear.y, message.angular.z)
        with self.lock:
            self.record.commands.append(command)

    def _on_odometry(self, message: Odometry, info: Any) -> None:
        try:
            pose, velocity = pose_of(message), velocity_of(message)
        except OdometryError:
            return
        now = _said_at(info)
        with self.lock:
            self._heard["odom"] = time.monotonic()
            self.record.poses.append(SeenPose(now, pose.x, pose.y, pose.yaw, velocity.vx, velocity.wz))

    def _on_action(self, message: NavAction) -> None:
        action: Action | None
        try:
            action = action_of(message)
        except ValueError:
            action = None
        seen = Announced(
            time.monotonic(), self._runs, message.step, action, message.verified, message.retracing,
            message.reasoning, _nanoseconds(message.observation_stamp),
        )  # fmt: skip
        with self.lock:
            self.record.actions.append(seen)

    def _on_verdict(self, message: SafetyState, info: Any) -> None:
        causes = tuple(_NAMES.get(cause, str(cause)) for cause in message.causes)
        with self.lock:
            self.record.verdicts.append(SupervisorVerdict(_said_at(info), message.stopped, causes))

    def _on_progress(self, message: ReplyProgress) -> None:
        if message.done:
            with self.lock:
                stamp = _nanoseconds(message.header.stamp)
                self._replies[stamp] = (message.text, message.verified_tokens)

    def _on_picture(self, message: Image) -> None:
        with self.lock:
            self._heard["picture"] = time.monotonic()
            self._pictures[_nanoseconds(message.header.stamp)] = message
            while len(self._pictures) > _PICTURES:
                self._pictures.popitem(last=False)

    def _on_heartbeat(self, message: String) -> None:
        now = time.monotonic()
        with self.lock:
            if message.data == DRAFT and now - self._heard.get(DRAFT, 0.0) > 2.0 * _FRESH_S:
                self._returned = now
            self._heard[message.data] = now

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == DRAFT and status.level == DiagnosticStatus.OK:
                self._session_seen = time.monotonic()


_NAMES = {int(cause): cause.name for cause in Cause}
# These end with navigation's next good action or command.
_HARMLESS = {cause.name for cause in (*REFUSALS, Cause.COMMAND_STALE)}


def _said_at(info: Any) -> float:
    """When a message was published, on this process's monotonic clock, so that the observer's delay does not count."""
    now = time.monotonic()
    stamp = info["source_timestamp"]  # ns of the wall clock, which all processes here share
    delay = time.time() - stamp * 1e-9 if stamp else 0.0
    return now - min(max(delay, 0.0), 1.0)


def _nanoseconds(stamp: Any) -> int:
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def _take_priority() -> None:
    """Real-time scheduling for this thread alone: it is the clock of every stop."""
    with contextlib.suppress(OSError):  # not allowed: the clock's delay counts as the robot's
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
