# SPDX-License-Identifier: Apache-2.0
"""The operator's side of the demo: send the goal, hand on replies and steps, collect ground truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Odometry
from rclpy.action import ActionClient
from sensor_msgs.msg import CameraInfo
from std_msgs.msg import Bool, Float64, UInt32

from dsd_msgs.action import Navigate
from dsd_msgs.msg import AnswerSource, DecodeStats, MemoryAnswer, NavAction, ReplyProgress
from dsd_ros.navigation.run.actions import ANY, action_of, format_action
from dsd_ros.navigation.run.settings import RunOutcome
from dsd_ros.navigation.safety.odometry import OdometryError
from dsd_ros.ros import qos
from dsd_ros.ros.health import HEARD
from dsd_ros.ros.managed import LifecycleWatch
from dsd_ros.ros.stamps import pose_of, seconds, to_duration
from dsd_ros.ros.standalone import SpinningNode
from dsd_ros.shown import seconds_name

_PATH_SPACING_M = 0.03
_TIMES = ("draft_round_time", "verify_round_time", "link_delay", "sync_time")  # copied from DecodeStats
_FIGURES = (  # likewise
    "draft_share", "passes_per_token", "sooner", "cost_ratio", "miss_rate", "mean_exit", "exits", "predrafts_used",
    "predrafts_wasted", "peak_memory", "threads",
)  # fmt: skip


class DemoClient:
    """A ROS node that spins in its own thread."""

    LINK_OUTCOMES: ClassVar[tuple[str, ...]] = (
        RunOutcome.LINK_LOST.name,
        RunOutcome.VERIFIER_REFUSED.name,
        RunOutcome.DECODE_TIMEOUT.name,
    )

    def __init__(
        self,
        on_progress: Callable[[ReplyProgress], None],
        on_step: Callable[[NavAction, DecodeStats], None],
        on_memory: Callable[[MemoryAnswer], None],
        memory: bool = False,
        recorded: bool = False,
    ) -> None:
        """:param on_progress: called in the spinning thread with a reply as it grows.
        :param on_step: likewise with an action and its reply's figures, which are empty where it has none.
        :param on_memory: likewise, once, with what the goal means by memory.
        :param memory: wait for a memory_node as well.
        :param recorded: watch the record_node's topics, for `unheard`.
        """
        self._ros = SpinningNode("demo_client")
        node = self._ros.node
        self._lock = threading.Lock()
        self._stats: dict[tuple[int, int], DecodeStats] = {}
        self._whole = set[tuple[int, int]]()  # stamps of replies that have come to their end
        self._actions: list[tuple[NavAction, list[float]]] = []  # each with the pose it began at
        self._pose: list[float] = []
        self._steps: list[dict[str, Any]] = []
        self._path: list[list[float]] = []
        self._newest: dict[str, Any] = {}  # by topic
        self._rejected = False
        self._heard = set[str]()  # by the recorder
        self._result: Any = None
        self._tell_progress, self._on_step, self._on_memory = on_progress, on_step, on_memory
        self._instruction, self._heard_memory = "", False

        for kind, topic, profile in (
            (CameraInfo, "camera/camera_info", qos.SENSOR),
            (UInt32, "ground_truth/collisions", qos.LATCHED),
            (Float64, "ground_truth/target_distance", qos.STATE),
            (Bool, "ground_truth/reached", qos.STATE),
        ):
            node.create_subscription(kind, topic, partial(self._newest.__setitem__, topic), profile)
        node.create_subscription(Odometry, "odom", self._on_odometry, qos.SENSOR)
        node.create_subscription(ReplyProgress, "dsd/reply_progress", self._on_progress, qos.PROPOSALS)
        node.create_subscription(DecodeStats, "dsd/decode_stats", self._on_stats, qos.STATE)
        node.create_subscription(NavAction, "dsd/nav_action", self._on_action, qos.STATE)
        node.create_subscription(MemoryAnswer, "dsd/memory_answer", self._hear, qos.LATCHED)
        if recorded:
            node.create_subscription(DiagnosticArray, "/diagnostics", self._on_health, qos.STATE)
        self._navigate = ActionClient(node, Navigate, "dsd/navigate")
        # After the action client: DDS announces both in this order, so a node that answers has discovered the
        # client, and its acceptance of a goal is not dropped.
        names = ["navigation_node", "draft_node"] + ["memory_node"] * memory
        self._watches = {name: LifecycleWatch(node, name) for name in names}
        self._ros.start()

    def close(self) -> None:
        self._ros.close()

    def awaited(self) -> list[str]:
        """What is not ready yet of robot, camera, navigation and a session with the verifier."""
        seen = {"camera/camera_info", "ground_truth/target_distance"} <= self._newest.keys()
        found = {"the camera": seen}
        found |= {name: watch.active() for name, watch in self._watches.items()}  # every watch asks
        found["navigation_node"] &= self._navigate.server_is_ready()
        return [name for name, ready in found.items() if not ready]

    def unheard(self) -> set[str]:
        """Published or core topics of a run that the recorder is not matched with yet."""
        from dsd_ros.ros.record_topics import CORE, TOPICS  # imports rosbags

        node = self._ros.node
        published = {n for n in TOPICS if node.count_publishers(node.resolve_topic_name(n))}
        return (published | CORE) - self._heard

    def send_goal(self, instruction: str, time_limit: float) -> None:
        """Send the goal from the spinning thread: rclpy loses a response that overtakes the requesting thread."""
        self._instruction = instruction
        goal = Navigate.Goal(instruction=instruction, time_limit=to_duration(time_limit))
        self._ros.executor.create_task(
            lambda: self._navigate.send_goal_async(goal).add_done_callback(self._on_accepted)
        )

    def finished(self) -> bool:
        return self._result is not None or self._rejected

    def settle(self, seconds: float = 0.3) -> None:
        """Wait for the last measurements."""
        time.sleep(seconds)

    def fill(self, report: Any) -> None:
        """Fill in a DemoReport."""
        with self._lock:
            self._join(force=True)
            report.steps, report.path = self._steps, self._path
            distance, collision = (
                self._newest.get(name) for name in ("ground_truth/target_distance", "ground_truth/collisions")
            )
            report.distance_m = None if distance is None else round(distance.data, 4)
            report.collisions = 0 if collision is None else collision.data
            if self._result is not None:
                outcome = RunOutcome(self._result.outcome)
                report.outcome, report.message = outcome.name, self._result.message
                report.answer, report.question = self._result.answer, self._result.question
                sides = {AnswerSource.ROBOT: "robot", AnswerSource.CLOUD: "cloud"}
                report.sources = [
                    {"sentence": each.sentence, "side": sides.get(each.side, ""), "document": each.document}
                    for each in self._result.sources
                ]
                report.resolved_instruction = self._result.instruction
                reached = self._newest.get("ground_truth/reached", Bool()).data
                report.reached = bool(outcome is RunOutcome.ARRIVED and reached and report.collisions == 0)

    # -- callbacks, all in the spinning thread --------------------------------------------------

    def _on_accepted(self, future: Any) -> None:
        handle = future.result()
        if handle is None or not handle.accepted:
            self._rejected = True
            return
        handle.get_result_async().add_done_callback(self._on_result)

    def _hear(self, memory: MemoryAnswer) -> None:
        if memory.goal == self._instruction and not self._heard_memory:
            self._heard_memory = True
            self._on_memory(memory)

    def _on_result(self, future: Any) -> None:
        answer = future.result()
        self._rejected = answer is None
        if answer is not None:
            result = answer.result
            same = {name: getattr(result, name) for name in ("answer", "sources", "instruction", "question")}
            self._hear(MemoryAnswer(goal=self._instruction, **same))  # which may overtake the topic's
            self._result = result

    def _on_health(self, message: DiagnosticArray) -> None:
        for status in message.status:
            if status.name == "record_node":
                values = {pair.key: pair.value for pair in status.values}
                self._heard = set(values.get(HEARD, "").split(", "))

    def _on_odometry(self, message: Odometry) -> None:
        try:
            pose = pose_of(message)
        except OdometryError:
            return
        with self._lock:
            self._pose = [round(pose.x, 4), round(pose.y, 4), round(pose.yaw, 4)]
            if self._path:
                x, y, yaw = self._path[-1]
                moved = abs(pose.x - x) + abs(pose.y - y)
                if moved < _PATH_SPACING_M and abs(pose.yaw - yaw) < 0.1:
                    return
            self._path.append(self._pose)

    def _on_progress(self, message: ReplyProgress) -> None:
        self._tell_progress(message)
        if message.done:
            with self._lock:
                self._whole.add((message.header.stamp.sec, message.header.stamp.nanosec))
                self._join()

    def _on_stats(self, message: DecodeStats) -> None:
        with self._lock:
            stamp = message.observation_stamp
            self._stats[stamp.sec, stamp.nanosec] = message
            self._join()

    def _on_action(self, message: NavAction) -> None:
        with self._lock:
            self._actions.append((message, self._pose))
            self._join()

    def _join(self, force: bool = False) -> None:
        """Match actions with replies and their statistics, which come on other topics, by their picture's stamp.

        An action waits for both; for the end of its reply, which can be lost, only until the next action.
        """
        while self._actions:
            action, pose = self._actions[0]
            stamp = action.observation_stamp
            key = stamp.sec, stamp.nanosec
            stats = self._stats.get(key)
            awaits = stats is None or (key not in self._whole and len(self._actions) == 1)
            if awaits and action.verified and not force:  # only verified replies have statistics
                return
            self._actions.pop(0)
            self._add_step(action, pose, stats if stats is not None else DecodeStats())

    def _add_step(self, action: NavAction, pose: list[float], stats: DecodeStats) -> None:
        phrase, total = format_action(action_of(action, ANY)), seconds(stats.total_time)
        seen = seconds(action.header.stamp if action.retracing else action.observation_stamp)
        age = seconds(action.header.stamp) - seen
        step: dict[str, Any] = {"observation_age_s": round(age, 4), "reasoning": action.reasoning, "action": phrase}
        step |= {name: getattr(action, name) for name in ("verified", "retracing")}
        step |= {name: getattr(stats, name) for name in ("tokens", "rounds")}
        step |= {"tau": round(stats.tau, 3), "seconds": round(total, 4)}
        for name in ("step_time", "standing_time"):
            step[seconds_name(name)] = round(seconds(getattr(action, name)), 4)
        step |= {"bytes_up": stats.bytes_up, "bytes_down": stats.bytes_down}
        step["pose"] = pose  # x, y (m), yaw (rad) where the action began
        step |= {seconds_name(name): round(seconds(getattr(stats, name)), 6) for name in _TIMES}
        step |= {name: round(getattr(stats, name), 6) for name in _FIGURES}
        self._steps.append(step)
        self._on_step(action, stats)
