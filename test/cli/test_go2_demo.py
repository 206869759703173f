# SPDX-License-Identifier: Apache-2.0
"""The whole demo through the real robot's driver, against the stand-in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_shipped_pair_finds_the_silver_bottle_through_the_go2s_driver(ros_domain, tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsd_ros.cli", "demo", "--robot", "go2-standin"]
    run = subprocess.run(
        [*command, "--headless", "--verbose", "--json", str(path)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(path.read_text())
    assert report["reached"] and report["robot"] == "go2-standin" and report["collisions"] == 0
    assert "with its obstacle avoidance" in run.stdout
