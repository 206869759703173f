# SPDX-License-Identifier: Apache-2.0
"""The simulated Go2 as a node, with the topics of a real Go2 stack.

Simulated time starts at the wall clock's time and runs ``rate`` times as fast. At rate 1 it follows the wall clock, so
nodes work with or without ``use_sim_time``. Ground truth (distance to the target, collisions) is on topics of its own,
which no part of the robot subscribes to.
"""

from __future__ import annotations

import array
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Twist, TwistStamped
from rclpy.node import Node
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CameraInfo, Image, Range
from std_msgs.msg import Header
from std_srvs.srv import Trigger

from dsd_ros.robot.driver import DriverError
from dsd_ros.robot.frames import CAMERA_LINK, OPTICAL, RANGE_LINK, FrameSettings, Placed
from dsd_ros.robot.sim.driver import STANDING_HEIGHT, SimulatedDriver
from dsd_ros.robot.sim.scene import CAMERA_AHEAD
from dsd_ros.robot.sim.simulator import MAX_RANGE, MIN_RANGE, RANGE_FIELD_OF_VIEW, Simulator, SimulatorError
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import health, qos
from dsd_ros.ros.base_messages import BasePublisher, GroundTruthPublisher, camera_info
from dsd_ros.ros.images import from_rgb
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.publishers import CommandWatch, type_name
from dsd_ros.ros.running import EXIT_BAD_START, EXIT_GAVE_UP, RunnableNode, run_main, steady_timer
from dsd_ros.ros.settings import SimulatorNodeSettings
from dsd_ros.ros.stamps import command_type, to_stamp, twist_of

_ODOMETRY_S, _RANGE_PERIOD_S = 0.02, 0.05
_CAMERA_HZ = 15.0
_DEPTH_STRIDE = 2  # depth images are coarser than pictures, as real ones are


class SimulatorNode(RunnableNode):
    """See the module. The base moves in the executor's thread, the camera renders in a thread of its own."""

    def __init__(self) -> None:
        super().__init__("simulator_node")
        settings = declare(self, SimulatorNodeSettings)
        self._settings = settings
        world = World.from_seed(settings.seed, settings.instruction or None)
        self._simulator = Simulator(world)
        self._driver = SimulatedDriver(self._simulator, rate=settings.rate)
        self._wall_start = time.time()

        self._clock_out = self.create_publisher(ClockMessage, "/clock", qos.CLOCK)
        self._base = BasePublisher(self)
        self._base.describe(settings, sensors_of(world, settings), settings.map_frame)
        self._truth = GroundTruthPublisher(self, self._simulator, self._base.frame(settings.odom_frame))
        self._range = self.create_publisher(Range, "range", qos.STATE)
        kind = command_type(settings.enable_stamped_cmd_vel)
        self._commands = CommandWatch(self, type_name(kind))
        self.create_subscription(kind, "cmd_vel", self._on_command, qos.SENSOR)
        self.create_service(Trigger, "simulator/reset_world", self._on_reset)
        self._health = health.Health(self, "simulated Go2")
        steady_timer(self, _ODOMETRY_S, self._tick)
        steady_timer(self, _RANGE_PERIOD_S, self._measure_range)
        self._camera = self._make_camera(
            self, self._simulator, _CAMERA_HZ, lambda: to_stamp(self._stamp()), self._fail,
            self._base.frame(settings.camera_frame),
        )  # fmt: skip
        self.get_logger().info(
            f"world {settings.seed}: {world.instruction!r}, {len(world.things)} things in a room "
            f"of {2 * world.half_x:.1f} m x {2 * world.half_y:.1f} m"
        )

    def _make_camera(self, *arguments: Any) -> SimulatedCamera:
        return SimulatedCamera(*arguments)

    def close(self) -> None:
        self._camera.close()

    def _fail(self, sentence: str, exit_code: int = EXIT_GAVE_UP) -> None:
        self.exit_code, self.failure = exit_code, sentence

    # -- base ----------------------------------------------------------------------------------

    def _on_command(self, message: Twist | TwistStamped) -> None:
        if self._commands.contested():
            return
        try:
            twist = twist_of(message)
            self._driver.move(twist.linear.x, twist.linear.y, twist.angular.z)
        except DriverError:
            return  # not finite: ignored

    def _on_reset(self, _: Trigger.Request, answer: Trigger.Response) -> Trigger.Response:
        """Put the robot back at its start, at rest, with no collision counted."""
        self._driver.stop()
        self._simulator.pose = self._simulator.world.start
        self._simulator.collisions = 0
        answer.success, answer.message = True, "The robot stands at its start."
        return answer

    def _advance(self) -> None:
        self._driver.advance()
        if self._settings.rate == 1.0:
            # The wall clock may be set while this runs (NTP, a paused virtual machine). Nodes that compare stamps with
            # it must not find every picture too old from then on.
            self._wall_start = time.time() - self._simulator.time

    def _tick(self) -> None:
        if self._commands.contested():
            self._driver.move(0.0, 0.0, 0.0)
        self._advance()
        stamp = to_stamp(self._stamp())
        self._clock_out.publish(ClockMessage(clock=stamp))
        self._publish_base(stamp)
        self._truth.publish()
        figures = {"pictures": self._camera.frames, "collisions": self._simulator.collisions}
        trouble = self._commands.trouble
        self._health.report(health.WARN if trouble else health.OK, trouble or "running", figures)

    def _publish_base(self, stamp: Time) -> None:
        self._base.publish(self._driver.state(), stamp)

    def _measure_range(self) -> None:
        if self._range.get_subscription_count() == 0:
            return
        message = Range(radiation_type=Range.ULTRASOUND, field_of_view=RANGE_FIELD_OF_VIEW)
        message.header.stamp, message.header.frame_id = to_stamp(self._stamp()), self._base.frame(RANGE_LINK)
        message.min_range, message.max_range = MIN_RANGE, MAX_RANGE
        # REP 117: minus infinity means that something is nearer than the sensor's minimum.
        distance = self._simulator.range_ahead()
        message.range = -math.inf if distance < MIN_RANGE else distance
        self._range.publish(message)

    def _stamp(self) -> float:
        return self._wall_start + self._simulator.time


