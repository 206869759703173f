# SPDX-License-Identifier: Apache-2.0
"""The Go2's node against the stand-in over DDS: topics, both layouts of the state, every fault, the end."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from geometry_msgs.msg import Twist
from ros_rig import OdometryRig
from sensor_msgs.msg import BatteryState, CameraInfo, Image, Imu
from std_srvs.srv import Trigger
from unitree_api.msg import Request, Response

from dsd_lab.robot.go2_standin_node import encode_picture
from dsd_ros.nodes.go2_node import decode_picture
from dsd_ros.robot.driver import DriverError, FaultCause, Posture
from dsd_ros.robot.go2 import driver as go2_driver
from dsd_ros.robot.go2.protocol import SportApi
from dsd_ros.ros import qos
from dsd_ros.ros.go2_messages import RosLink
from dsd_ros.ros.images import ImageMessageError, to_rgb
from dsd_ros.ros.stamps import seconds


class RobotRig:
    """A stand-in, and what is said on its topics."""

    def __init__(self, rig, **parameters) -> None:
        self.rig = rig
        self.requests: list[tuple[float, Request]] = []
        self.answers: list[tuple[float, Response]] = []
        self.health: list[DiagnosticStatus] = []
        hear = rig.node.create_subscription
        listeners = [
            hear(kind, f"/api/sport/{name}", self._note(heard), qos.ROBOT_SERVICE)
            for kind, name, heard in (
                (Request, "request", self.requests), (Response, "response", self.answers),
            )
        ]  # fmt: skip
        self.listening = lambda: all(listener.get_publisher_count() for listener in listeners)
        hear(DiagnosticArray, "/diagnostics", self._on_health, qos.STATE)
        self.command = rig.node.create_publisher(Twist, "cmd_vel", qos.COMMAND)
        self.odometry = OdometryRig(rig)
        self.standin = rig.start("go2_standin_node", **parameters)

    def _note(self, heard):
        return lambda message: heard.append((time.monotonic(), message))

    def _on_health(self, message: DiagnosticArray) -> None:
        self.health += [status for status in message.status if status.name == "go2_node"]

    def start_node(self, **parameters):
        self.node = self.rig.start("go2_node", **parameters)
        self.rig.until(lambda: self.says("ready", DiagnosticStatus.OK) and self.listening(), what="go2_node ready")
        self.rig.until_linked("go2_node", self.command)
        return self.node

    def says(self, words: str, level: bytes = DiagnosticStatus.ERROR) -> bool:
        return bool(self.health) and self.health[-1].level == level and words in self.health[-1].message

    def value(self, key: str) -> str:
        return {item.key: item.value for item in self.health[-1].values}[key]

    def set_fault(self, name: str) -> None:
        self.rig.fault("robot ok" if name == "none" else f"robot {name}")

    def until_driving(self, what: str = "motion") -> None:
        self.rig.until(lambda: self.drive(0.1) and not self.still(), what=what)

    def drive(self, length: float, wz: float = 0.6, vx: float = 0.0) -> float:
        """Publish cmd_vel for a while; when the last one was sent."""
        twist = Twist()
        twist.angular.z, twist.linear.x = wz, vx
        end = time.monotonic() + length
        while time.monotonic() < end:
            self.command.publish(twist)
            last = time.monotonic()
            time.sleep(0.04)
        return last

    def asked(self, api: int) -> list[float]:
        return [at for at, message in self.requests if message.header.identity.api_id == api]

    def stop_acknowledged(self) -> list[float]:
        return [
            at for at, message in self.answers
            if message.header.identity.api_id == SportApi.STOP_MOVE
            and message.header.status.code == 0
        ]  # fmt: skip

    def still(self) -> bool:
        velocity = self.odometry.velocity
        return abs(velocity.vx) < 1e-3 and abs(velocity.wz) < 1e-3


PLAIN = {"drive__avoidance": "off"}  # so that Moves go to the sport service


def test_it_publishes_what_the_simulated_robot_does(rig):
    heard = {}
    for topic, kind, profile in (
        ("camera/image_raw", Image, qos.CAMERA), ("camera/camera_info", CameraInfo, qos.CAMERA),
        ("imu", Imu, qos.STATE), ("battery_state", BatteryState, qos.STATE),
    ):  # fmt: skip
        heard[topic] = []
        rig.node.create_subscription(kind, topic, heard[topic].append, profile)
    # In the vendor SDK's layout of the state; the other tests have unitree_ros2's.
    robot = RobotRig(rig, instruction="find the silver bottle", path_points=True)
    robot.start_node(camera_fov=1.047198)
    rig.until(lambda: all(heard.values()) and len(robot.odometry.samples) > 20)
    image, info = heard["camera/image_raw"][-1], heard["camera/camera_info"][-1]
    assert (image.encoding, image.header.frame_id) == ("bgr8", "front_camera_optical_frame")
    assert to_rgb(image).std() > 5.0
    assert info.k[0] == pytest.approx(image.height / 2 / np.tan(np.pi / 6))
    assert abs(seconds(image.header.stamp) - time.time()) < 30.0  # the wall clock may be set meanwhile
    assert heard["imu"][-1].linear_acceleration.z == pytest.approx(9.81, abs=0.1)
    assert heard["battery_state"][-1].percentage == pytest.approx(0.8)
    stamps = [sample[0] for sample in robot.odometry.samples]
    assert all(b > a for a, b in itertools.pairwise(stamps))


def test_loss_of_cmd_vel_zero_and_ctrl_c_each_end_in_an_acknowledged_stop(rig):
    robot = RobotRig(rig)
    node = robot.start_node(**PLAIN)
    assert robot.value("posture") == "standing"  # it lay at first
    last = robot.drive(0.8)
    assert robot.odometry.velocity.wz == pytest.approx(0.6, abs=0.05)
    moves = robot.asked(SportApi.MOVE)
    assert max(b - a for a, b in itertools.pairwise(moves)) < 0.9  # the hold is 1 s
    rig.until(robot.stop_acknowledged, 20.0, "an acknowledged stop")
    assert 0.3 < robot.asked(SportApi.STOP_MOVE)[0] - last < 0.5 + 0.3
    rig.until(robot.still, 20.0)
    robot.answers.clear()
    robot.drive(0.3)
    robot.drive(0.05, 0.0)  # a zero command stops it at once, whatever the watchdog says
    rig.until(robot.stop_acknowledged, 20.0)

    robot.drive(0.3)
    robot.answers.clear()
    began = time.monotonic()
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(timeout=10) == 0
    assert time.monotonic() - began < 2.0
    rig.until(robot.stop_acknowledged, 20.0, "an acknowledged stop")
    assert not any("Traceback" in line for line in rig.lines)


def test_each_fault_is_named_and_ends_the_motion_and_a_robot_that_was_gone_is_left_lying(rig):
    robot = RobotRig(rig, lying=False)
    robot.start_node(**PLAIN)
    for fault, words in (("freeze", "state has not come"), ("die", "acknowledged"), ("reject", "3202")):
        robot.until_driving(f"motion before {fault}")
        robot.set_fault(fault)
        robot.drive(0.8)
        rig.until(lambda words=words: robot.says(words), 20.0, f"{words} after {fault}")
        begun = robot.asked(SportApi.STOP_MOVE)[-1]
        assert [at for at in robot.asked(SportApi.MOVE) if at > begun] == []
        robot.answers.clear()
        robot.set_fault("none")
        rig.until(robot.stop_acknowledged, 20.0, f"an acknowledged stop after {fault}")
        rig.until(lambda: robot.says("ready", DiagnosticStatus.OK) and robot.still(), 20.0)

    robot.drive(0.3)
    robot.standin.process.send_signal(signal.SIGKILL)
    rig.until(lambda: robot.says("state has not come"), 20.0)
    robot.standin.process.wait()
    robot.requests.clear()
    robot.standin = rig.start("go2_standin_node", lying=True)
    # Until the two have found each other again, commands reach no subscriber.
    rig.until(lambda: robot.drive(0.2) and robot.says("not standing"))
    assert robot.asked(SportApi.STAND_UP) == [] and robot.still()
    answer = rig.call(Trigger, "go2_node/stand_up", Trigger.Request())
    assert answer.success, answer.message
    robot.until_driving("motion after it stood up")
    for service in ("stop", "stand_down", "damp"):
        answer = rig.call(Trigger, f"go2_node/{service}", Trigger.Request())
        assert answer.success and "confirmed" in answer.message, answer.message


def test_the_driver_over_dds_confirms_what_it_asks_for_and_names_what_it_cannot(rig, monkeypatch):
    for name, value in (("REQUEST_S", 2.0), ("STATE_S", 0.5), ("ATTEMPTS", 2)):
        monkeypatch.setattr(go2_driver, name, value)
    robot = RobotRig(rig)
    link = RosLink(rig.node)
    driver = go2_driver.Go2Driver(link)
    rig.at_end(driver.close)
    link.attach(driver)
    rig.until_linked("go2_standin_node", *link._requests.values(), *link._subscriptions)
    rig.until(lambda: driver.state() is not None, what="the first state")
    assert driver.state().posture is Posture.LYING
    driver.stand_up()
    driver.balance()
    assert driver.start_avoidance()
    rig.until(lambda: (driver.move(0.0, 0.0, 0.6), time.sleep(0.03), driver.state().yaw_rate > 0.3)[2], what="motion")
    assert driver.fault() is None
    driver.stop()
    assert driver.state().battery == pytest.approx(0.8)
    robot.set_fault("slow")
    with pytest.raises(DriverError) as late:
        driver.stop(0.2)
    assert late.value.fault.cause is FaultCause.STOP_UNCONFIRMED
    robot.set_fault("die")
    with pytest.raises(DriverError) as silent:
        driver.balance()
    assert silent.value.fault.cause is FaultCause.NO_ANSWER
    robot.standin.process.send_signal(signal.SIGKILL)
    robot.standin.process.wait()
    rig.until(lambda: driver.fault() and driver.fault().cause is FaultCause.NO_STATE, 20.0)


def test_through_the_sdk_process_it_drives_and_ends_with_that_process(rig, tmp_path):
    """In place of the SDK's process, one with the stand-in robot in it (``sdk_standin.py``)."""
    python, pid = tmp_path / "python", tmp_path / "pid"
    program = Path(__file__).parents[1] / "robot" / "sdk_standin.py"
    python.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec {sys.executable} {program}\n")
    python.chmod(0o755)
    command, odometry = rig.node.create_publisher(Twist, "cmd_vel", qos.COMMAND), OdometryRig(rig)
    node = rig.start("go2_node", link="sdk", sdk_python=python, **PLAIN)
    twist = Twist()
    twist.angular.z = 0.6

    def turns() -> bool:
        command.publish(twist)
        return bool(odometry.samples) and odometry.velocity.wz > 0.5

    rig.until(turns, 60.0, "motion")
    os.kill(int(pid.read_text()), signal.SIGKILL)
    assert node.process.wait(timeout=20) != 0
    rig.until(lambda: any("The SDK's process ended with exit code -9." in line for line in rig.lines))


def test_without_the_sdk_its_link_is_refused_in_a_sentence(rig):
    node = rig.start("go2_node", link="sdk", sdk_python="/no/such/python")
    assert node.process.wait(timeout=60) == 2
    rig.until(lambda: any("cannot be started with /no/such/python" in line for line in rig.lines))


def test_a_fault_that_does_not_exist_is_refused(rig):
    rig.start("go2_standin_node")
    rig.fault("robot explode")
    assert any("'robot explode' is no fault; say camera freeze|ok, robot freeze" in line for line in rig.lines)


def test_pictures_survive_the_robots_jpeg_and_others_are_refused():
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:, 32:] = (200, 40, 90)
    back = decode_picture(encode_picture(picture))
    assert back.shape == picture.shape and np.abs(back.astype(int) - picture).mean() < 3.0
    data = encode_picture(picture)
    for damaged in (b"", b"no picture", data[:100], data[: len(data) // 2], bytes(9 << 20)):
        with pytest.raises(ImageMessageError):
            decode_picture(damaged)
