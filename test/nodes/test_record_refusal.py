# SPDX-License-Identifier: Apache-2.0
"""`dsd record` refuses a topic name that ROS does not accept before it creates anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["bad-topic", "good_topic/", "a//b"])
def test_a_wrong_topic_name_is_refused_before_anything_is_made(ros_domain, tmp_path, name):
    command = [sys.executable, "-m", "dsd_ros.cli", "record", str(tmp_path / "bag"), "--topic", name, "--seconds", "5"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=dict(os.environ))
    output = result.stdout + result.stderr
    assert result.returncode == 2 and f"The topic '{name}' cannot be recorded: topic name must not" in output, output
    assert not (tmp_path / "bag").exists() and "Traceback" not in output


def test_a_recording_that_heard_no_robot_says_so_and_fails(ros_domain, tmp_path):
    command = [sys.executable, "-m", "dsd_ros.cli", "record", str(tmp_path / "bag"), "--namespace", "nobody"]
    result = subprocess.run([*command, "--seconds", "3"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 1, result.stderr
    assert f"recorded {tmp_path / 'bag'}: " in result.stdout and " s, " in result.stdout
    assert f"nothing was heard of a robot in namespace '/nobody' and ROS domain {ros_domain}" in result.stderr
