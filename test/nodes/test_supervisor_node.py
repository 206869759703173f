# SPDX-License-Identifier: Apache-2.0
"""The supervisor as a process, over real DDS: every cause provoked, arbitration, services, its end."""

from __future__ import annotations

import json
import signal
import time

import pytest
from diagnostic_msgs.msg import DiagnosticArray
from ros_rig import Rig
from std_msgs.msg import String

from dsd_lab.cli.main import main
from dsd_lab.faults import safety_bench
from dsd_lab.faults.safety_bench import PARAMETERS, PROVOCATIONS, SETTINGS, StandIn
from dsd_msgs.msg import NavAction, SafetyState
from dsd_ros.navigation.safety.causes import Cause, Source
from dsd_ros.ros import qos
from dsd_ros.ros.running import EXIT_GAVE_UP

# What `dsd-lab bench safety` measures is at most 0.5 s; this is for a machine with far too much to do.
LATEST_S = 1.5


def started(rig: Rig, start, setting: str = "") -> tuple[StandIn, object]:
    given = PARAMETERS | SETTINGS[setting]
    parameters = {name.replace(".", "__"): value for name, value in given.items()}
    child = start("supervisor_node", **parameters)
    standin = StandIn(rig.node)
    standin.drive()
    return standin, child


def test_every_cause_stops_the_robot_and_is_named(rig):
    standin, child = started(rig, rig.start)
    levels: set[int] = set()

    def on_diagnostics(message) -> None:
        for status in message.status:
            if status.name == "supervisor_node":
                levels.add(status.level[0])

    rig.node.create_subscription(DiagnosticArray, "/diagnostics", on_diagnostics, 10)
    provoked = set()
    for provocation in (p for p in PROVOCATIONS if not p.setting):
        assert standin.trial(provocation) < LATEST_S, provocation.name
        provoked.add(provocation.cause)
        sentences = standin.state.sentences
        assert len(sentences) == len(standin.state.causes)
    assert provoked == set(Cause) - {Cause.NO_ACTION, Cause.SUPERVISOR_FAULT}  # no message provokes the latter
    standin.drive()
    rig.until(lambda: levels == {0, 1, 2}, what="each level in /diagnostics")
    assert not any("Traceback" in line for line in rig.lines)

    # Interrupted while the robot moves: zero is the last word.
    began = time.monotonic()
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(10.0) == 0
    assert time.monotonic() - began < 5.0
    rig.until(lambda: not rig.node.count_publishers("cmd_vel"), what="word of its end")
    rig.until(lambda: not standin.commands[-1][1], what="zero as the last word")


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name])
def test_what_stops_the_robot_in_other_settings(rig, setting):
    standin, _ = started(rig, rig.host, setting)
    for provocation in (p for p in PROVOCATIONS if p.setting == setting):
        assert standin.trial(provocation) < LATEST_S, provocation.name


@pytest.mark.slow
def test_a_supervisor_that_hears_none_of_those_that_publish_ends(rig):
    """As it would if its middleware hung: a node that is in the graph, and whose heartbeats don't come."""
    child = rig.start("supervisor_node")
    heart = rig.node.create_publisher(String, "dsd/heartbeat", qos.STATE)
    rig.until_linked("supervisor_node", heart)
    assert child.process.wait(90.0) == EXIT_GAVE_UP
    rig.until(lambda: any("hears none" in line for line in rig.lines), what="the reason")


def test_the_supervisors_limits_hold_from_their_change_on(rig):
    standin, _ = started(rig, rig.host)
    assert standin.newest.linear.x == 0.4
    assert rig.set_parameter("supervisor_node", "limit.speed", 0.2).successful
    rig.until(lambda: Cause.MOTION_REFUSED in standin.causes, what="a refusal")
    assert "faster than 0.20 m/s" in standin.state.sentences[standin.causes.index(Cause.MOTION_REFUSED)]
    assert rig.set_parameter("supervisor_node", "limit.speed", 1.0).successful
    standin.drive()
    assert "read-only parameter" in rig.refused("supervisor_node", "require.camera", "none")