def sensors_of(world: World, frames: FrameSettings) -> tuple[Placed, ...]:
    """Where the simulated robot has its sensors."""
    height, pitch = world.camera
    ahead, base = (CAMERA_AHEAD, 0.0, height - STANDING_HEIGHT), frames.base_frame
    return (
        Placed(base, frames.imu_frame, (0.0, 0.0, 0.0)),
        Placed(base, CAMERA_LINK, ahead, (0.0, pitch, 0.0)),
        Placed(CAMERA_LINK, frames.camera_frame, (0.0, 0.0, 0.0), OPTICAL),
        Placed(base, RANGE_LINK, ahead),
    )


class SimulatedCamera:
    """The front camera: renders and publishes pictures, and depth images while anyone subscribes to them.

    The OpenGL context stays in this object's thread. ``rate``: pictures per second. ``stamp``: the robot's time.
    ``on_failure(sentence[, exit code])`` is called when the camera cannot go on. ``frame``: of its messages.
    """

    def __init__(
        self,
        node: Node,
        simulator: Simulator,
        rate: float,
        stamp: Callable[[], Time],
        on_failure: Callable[..., None],
        frame: str,
    ) -> None:
        self.frames, self.rate, self._frame = 0, rate, frame
        self._simulator = simulator
        self._stamp, self._on_failure = stamp, on_failure
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
                self._publish()
                # A slow renderer skips pictures instead of queueing them.
                due = max(due + 1.0 / self.rate, time.monotonic())
                self._stop.wait(due - time.monotonic())
        except SimulatorError as error:  # no renderer, which a restart does not bring
            self._on_failure(str(error), EXIT_BAD_START)
        except Exception as error:
            if not self._stop.is_set():
                self._on_failure(f"The camera's thread ended: {type(error).__name__}: {error}")
        finally:
            self._simulator.close()

    def _publish(self) -> None:
        # Taken before rendering, so that a picture is never older than its stamp.
        header = Header(stamp=self._stamp(), frame_id=self._frame)
        wanted = self._depth.get_subscription_count() > 0
        if wanted:
            picture, depths = self._simulator.render_with_depth()
            self._publish_depth(header, depths)
        else:
            picture = self._simulator.render()
        image = from_rgb(picture)
        image.header = header
        self._publish_picture(image)
        self.frames += 1

    def _publish_picture(self, image: Image) -> None:
        self._image.publish(image)
        self._info.publish(camera_info(image.header, image.width, image.height, self._simulator.focal_length))

    def _publish_depth(self, header: Header, depths: np.ndarray) -> None:
        coarse = np.ascontiguousarray(depths[::_DEPTH_STRIDE, ::_DEPTH_STRIDE], dtype="<f4")
        height, width = coarse.shape
        image = Image(header=header, height=height, width=width, encoding="32FC1", step=4 * width)
        image.data = array.array("B", coarse.tobytes())
        focal = self._simulator.focal_length / _DEPTH_STRIDE
        self._depth.publish(image)
        self._depth_info.publish(camera_info(header, width, height, focal))


def main() -> None:
    run_main(SimulatorNode)
