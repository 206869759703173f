# SPDX-License-Identifier: Apache-2.0
"""Navigate runs against the simulated robot, with a scripted decode service.

Every run must end in a named outcome with the robot at rest, and the next one must work.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from lifecycle_msgs.msg import Transition
from navigation_rig import FORWARD, HANG, LEFT, STOP, NavigationRig
from rclpy.serialization import serialize_message
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from dsd_msgs.msg import NavAction
from dsd_msgs.srv import Decode
from dsd_ros.navigation.run.run import RunOutcome
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import qos
from dsd_ros.ros.stamps import seconds, to_duration


def test_carries_out_what_is_decoded_and_reports(rig):
    nav = NavigationRig(rig)
    start = nav.odometry.pose
    status, result = nav.run(LEFT, FORWARD, STOP)
    assert (status, result.outcome) == (GoalStatus.STATUS_SUCCEEDED, RunOutcome.ARRIVED)
    assert result.steps == 3
    pose = nav.odometry.pose
    turned = math.remainder(pose.yaw - start.yaw, math.tau)
    # On a busy machine the robot goes on until the watchdog's half second is over, at most 0.25 m or
    # 15 degrees too far; how well the controller meets its goals is test_controller's matter.
    assert 0.7 < turned < math.radians(45) + 0.35
    moved = math.hypot(pose.x - start.x, pose.y - start.y)
    assert 0.17 < moved < 0.25 + 0.3
    assert result.distance_travelled == pytest.approx(moved, abs=0.05)
    rig.until(lambda: len(nav.actions) == 3)
    assert [a.kind for a in nav.actions] == [NavAction.TURN_LEFT, NavAction.FORWARD, NavAction.STOP]
    assert [(a.distance, round(a.angle, 4)) for a in nav.actions] == [(0.0, 0.7854), (0.25, 0.0), (0.0, 0.0)]
    assert [a.step for a in nav.actions] == [1, 2, 3]
    assert nav.actions[0].reasoning == "It is left." and nav.actions[0].verified
    said = [f.feedback for f in nav.feedback]
    driving = next(f for f in said if f.kind == NavAction.FORWARD)
    assert (driving.step, driving.distance, driving.angle, driving.phase) == (2, 0.25, 0.0, "executing")
    assert {"settling", "executing", "ended"} <= {f.phase for f in said}
    elapsed = [seconds(f.elapsed_time) for f in said]
    assert elapsed == sorted(elapsed) and 0.0 <= elapsed[0] < elapsed[-1] < 60.0
    # What `ros2 action send_goal --feedback` prints: what is new, and the same again once a second.
    states = [(at, f.phase, f.step) for at, f in zip(elapsed, said, strict=True)]
    again = [b[0] - a[0] for a, b in itertools.pairwise(states) if a[1:] == b[1:]]
    assert all(apart >= 0.99 for apart in again) and len(states) - len(again) < 15
    assert len(serialize_message(said[-1])) < 100
    for request in nav.requests:
        assert request.instruction == "find it" and 0 < seconds(request.timeout) < 15
        assert request.not_before.sec > 0
    moving = [c for _, c in nav.commands if c.linear.x or c.angular.z]
    assert max(c.linear.x for c in moving) <= 0.5 and max(abs(c.angular.z) for c in moving) < 0.6
    times = [at for at, _ in nav.commands]
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] < 0.1  # asked for 20 Hz and more, on a machine that may be busy
    count, ended = len(nav.commands), time.monotonic()
    # A second of zeros from navigation, one more from the supervisor; then a hand-held remote control may take over.
    rig.until(lambda: time.monotonic() - nav.commands[-1][0] > 1.0, what="silence on cmd_vel")
    assert nav.commands[-1][0] - ended < 2.7
    assert all(not c.linear.x and not c.angular.z for _, c in nav.commands[count:])


def test_several_actions_a_reply_and_a_point_in_the_picture(rig):
    height, pitch = World.from_seed(0).camera  # the simulator's own
    nav = NavigationRig(
        rig, grammar="internvla-n1", point__depth=True, point__camera_height=height, point__camera_pitch=pitch,
        point__camera_ahead=CAMERA_AHEAD, limit__action_distance=1.5,
    )  # fmt: skip
    # The second answer is about the rest between the two actions of the first.
    status, result = nav.run("→↑", "↑", "320 440", "STOP")
    assert (status, result.outcome, result.steps) == (GoalStatus.STATUS_SUCCEEDED, RunOutcome.ARRIVED, 4)
    rig.until(lambda: len(nav.actions) == 4)
    assert [action.kind for action in nav.actions] == [3, 1, 4, 0]
    there = nav.actions[2]
    assert 0.5 < there.distance < 1.1 and abs(there.angle) < 0.05  # a place on the floor, close ahead
    assert result.distance_travelled == pytest.approx(0.25 + there.distance, abs=0.1)
    assert list(nav.requests[-1].history_actions) in (["→↑", "320 440"], ["→", "↑", "320 440"])


def test_a_goal_waits_while_the_draft_starts(rig):
    """The first goal is sent as soon as the action server is there, and may be cancelled before the draft is."""
    nav = NavigationRig(rig)
    said = rig.node.create_publisher(DiagnosticArray, "/diagnostics", 10)
    rig.until_linked("supervisor_node", said)
    draft = DiagnosticStatus(name="draft_node", level=DiagnosticStatus.STALE, message="starting")
    said.publish(DiagnosticArray(status=[draft]))
    rig.until(lambda: not nav.free)

    def starting():
        nav.feedback.clear()
        handle = nav.send()
        rig.until(lambda: nav.feedback and nav.feedback[-1].feedback.phase == "starting")
        assert not nav.requests
        return handle

    handle = starting()
    handle.cancel_goal_async()
    assert nav.finish(handle)[1].outcome == RunOutcome.CANCELLED
    handle = starting()
    draft.level, draft.message = DiagnosticStatus.OK, "session open"
    said.publish(DiagnosticArray(status=[draft]))
    assert nav.finish(handle)[1].outcome == RunOutcome.ARRIVED and len(nav.requests) == 1


def test_speed_changes_in_mid_run(rig):
    nav = NavigationRig(rig, motion__speed=0.1)
    nav.script = ["It is ahead. Action: forward 75 cm"]
    handle = nav.send()
    rig.until(lambda: any(twist.linear.x > 0.05 for _, twist in nav.commands), what="slow motion")
    assert max(twist.linear.x for _, twist in nav.commands) <= 0.1 + 1e-6

    # Refused, by name, and without effect.
    assert "1.5" in rig.refused("navigation_node", "motion.speed", 9.0)
    assert "choose from stop" in rig.refused("navigation_node", "run.fallback", "panic")
    assert "type" in rig.refused("navigation_node", "motion.speed", "fast")
    assert "undeclared" in rig.refused("navigation_node", "motion.sped", 0.4)
    assert "read-only parameter" in rig.refused("navigation_node", "autostart", False)
    assert max(twist.linear.x for _, twist in nav.commands) <= 0.1 + 1e-6

    assert rig.set_parameter("navigation_node", "motion.speed", 0.4).successful
    rig.until(lambda: any(twist.linear.x > 0.3 for _, twist in nav.commands), 10.0, "fast motion")
    _, result = nav.finish(handle)
    assert result.outcome == RunOutcome.ARRIVED and result.steps == 2
    assert max(twist.linear.x for _, twist in nav.commands) <= 0.4 + 1e-6
    # The next run's budget.
    assert rig.set_parameter("navigation_node", "run.max_steps", 1).successful
    _, result = nav.run("Action: forward 25 cm", "Action: forward 25 cm")
    assert result.outcome == RunOutcome.STEP_BUDGET and result.steps == 1


def test_another_models_grammar_drives_the_robot(rig):
    nav = NavigationRig(rig, grammar="navila")
    said = "I see it. The next action is move forward 25 cm."
    status, result = nav.run(said, "The next action is turn left 15 degree.", "The next action is stop.")
    assert (status, result.outcome, result.steps) == (GoalStatus.STATUS_SUCCEEDED, RunOutcome.ARRIVED, 3)
    assert nav.requests[-1].history_actions == ["move forward 25 cm", "turn left 15 degrees"]
    assert sum(action.distance for action in nav.actions) == 0.25
    assert nav.run("I see it. Action: forward 25 cm")[1].outcome == RunOutcome.UNPARSABLE_REPLY


def test_bad_ends_are_named_and_the_next_run_works(rig):
    nav = NavigationRig(rig, run__decode_timeout_s=2.0)
    start = nav.odometry.pose

    status, result = nav.run("Action: forward 25 cm now")
    assert (status, result.outcome) == (GoalStatus.STATUS_ABORTED, RunOutcome.UNPARSABLE_REPLY)
    nav.script = [(Decode.Response.CANCELED, "dropped"), STOP]
    assert nav.finish(nav.send())[1].outcome == RunOutcome.ARRIVED
    for code, outcome in [
        (Decode.Response.NO_IMAGE, RunOutcome.NO_OBSERVATION),
        (Decode.Response.LINK_LOST, RunOutcome.LINK_LOST),
        (Decode.Response.REFUSED, RunOutcome.VERIFIER_REFUSED),
        (Decode.Response.TIMED_OUT, RunOutcome.DECODE_TIMEOUT),
        (Decode.Response.FAILED, RunOutcome.INTERNAL_ERROR),
    ]:
        _, result = nav.run((code, "This is why."))
        assert (result.outcome, result.message) == (outcome, "This is why.")
    for goal in [{"instruction": " "}, {"time_limit": to_duration(-1.0)}]:
        assert nav.run(**goal)[1].outcome == RunOutcome.BAD_GOAL
    nav.age = 20.0
    _, result = nav.run(FORWARD)
    assert result.outcome == RunOutcome.STALE_OBSERVATION
    nav.age = 0.0
    began = time.monotonic()
    _, result = nav.run(HANG)
    assert result.outcome == RunOutcome.DECODE_TIMEOUT and time.monotonic() - began < 15.0
    nav.release.set()  # its late answer, "forward", must move nothing
    count = len(nav.odometry.samples)
    rig.until(lambda: len(nav.odometry.samples) > count + 20)
    assert nav.odometry.pose == start

    _, result = nav.run(LEFT, LEFT, max_steps=1)
    assert (result.outcome, result.steps) == (RunOutcome.STEP_BUDGET, 1)
    _, result = nav.run(*[LEFT] * 20, time_limit=to_duration(1.0))
    assert result.outcome == RunOutcome.TIME_BUDGET
    assert nav.run(STOP)[1].outcome == RunOutcome.ARRIVED


def test_cancel_stops_within_the_watchdogs_time(rig):
    nav = NavigationRig(rig)
    nav.script = [LEFT] * 8  # it still runs when the second goal comes
    handle = nav.send()
    rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
    second = nav.finish(nav.send())[1]
    assert second.outcome == RunOutcome.BAD_GOAL and "under way" in second.message
    rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
    asked = time.monotonic()
    nav.client.cancel(handle)
    status, result = nav.finish(handle)
    assert (status, result.outcome) == (GoalStatus.STATUS_CANCELED, RunOutcome.CANCELLED)
    after = [c for at, c in nav.commands if at > asked + 0.5]
    assert all(c.angular.z == 0.0 for c in after)
    assert nav.run(STOP)[1].outcome == RunOutcome.ARRIVED


def test_the_safety_supervisor_holds_and_ends_runs(rig):
    nav = NavigationRig(rig, apart="supervisor_node", run__safety_patience_s=4.0)
    stop = rig.node.create_publisher(Bool, "emergency_stop", qos.STATE)
    joystick = rig.node.create_publisher(Twist, "cmd_vel_joy", qos.STATE)
    rig.until_linked("supervisor_node", stop, joystick)

    def begin(*script):
        nav.script, nav.requests = list(script), []
        handle = nav.send()
        rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
        return handle

    # Latched: it ends the run at once, and the next one before it begins.
    handle = begin(LEFT, LEFT)
    stop.publish(Bool(data=True))
    status, result = nav.finish(handle)
    assert (status, result.outcome) == (GoalStatus.STATUS_ABORTED, RunOutcome.SAFETY_STOP)
    assert "Emergency stop" in result.message
    _, result = nav.run(LEFT)
    assert (result.outcome, result.steps) == (RunOutcome.SAFETY_STOP, 0)
    assert rig.call(Trigger, "emergency_stop_reset", Trigger.Request()).success
    rig.until(lambda: nav.free)

    # It passes: the same action goes on.
    handle = begin(LEFT, STOP)
    nav.camera(False)
    rig.until(lambda: not nav.free and nav.odometry.velocity.wz == 0.0)
    nav.camera(True)
    assert nav.finish(handle)[1].outcome == RunOutcome.ARRIVED
    assert list(nav.requests[-1].history_actions) == ["turn left 45 degrees"]

    # It lasts.
    handle = begin(LEFT, LEFT, LEFT, LEFT)
    nav.camera(False)
    _, result = nav.finish(handle)
    assert result.outcome == RunOutcome.SAFETY_STOP and "camera" in result.message
    nav.camera(True)
    rig.until(lambda: nav.free)

    # The operator's hand: what was decided before it is not carried out after it.
    handle = begin(LEFT, STOP)
    for _ in range(10):
        joystick.publish(Twist())
        time.sleep(0.05)
    assert nav.finish(handle)[1].outcome == RunOutcome.ARRIVED
    assert len(nav.requests) >= 2

    # The supervisor's own death.
    handle = begin(LEFT, LEFT)
    died = time.time()
    nav.supervisor.process.send_signal(signal.SIGKILL)
    _, result = nav.finish(handle)
    assert result.outcome == RunOutcome.SAFETY_STOP and "supervisor" in result.message
    moving = max(sample[0] for sample in nav.odometry.samples if abs(sample[3].wz) > 0.01)
    assert moving - died < 0.5 + 0.15  # the driver's own time-out, and what braking takes


def test_goes_back_when_the_link_is_lost_and_has_its_arrival_checked(rig):
    nav = NavigationRig(rig, "return", run__fallback="return", run__arrival_check="service")
    start = nav.odometry.pose
    _, result = nav.run(STOP, instruction="find the silver bottle")
    assert result.outcome == RunOutcome.NOT_THERE and "not confirmed" in result.message
    nav.requests.clear()
    nav.actions.clear()
    # This supervisor watches no link: the run asks again after each leg.
    lost = (Decode.Response.LINK_LOST, "This is why.")
    _, result = nav.run(LEFT, "Action: turn right 15 degrees", *[lost] * 60)
    assert result.outcome == RunOutcome.LINK_LOST and result.steps == 2
    assert result.message == "This is why. The robot stands where it began."
    pose = nav.odometry.pose
    # As above, a busy machine's legs may end too far; each is chosen from where the last one led.
    assert abs(math.remainder(pose.yaw - start.yaw, math.tau)) < math.radians(20)
    legs = nav.actions[2:]
    assert legs and all(leg.retracing and not leg.verified for leg in legs)
    assert [a.step for a in nav.actions] == list(range(1, len(nav.actions) + 1))
    assert not nav.actions[1].retracing and seconds(nav.actions[1].step_time) > 1.0
    first, second, third = nav.requests[:3]
    assert not first.history_actions and not any(r.allow_unverified for r in nav.requests)
    assert list(second.history_actions) == ["turn left 45 degrees"]
    assert list(third.history_actions) == ["turn left 45 degrees", "turn right 15 degrees"]
    # Stamps go back as they came: to the nanosecond.
    assert list(third.history_stamps) == [first.not_before, second.not_before]


def test_deactivate_stops_the_robot_first_and_activate_takes_goals_again(rig):
    nav = NavigationRig(rig)

    def change(transition: int) -> bool:
        return rig.change("navigation_node", transition)

    nav.script = [LEFT] * 8
    end = nav.client.result(nav.send())
    rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
    assert change(Transition.TRANSITION_DEACTIVATE)
    count = len(nav.odometry.samples)
    rig.until(lambda: len(nav.odometry.samples) > count, what="a sample of after that")
    assert abs(nav.odometry.velocity.wz) < 0.1
    assert end()[1].outcome == RunOutcome.SHUTDOWN
    _, result = nav.run(LEFT)
    assert (result.outcome, result.steps) == (RunOutcome.SHUTDOWN, 0)
    assert "not active" in result.message
    assert change(Transition.TRANSITION_ACTIVATE)
    assert nav.run(STOP)[1].outcome == RunOutcome.ARRIVED


def test_without_a_draft_node_the_run_says_so(rig):
    nav = NavigationRig(rig)
    rig.node.destroy_service(nav.service)
    _, result = nav.run(LEFT)
    assert result.outcome == RunOutcome.LINK_LOST and "start the draft node" in result.message


def test_a_robot_that_falls_silent_is_stopped_and_the_run_ends(rig):
    nav = NavigationRig(rig, apart="simulator_node")
    nav.script = [LEFT, LEFT]
    handle = nav.send()
    rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
    nav.simulator.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    _, result = nav.finish(handle)
    assert result.outcome == RunOutcome.ODOMETRY_LOST
    # The watchdog acts half a second after the last odometry, long before the run's own time-out.
    late = [c for at, c in nav.commands if at > stopped + 1.0]
    assert late and all(c.angular.z == 0.0 for c in late)
    nav.simulator.process.send_signal(signal.SIGCONT)
    rig.until(lambda: nav.odometry.velocity.wz == 0.0)
    assert nav.run(STOP)[1].outcome == RunOutcome.ARRIVED


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM])
def test_the_robot_stops_when_the_navigation_node_does(rig, number):
    nav = NavigationRig(rig, apart="navigation_node")
    nav.script = [LEFT, LEFT]
    handle = nav.send()
    end = nav.client.result(handle)
    rig.until(lambda: abs(nav.odometry.velocity.wz) > 0.3)
    ended = time.time()
    nav.navigation.process.send_signal(number)
    rig.until(lambda: nav.odometry.velocity.wz == 0.0, 10.0)
    moving = max(sample[0] for sample in nav.odometry.samples if abs(sample[3].wz) > 0.01)
    assert moving - ended < 0.5 + 0.15  # and what braking takes
    if number == signal.SIGTERM:
        assert end()[1].outcome == RunOutcome.SHUTDOWN
        assert nav.navigation.process.wait(5.0) == 0
    assert not any("Traceback" in line for line in rig.lines)


def test_nav2_as_the_executor_takes_nav2s_messages(ros_domain, tmp_path):
    (tmp_path / "nav2_msgs").mkdir()
    (tmp_path / "nav2_msgs" / "__init__.py").write_text("")  # as where they are not installed
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "dsd_ros.ros.entry", "navigation_node", "--ros-args", "-p", "executor:=nav2"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "executor is nav2, and Nav2's messages cannot be imported" in ended.stderr
    assert "or set executor to own." in ended.stderr