def test_arbitration_and_what_is_published(rig):
    standin, _ = started(rig, rig.host)
    rig.until(lambda: len(rig.node.get_publishers_info_by_topic("cmd_vel")) == 1)
    assert standin.state.source == Source.NAVIGATION and not standin.state.stopped
    assert standin.newest.linear.x == 0.4

    # The operator wins, also over what stops navigation, and navigation's action is over after that.
    standin.muted.add("camera")
    standin.joystick = (-0.3, 0.5)
    rig.until(lambda: standin.newest.linear.x == -0.3 and standin.newest.angular.z == 0.5)
    rig.until(lambda: {Cause.OPERATOR, Cause.CAMERA_STALE} <= set(standin.causes))
    assert standin.state.source == Source.OPERATOR and not standin.state.stopped
    standin.joystick = (7.0, 0.0)
    rig.until(lambda: standin.newest.linear.x == 1.0)
    standin.joystick = None
    standin.muted.clear()
    rig.until(lambda: standin.causes == [Cause.NO_ACTION])
    assert not standin.commands[-1][1] and standin.state.stopped
    standin.drive()

    # Latched: false lifts nothing, a late listener hears the state, the reset answers.
    standin.call(standin.stop_client)
    standin.press_emergency_stop(False)
    rig.until(lambda: Cause.EMERGENCY_STOP in standin.causes)
    standin.joystick = (0.3, 0.0)
    heard: list[SafetyState] = []
    rig.node.create_subscription(SafetyState, "dsd/safety_state", heard.append, qos.LATCHED)
    rig.until(lambda: heard and heard[0].causes[0] == SafetyState.EMERGENCY_STOP)
    assert "emergency_stop" in heard[0].sentences[0]
    count = len(standin.commands)
    rig.until(lambda: len(standin.commands) > count + 5)
    assert not any(moves for _, moves in standin.commands[count:])
    standin.joystick = None
    assert standin.call(standin.reset_client).success
    assert not standin.call(standin.reset_client).success
    standin.drive()

    # No command: zeros for a while, then silence, so that another controller may be used.
    standin.muted.add("command")
    rig.until(lambda: Cause.COMMAND_STALE in standin.causes)
    rig.until(lambda: time.monotonic() - standin.commands[-1][0] > 1.0)
    assert not standin.commands[-1][1]


def test_the_bench_reports_each_cause(ros_domain, tmp_path, monkeypatch):
    chosen = tuple(p for p in PROVOCATIONS if p.cause in (Cause.LINK_LOST, Cause.TILT))
    monkeypatch.setattr(safety_bench, "PROVOCATIONS", chosen)
    monkeypatch.setattr(safety_bench, "SETTINGS", {"": {}, "draft_only": SETTINGS["draft_only"]})
    path = tmp_path / "safety.json"
    assert main(["bench", "safety", "--trials", "2", "--json", str(path)]) in (0, 1)  # 1: a machine with too much to do
    report = json.loads(path.read_text())
    assert [row["cause"] for row in report["rows"]] == ["TILT", "LINK_LOST", "LINK_LOST"]
    for row in report["rows"]:
        assert row["trials"] == 2 and 0 < row["median_s"] <= row["worst_s"] <= report["worst_s"]
    assert main(["bench", "safety", "--trials", "0"]) == 2


def test_the_messages_constants_are_the_causes():
    for cause in Cause:
        assert getattr(SafetyState, cause.name) == cause
    for source in Source:
        assert getattr(SafetyState, f"SOURCE_{source.name}") == source
    assert not NavAction().verified and SafetyState().source == Source.NONE


def test_an_ordinary_start_warns_of_nothing(rig):
    rig.host("supervisor_node", require__heartbeats="", require__link="")
    rig.until(lambda: any("silent" in line for line in rig.lines), what="what the supervisor waits for")
    rig.host("simulator_node")
    rig.until(lambda: any("ready" in line for line in rig.lines), what="the robot being there")
    assert not [line for line in rig.lines if "[supervisor_node]" in line and "WARN" in line]
    rig.fault("camera freeze")
    rig.until(lambda: any("WARN" in line and "camera" in line for line in rig.lines), what="a warning after the start")
