# SPDX-License-Identifier: Apache-2.0
"""``executor: nav2``: verified actions as goals of Nav2's action types, served by a stand-in that drives the simulator.

The stand-in's velocities reach the robot through the safety supervisor, as docs/topics.md has it, with the
bring-up's topics and parameters, beside every publisher of velocities that Nav2's own bring-up creates.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
import yaml
from action_msgs.msg import GoalStatus, GoalStatusArray
from navigation_rig import FORWARD, LEFT, STOP, NavigationRig
from std_msgs.msg import Bool, String
from std_srvs.srv import Trigger

from dsd_msgs.msg import SafetyState
from dsd_ros.bringup.systems import plan
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.navigation.safety.causes import Cause
from dsd_ros.ros import qos

pytest.importorskip("nav2_msgs.action", reason="Nav2's messages are not installed")

STANDIN = Path(__file__).resolve().parents[1] / "support" / "nav2_standin.py"
(NAVIGATION,) = (start for start in plan("robot", {"executor": "nav2"}) if start.name == "navigation_node")
FAR = "It is far. Action: forward 75 cm"
COMMAND = "cmd_vel_dsd"
ACTIONS = ("spin", "drive_on_heading", "navigate_to_pose")


class Nav2Rig(NavigationRig):
    """The navigation rig with Nav2's stand-in."""

    def __init__(self, rig, start=True, **parameters) -> None:
        self.sent: list[str] = []  # the servers of the goals, in their order
        self.known: set[bytes] = set()
        self.causes: list[int] = []
        for name in ACTIONS:
            rig.node.create_subscription(
                GoalStatusArray, f"{name}/_action/status", lambda m, name=name: self._on_status(name, m), qos.LATCHED
            )
        self._fault = rig.node.create_publisher(String, "nav2_fault", qos.STATE)
        self.nav2 = self.start_nav2(rig) if start else None
        (added,) = (yaml.safe_load(file.read_text()) for file in NAVIGATION.files)
        parameters |= {"commands": added["/**/supervisor_node"]["ros__parameters"]["require"]["commands"]}
        super().__init__(rig, executor="nav2", remappings=NAVIGATION.remappings, **parameters)
        if start:
            self.until_ready()

    def until_ready(self) -> None:
        self.rig.until(lambda: "[nav2] ready" in self.rig.lines, what="Nav2 hearing the odometry")

    def until_served(self) -> None:
        """Drive once: `navigation_node` may discover Nav2's servers later than the second that it waits here."""
        self.rig.until(lambda: self.run(FORWARD, STOP)[1].outcome == RunOutcome.ARRIVED, what="Nav2 serving")

    def until_sent(self, *names: str) -> None:
        """Wait for the goals so far: the test may discover a server's latched states later than the run ends.

        On a busy machine a hold may part one motion into several goals.
        """
        self.rig.until(lambda: len(self.sent) >= len(names), what="the states of Nav2's goals")
        assert [name for name, _ in groupby(self.sent)] == [name for name, _ in groupby(names)]

    @staticmethod
    def start_nav2(rig):
        return rig.group.start("nav2", [sys.executable, str(STANDIN)])

    def _on_status(self, name, message) -> None:
        for status in message.status_list:
            key = bytes(status.goal_info.goal_id.uuid)
            if key not in self.known:
                self.known.add(key)
                self.sent.append(name)

    def _on_safety(self, message: SafetyState) -> None:
        super()._on_safety(message)
        self.causes = list(message.causes)

    def fault(self, text: str) -> None:
        self.rig.until_linked("behavior_server", self._fault)
        self._fault.publish(String(data=text))
        self.rig.until(lambda: any(line.endswith(f"fault: {text}") for line in self.rig.lines))

    def until_driving(self) -> None:
        self.rig.until(lambda: self.odometry.velocity.vx > 0.1, what="the robot driving")

    def until_standing(self, limit: float) -> None:
        self.rig.until(lambda: abs(self.odometry.velocity.vx) < 0.03, limit, "the robot standing")


def test_a_whole_run_is_carried_out_by_nav2(rig):
    nav = Nav2Rig(rig)
    start = nav.odometry.pose
    status, result = nav.run(LEFT, FORWARD, STOP)
    assert (status, result.outcome) == (GoalStatus.STATUS_SUCCEEDED, RunOutcome.ARRIVED), result.message
    assert result.steps == 3
    pose = nav.odometry.pose
    # Nav2 looks at 10 Hz and does not brake: it goes on for one period and its reaction.
    assert 0.7 < math.remainder(pose.yaw - start.yaw, math.tau) < math.radians(45) + 0.35
    moved = math.hypot(pose.x - start.x, pose.y - start.y)
    assert 0.17 < moved < 0.25 + 0.3 and result.distance_travelled == pytest.approx(moved, abs=0.05)
    nav.until_sent("spin", "drive_on_heading")
    topics = {
        COMMAND: {"collision_monitor"},  # navigation itself commands nothing
        "cmd_vel": {"docking_server"},
        "cmd_vel_nav": {"behavior_server", "controller_server"},
        "cmd_vel_smoothed": {"velocity_smoother"},
        "cmd_vel_out": {"supervisor_node"},
    }
    for topic, publishers in topics.items():
        assert {info.node_name for info in rig.node.get_publishers_info_by_topic(topic)} == publishers
    assert Cause.FOREIGN_PUBLISHER not in nav.causes
    assert not any("2 under way" in line for line in rig.lines)


