# SPDX-License-Identifier: Apache-2.0
"""The simulated Go2's node with faults on demand, by the topic ``simulator/fault`` (std_msgs/String):

* ``camera freeze``: no pictures; ``camera repeat``: the last picture again and again, with its old stamp;
  ``camera garbage``: invalid pictures;
* ``depth freeze``: no depth images; ``depth blind``: depth images without any known depth;
* ``robot freeze``: no odometry and imu, and commands are ignored; ``robot die``: commands are ignored;
* ``camera ok``, ``depth ok``, ``robot ok``, ``all ok``: ends the fault.
"""

from __future__ import annotations

import array
from typing import Any

import numpy as np
from geometry_msgs.msg import Twist, TwistStamped
from sensor_msgs.msg import Image
from std_msgs.msg import Header, String

from dsd_lab.robot.faults import OK, FaultBoard
from dsd_ros.nodes.simulator_node import SimulatedCamera, SimulatorNode
from dsd_ros.ros import qos
from dsd_ros.ros.running import run_main

_FAULTS = {  # see the module
    "camera": ("freeze", "repeat", "garbage"),
    "depth": ("freeze", "blind"),
    "robot": ("freeze", "die"),
}


class FaultySimulatorNode(SimulatorNode):
    """See the module."""

    def __init__(self) -> None:
        self._faults = FaultBoard(_FAULTS)
        super().__init__()
        self.create_subscription(String, "simulator/fault", self._on_fault, qos.STATE)

    def _make_camera(self, *arguments: Any) -> SimulatedCamera:
        return FaultyCamera(self._faults, *arguments)

    def _on_fault(self, message: String) -> None:
        complaint = self._faults.set(message.data)
        self.get_logger().warning(complaint or f"faults: {str(self._faults) or 'none'}")

    def _on_command(self, message: Twist | TwistStamped) -> None:
        if self._faults.of("robot") == OK:
            super()._on_command(message)

    def _publish_base(self, stamp: Any) -> None:
        if self._faults.of("robot") != "freeze":
            super()._publish_base(stamp)


class FaultyCamera(SimulatedCamera):
    """The camera, with the faults of ``faults``."""

    def __init__(self, faults: FaultBoard, *rest: Any) -> None:
        self._faults = faults
        self._last: Image | None = None
        super().__init__(*rest)

    def _publish_picture(self, image: Image) -> None:
        fault = self._faults.of("camera")
        if fault == "freeze":
            return
        if fault != "repeat" or self._last is None:
            self._last = image
        image = self._last
        if fault == "garbage":
            image = Image(header=image.header, height=image.height, width=image.width, step=image.step)
            image.encoding, image.data = "bgr8", array.array("B", bytes(100))
        super()._publish_picture(image)

    def _publish_depth(self, header: Header, depths: np.ndarray) -> None:
        fault = self._faults.of("depth")
        if fault != "freeze":
            super()._publish_depth(header, np.full_like(depths, np.nan) if fault == "blind" else depths)


def main() -> None:
    run_main(FaultySimulatorNode)
