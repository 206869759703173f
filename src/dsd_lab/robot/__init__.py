# SPDX-License-Identifier: Apache-2.0
"""Robots that are none: the simulated one with faults on demand, and a stand-in for the Go2."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def robot_command(node: str, parameters: Mapping[str, Any]) -> list[str]:
    """The command line of ``simulator_node`` or ``go2_standin_node`` with these parameters over its defaults."""
    given = [word for name, value in parameters.items() for word in ("-p", f"{name}:={json.dumps(value)}")]
    return [sys.executable, "-m", "dsd_lab.robot", node, "--ros-args", *given]