def test_a_drive_may_be_a_pose(rig):
    nav = Nav2Rig(rig, nav2__forward="navigate_to_pose")
    start = nav.odometry.pose
    _, result = nav.run(FORWARD, STOP)
    assert result.outcome == RunOutcome.ARRIVED, result.message
    nav.until_sent("navigate_to_pose")
    pose = nav.odometry.pose
    assert 0.17 < math.hypot(pose.x - start.x, pose.y - start.y) < 0.25 + 0.3


def test_goals_that_nav2_does_not_carry_out_are_blocked_actions(rig):
    nav = Nav2Rig(rig)
    for fault, sentence in (
        ("reject", "The last time Nav2 rejected the goal."),
        ("abort", "The last time Nav2 aborted the goal (error 723)."),
        ("still", "The last time Nav2 reports success, but by odometry the robot did not get there."),
    ):
        nav.fault(fault)
        _, result = nav.run(FORWARD, FORWARD, FORWARD, FORWARD)
        assert result.outcome == RunOutcome.STUCK and result.message.endswith(sentence), result.message
        assert result.steps == 3
    nav.fault("ok")
    assert nav.run(FORWARD, STOP)[1].outcome == RunOutcome.ARRIVED


def test_a_cancel_cancels_nav2s_goal(rig):
    nav = Nav2Rig(rig)
    nav.script = [FAR]
    goal = nav.send()
    nav.until_driving()
    nav.client.cancel(goal)
    status, result = nav.finish(goal)
    assert (status, result.outcome) == (GoalStatus.STATUS_CANCELED, RunOutcome.CANCELLED)
    nav.until_standing(3.0)
    stood = nav.odometry.pose.x
    time.sleep(0.5)
    assert nav.odometry.pose.x == pytest.approx(stood, abs=0.01) and result.distance_travelled < 0.75
    assert nav.run(FORWARD, STOP)[1].outcome == RunOutcome.ARRIVED


def test_the_supervisors_stop_cancels_nav2s_goal(rig):
    nav = Nav2Rig(rig)
    ended = []
    rig.node.create_subscription(
        GoalStatusArray, "drive_on_heading/_action/status",
        lambda m: ended.extend(s.status for s in m.status_list), qos.LATCHED,
    )  # fmt: skip
    nav.script = [FAR]
    goal = nav.send()
    nav.until_driving()
    rig.call(Trigger, "emergency_stop", Trigger.Request())
    _, result = nav.finish(goal)
    assert result.outcome == RunOutcome.SAFETY_STOP
    nav.until_standing(3.0)
    rig.until(lambda: GoalStatus.STATUS_CANCELED in ended, what="Nav2's goal cancelled")


def test_a_hold_that_passes_cancels_the_goal_and_sends_what_is_left(rig):
    nav = Nav2Rig(rig, run__safety_patience_s=30.0)
    nav.script = [FAR]
    goal = nav.send()
    start = nav.odometry.pose
    nav.until_driving()
    nav.camera(False)
    nav.until_standing(5.0)
    nav.camera(True)
    nav.script = [STOP]
    assert nav.finish(goal)[1].outcome == RunOutcome.ARRIVED
    nav.until_sent("drive_on_heading", "drive_on_heading")
    pose = nav.odometry.pose
    assert 0.6 < math.hypot(pose.x - start.x, pose.y - start.y) < 0.75 + 0.3


@pytest.mark.parametrize("fault", ["silent", "deaf"])
def test_a_nav2_that_does_not_answer_is_stopped(rig, fault):
    nav = Nav2Rig(rig, motion__speed=0.15, run__safety_patience_s=30.0)  # it drives for longer than it may be silent
    stops: list[bool] = []
    alarm = rig.node.create_subscription(Bool, "emergency_stop", lambda m: stops.append(m.data), qos.STATE)
    rig.until_linked("navigation_node", alarm)
    nav.until_served()
    nav.fault(fault)
    nav.script = [FAR]
    goal = nav.send()
    if fault == "deaf":
        nav.until_driving()
        nav.client.cancel(goal)
        nav.finish(goal)
    else:
        _, result = nav.finish(goal)
        assert result.outcome == RunOutcome.EXECUTOR_FAILED
        assert result.message == "Nav2 has not answered the goal 'forward 75 cm' within 3.0 s."
    rig.until(lambda: stops == [True] and SafetyState.EMERGENCY_STOP in nav.causes, 10.0, "an emergency stop")
    nav.until_standing(3.0)


def test_a_nav2_that_is_not_there_or_dies_ends_the_run(rig):
    nav = Nav2Rig(rig, start=False, run__safety_patience_s=30.0)
    _, result = nav.run(FORWARD)
    assert result.outcome == RunOutcome.EXECUTOR_FAILED
    assert result.message == "No Nav2 server takes the goal 'forward 25 cm': start and activate Nav2."
    child = nav.start_nav2(rig)
    nav.until_ready()
    nav.until_served()
    nav.script = [FAR]
    goal = nav.send()
    nav.until_driving()
    child.signal(signal.SIGKILL)
    nav.until_standing(3.0)  # the supervisor hears no command any more
    _, result = nav.finish(goal)
    assert result.outcome == RunOutcome.EXECUTOR_FAILED
    assert result.message == "Nav2 has not answered the cancelling of its goal 'forward 75 cm' within 3.0 s."
