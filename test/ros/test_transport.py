# SPDX-License-Identifier: Apache-2.0
"""Fast DDS carries messages by UDP alone, wherever the nodes of a process look for others."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rclpy.utilities import get_rmw_implementation_identifier
from ros_rig import CameraRig

from dsd_ros.ros.camera import Camera
from dsd_ros.ros.transport import use_udp

fast_dds = pytest.mark.skipif("fastrtps" not in get_rmw_implementation_identifier(), reason="Fast DDS' matter alone")

NODE = """
import os
from dsd_ros.ros.transport import use_udp
use_udp(os.environ)
import rclpy
rclpy.init()
rclpy.create_node("node")
print(open("/proc/self/maps").read())
"""


@fast_dds
@pytest.mark.parametrize("wide", ["SUBNET", "LOCALHOST"])
def test_a_node_shares_no_memory(ros_domain, monkeypatch, wide):
    for variable in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("ROS_AUTOMATIC_DISCOVERY_RANGE", wide)
    run = subprocess.run([sys.executable, "-c", NODE], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "librmw_fastrtps" in run.stdout and "/dev/shm/fastrtps" not in run.stdout


@fast_dds
def test_large_pictures_arrive(rig):
    """As datagrams without repeats, about one of ten would."""
    camera, source = Camera(rig.node), CameraRig(rig)
    large = np.random.default_rng(0).integers(0, 256, (1080, 1920, 3), np.uint8)

    def received_of_ten() -> int:
        before = camera.received
        for _ in range(10):
            source.show(large)
            time.sleep(0.2)
        return camera.received - before

    # At first the camera does not know yet that the publisher repeats what is lost.
    rig.until(lambda: received_of_ten() >= 8, what="nearly all pictures")


@pytest.mark.parametrize(
    ("given", "profile"),
    [
        ({}, "fastdds.xml"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "SUBNET"}, "fastdds.xml"),
        ({"ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}, "fastdds_localhost.xml"),
        ({"ROS_LOCALHOST_ONLY": "1"}, "fastdds_localhost.xml"),
        ({"FASTDDS_DEFAULT_PROFILES_FILE": "own.xml"}, ""),
    ],
)
def test_the_profile_fits_the_range_of_discovery_and_the_users_own_precedes(given, profile):
    environment = dict(given)
    use_udp(environment)
    if not profile:
        assert environment == given
        return
    older, newer = (environment[f"{name}_DEFAULT_PROFILES_FILE"] for name in ("FASTRTPS", "FASTDDS"))
    assert older == newer and Path(newer).name == profile
    assert environment.get("ROS_AUTOMATIC_DISCOVERY_RANGE") != "LOCALHOST"
    (participant,) = ElementTree.parse(newer).findall(".//{*}participant")
    (initial,) = participant.findall(".//{*}initialAnnouncements")
    seconds = int(initial.findtext("{*}count")) * int(initial.findtext("{*}period/{*}nanosec")) * 1e-9
    # Without multicast the others find a node by its announcements alone; theirs come every 3 s.
    assert participant.get("is_default_profile") == "true" and seconds > 3.0
    # One socket takes pictures and tokens; by default it has room for less than a picture.
    assert int(ElementTree.parse(newer).findtext(".//{*}receiveBufferSize")) > 2 * 640 * 480 * 3
