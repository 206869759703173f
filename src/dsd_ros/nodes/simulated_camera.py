"""The simulated front camera: pictures, and depth images while somebody wants them, in a thread of its own."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable

import numpy as np
from builtin_interfaces.msg import Time
from rclpy.node import Node
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header

from dsd_ros.robot.sim.faults import FaultBoard
from dsd_ros.robot.sim.simulator import Simulator, SimulatorError
from dsd_ros.ros import qos
from dsd_ros.ros.base_messages import CAMERA_FRAME, camera_info
from dsd_ros.ros.images import from_rgb

_DEPTH_STRIDE = 2  # depth images are coarser than pictures, as real ones are

# See simulator_node for what they mean.
CAMERA_FAULTS = ("freeze", "repeat", "garbage")
DEPTH_FAULTS = ("freeze", "blind")


class SimulatedCamera:
    """Renders and publishes at a rate; the GL context never leaves this object's thread.

    :param stamp: the robot's time.
    :param on_failure: called with a sentence when it cannot go on.
    """

    def __init__(
        self,
        node: Node,
        simulator: Simulator,
        rate: float,
        stamp: Callable[[], Time],
        faults: FaultBoard,
        on_failure: Callable[[str], None],
        on: bool = True,
    ) -> None:
        self.on = on
        self.frames = 0
        self._simulator, self._faults = simulator, faults
        self._period, self._stamp, self._on_failure = 1.0 / rate, stamp, on_failure
        self._last: Image | None = None
        self._image = node.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self._info = node.create_publisher(CameraInfo, "camera/camera_info", qos.CAMERA)
        self._depth = node.create_publisher(Image, "depth/image_raw", qos.CAMERA)
        self._depth_info = node.create_publisher(CameraInfo, "depth/camera_info", qos.CAMERA)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._stop.is_set():
                if self.on:
                    self._publish()
                # A slow renderer skips pictures, it does not pile them up.
                due = max(due + self._period, time.monotonic())
                self._stop.wait(due - time.monotonic())
        except SimulatorError as error:
            self._on_failure(str(error))
        except Exception as error:
            if not self._stop.is_set():
                self._on_failure(f"The camera's thread ended: {type(error).__name__}: {error}")
        finally:
            self._simulator.close()

    def _publish(self) -> None:
        # Taken before rendering, so that a picture is never older than its stamp.
        header = Header(stamp=self._stamp(), frame_id=CAMERA_FRAME)
        wanted = self._depth.get_subscription_count() > 0
        if wanted:
            picture, depths = self._simulator.render_with_depth()
            self._publish_depth(header, depths)
        else:
            picture = self._simulator.render()
        self._publish_picture(header, picture)
        self.frames += 1

    def _publish_picture(self, header: Header, picture: np.ndarray) -> None:
        fault = self._faults.of("camera")
        if fault == "freeze":
            return
        if fault != "repeat" or self._last is None:
            self._last = from_rgb(picture)
            self._last.header = header
        image = self._last
        if fault == "garbage":
            image = Image(header=header, height=image.height, width=image.width, step=image.step)
            image.encoding, image.data = "bgr8", array.array("B", bytes(100))
        focal = self._simulator.focal_length
        self._image.publish(image)
        self._info.publish(camera_info(image.header, image.width, image.height, focal))

    def _publish_depth(self, header: Header, depths: np.ndarray) -> None:
        fault = self._faults.of("depth")
        if fault == "freeze":
            return
        coarse = np.ascontiguousarray(depths[::_DEPTH_STRIDE, ::_DEPTH_STRIDE], dtype="<f4")
        if fault == "blind":
            coarse = np.full_like(coarse, np.nan)
        height, width = coarse.shape
        image = Image(header=header, height=height, width=width, encoding="32FC1", step=4 * width)
        image.data = array.array("B", coarse.tobytes())
        focal = self._simulator.focal_length / _DEPTH_STRIDE
        self._depth.publish(image)
        self._depth_info.publish(camera_info(header, width, height, focal))
