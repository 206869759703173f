# SPDX-License-Identifier: Apache-2.0
"""Robot and verifier in two network namespaces: the cable is pulled, and the robot roams."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROBOT = Path(__file__).parents[1] / "support" / "namespace_robot.py"
# Without root, a user namespace gives the right to make the others.
UNSHARE = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]


@pytest.fixture
def namespaces():
    """Skips where no two namespaces with a cable between them can be made."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no program '{tool}' to make network namespaces with")
    cable = "ip link add veth0 type veth peer name veth1 && unshare --net true"
    done = subprocess.run([*UNSHARE, "sh", "-c", cable], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {done.stderr.strip()}")


@pytest.mark.slow
def test_tokens_survive_a_bad_link_a_pulled_cable_and_a_new_address(namespaces, record_property):
    done = subprocess.run([*UNSHARE, sys.executable, str(ROBOT)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    emulation = report.pop("emulation")
    record_property("emulation", emulation)
    print(f"delay, jitter, loss and rate by {emulation}")
    assert emulation == "netem" or emulation.startswith("proxy: ")
    assert report.pop("verifier ended") == 0
    assert set(report) == {"as it is", "link down and up", "address changed"}
    for name, result in report.items():
        assert result["equal"], f"{name}: {result}"
        assert result["tokens"] == 40
