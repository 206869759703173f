# SPDX-License-Identifier: Apache-2.0
"""The simulated Go2 over DDS: publishes what a Go2 stack does, obeys cmd_vel, and stops without it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from geometry_msgs.msg import Twist
from ros_rig import OdometryRig
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image, Imu
from std_msgs.msg import Float64, UInt32
from std_srvs.srv import Trigger

from dsd_msgs.srv import CheckArrival
from dsd_ros.ros import qos
from dsd_ros.ros.images import to_rgb
from dsd_ros.ros.stamps import seconds


@pytest.fixture
def heard(rig):
    """Everything that the robot publishes, by topic."""
    topics = {
        "camera/image_raw": (Image, qos.CAMERA),
        "camera/camera_info": (CameraInfo, qos.CAMERA),
        "imu": (Imu, qos.STATE),
        "/clock": (Clock, qos.CLOCK),
        "ground_truth/collisions": (UInt32, qos.LATCHED),
        "ground_truth/target_distance": (Float64, qos.STATE),
    }
    found = {topic: [] for topic in topics}
    for topic, (kind, profile) in topics.items():
        rig.node.create_subscription(kind, topic, found[topic].append, profile)
    return found


def test_topics_and_their_contents(rig, heard):
    odometry = OdometryRig(rig)
    rig.host("simulator_node", seed=0, instruction="find the silver bottle")
    rig.until(lambda: len(heard["camera/image_raw"]) >= 20 and len(odometry.samples) >= 60)
    image, info = heard["camera/image_raw"][-1], heard["camera/camera_info"][-1]
    assert (image.encoding, image.header.frame_id) == ("bgr8", "front_camera_optical_frame")
    assert to_rgb(image).std() > 5.0  # a picture, not a plain
    assert (info.height, info.width) == (image.height, image.width)
    assert info.k[2] == image.width / 2 and info.k[0] == info.k[4] > 0
    assert abs(seconds(image.header.stamp) - time.time()) < 30.0  # the stamps are wall time's
    # By the robot's own clock the rates hold, however busy this machine is.
    stamps = [sample[0] for sample in odometry.samples]
    assert np.median(np.diff(stamps)) > 0.8 / 50
    assert all(b > a for a, b in itertools.pairwise(stamps))
    frames = [seconds(picture.header.stamp) for picture in heard["camera/image_raw"]]
    assert min(np.diff(frames)) > 0.0  # how many there are is the machine's affair, up to the rate
    assert np.median(np.diff(frames)) > 0.8 / 15
    assert heard["imu"][-1].linear_acceleration.z == pytest.approx(9.81)
    assert heard["/clock"] and heard["ground_truth/collisions"][-1].data == 0
    distance = heard["ground_truth/target_distance"][-1].data
    assert distance > 0.6
    request = CheckArrival.Request(instruction="find the silver bottle")
    answer = rig.call(CheckArrival, "dsd/check_arrival", request)
    assert not answer.arrived and answer.distance == pytest.approx(distance)
    assert "silver bottle" in answer.message


def test_moves_while_commands_come_and_stops_half_a_second_after_the_last(rig, heard):
    odometry = OdometryRig(rig)
    command = rig.node.create_publisher(Twist, "cmd_vel", qos.COMMAND)
    rig.host("simulator_node")
    rig.until(lambda: odometry.samples)
    rig.until_linked("simulator_node", command)
    twist = Twist()
    twist.angular.z = 0.6  # turning has no obstacles
    for _ in range(40):
        command.publish(twist)
        last = time.time()
        time.sleep(0.04)
    rig.until(lambda: odometry.velocity.wz == 0.0)
    moving = [sample for sample in odometry.samples if abs(sample[3].wz) > 0.01]
    assert max(abs(sample[3].wz) for sample in moving) == pytest.approx(0.6, abs=0.01)
    # Stamps are wall time's, so scheduling delays of this test's own process do not count.
    stopped_after = moving[-1][0] - last
    assert 0.3 < stopped_after < 0.5 + 0.15  # and what braking takes: 0.6 / 12 s
    assert odometry.pose != odometry.samples[0][2]
    assert rig.call(Trigger, "simulator/reset_world", Trigger.Request()).success
    rig.until(lambda: odometry.pose == odometry.samples[0][2])


def test_a_command_that_is_no_number_does_not_move_or_kill_it(rig):
    odometry = OdometryRig(rig)
    command = rig.node.create_publisher(Twist, "cmd_vel", qos.COMMAND)
    child = rig.start("simulator_node")
    rig.until(lambda: odometry.samples)
    rig.until_linked("simulator_node", command)
    for field in ("x", "y", "z"):
        for value in (float("nan"), float("inf")):
            twist = Twist()
            setattr(twist.angular if field == "z" else twist.linear, field, value)
            command.publish(twist)
            time.sleep(0.05)
    count = len(odometry.samples)
    rig.until(lambda: len(odometry.samples) > count + 20)
    assert child.process.poll() is None
    assert odometry.samples[0][2] == odometry.pose


def test_the_camera_can_fall_silent_and_come_back(rig, heard):
    rig.host("simulator_node")
    rig.until(lambda: heard["camera/image_raw"])

    def switch(on: bool) -> None:
        rig.fault("camera ok" if on else "camera freeze")

    def shown() -> int:
        """How many pictures came while the clock ticked 20 times."""
        count, clock = len(heard["camera/image_raw"]), len(heard["/clock"])
        rig.until(lambda: len(heard["/clock"]) > clock + 20)
        return len(heard["camera/image_raw"]) - count

    switch(False)
    rig.until(lambda: shown() == 0, what="no pictures")  # after those that were on their way
    assert shown() == 0
    switch(True)
    rig.until(shown, what="pictures")


def test_twice_as_fast(rig, heard):
    odometry = OdometryRig(rig)
    rig.host("simulator_node", rate=4.0)
    rig.until(lambda: len(odometry.samples) > 400)
    (first, began, *_), (last, ended, *_) = odometry.samples[0], odometry.samples[-1]
    assert (last - first) / (ended - began) == pytest.approx(4.0, rel=0.3)


def test_bad_parameters_end_it_with_a_sentence(rig):
    child = rig.start("simulator_node", instruction="find peace")
    rig.until(lambda: child.process.poll() is not None)
    child.reader.join(5.0)
    assert child.process.returncode == 2
    assert any("names nothing" in line for line in rig.lines), rig.lines
    assert not any("Traceback" in line for line in rig.lines)
    for given, sentence in (({"seed": -1}, "'seed'"), ({"rate": "2 a second"}, "'rate' must be of type float")):
        with pytest.raises(ValueError, match=sentence):
            rig.host("simulator_node", **given)
