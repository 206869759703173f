# SPDX-License-Identifier: Apache-2.0
"""The Ray Serve application, with two real replicas: a robot whose replica is killed goes on with the same tokens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ray" / "bin" / "python"  # make ray-venv
RUN = ROOT / "tools" / "ray_replicas.py"


@pytest.mark.engine
def test_replies_are_equal_although_replicas_are_killed():
    if not PYTHON.is_file():
        pytest.skip("`make ray-venv` makes the environment with Ray")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [PYTHON, RUN, "20"], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "20 of 20 replies equal" in done.stdout
