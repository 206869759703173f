"""The simulated Go2 as a node: publishes and obeys what a real Go2 stack does.

Simulated time starts at the wall clock's time and runs ``rate`` times as fast; at rate 1 it follows
the wall clock, so that nodes work with or without ``use_sim_time``. Ground truth (distance to the
target, collisions) is on topics of its own, which no part of the robot listens to.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from geometry_msgs.msg import Twist
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CameraInfo, Image
from std_srvs.srv import Trigger

from dsd_ros.nodes import health, qos
from dsd_ros.nodes.base_messages import (
    CAMERA_FRAME,
    BasePublisher,
    GroundTruthPublisher,
    camera_info,
)
from dsd_ros.nodes.images import from_rgb
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.nodes.stamps import to_stamp
from dsd_ros.robot.driver import DriverError
from dsd_ros.robot.simulated_driver import SimulatedDriver
from dsd_ros.robot.simulator import Simulator, SimulatorError
from dsd_ros.robot.world import World


def _option(default: Any, text: str, low: float | None = None, high: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "min": low, "max": high})


@dataclass(frozen=True)
class SimulatorSettings:
    """Parameters of the simulator node."""

    seed: int = _option(0, "number of the world", 0, 2**31 - 1)
    instruction: str = _option(
        "", "names the target, e.g. 'find the silver bottle'; empty: the world's own"
    )
    camera_rate: float = _option(15.0, "pictures per second", 1.0, 60.0)
    odometry_rate: float = _option(50.0, "odometry samples per second", 5.0, 200.0)
    rate: float = _option(
        1.0, "simulated seconds per second; other than 1 needs use_sim_time", 0.1, 20.0
    )
    command_timeout_s: float = _option(
        0.5,
        "the robot stops when cmd_vel is older; the firmware alone would hold it for 1 s",
        0.05,
        1.0,
    )


class SimulatorNode(Node):
    """See the module. The base moves in the executor's thread, the camera renders in its own."""

    def __init__(self) -> None:
        super().__init__("simulator_node")
        self.failure: str | None = None
        settings = declare(self, SimulatorSettings)
        self._camera_on = bool(
            self.declare_parameter(
                "camera_on",
                True,
                ParameterDescriptor(
                    description="false: the camera falls silent, to rehearse its loss"
                ),
            ).value
        )
        refuse_unknown(self)
        self.add_on_set_parameters_callback(self._on_parameters)
        self._settings = settings
        world = World.from_seed(settings.seed, settings.instruction or None)
        self._simulator = Simulator(world)
        self._driver = SimulatedDriver(self._simulator, settings.command_timeout_s, settings.rate)
        self._wall_start = time.time()
        self._frames = 0

        self._image = self.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self._info = self.create_publisher(CameraInfo, "camera/camera_info", qos.CAMERA)
        self._clock_out = self.create_publisher(ClockMessage, "/clock", qos.CLOCK)
        self._base = BasePublisher(self, flat=True)
        self._truth = GroundTruthPublisher(self, self._simulator)
        self.create_subscription(Twist, "cmd_vel", self._on_command, qos.COMMAND)
        self.create_service(Trigger, "reset_world", self._on_reset)
        self._health = health.Health(self, "simulated Go2")
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(1.0 / settings.odometry_rate, self._tick, clock=steady)
        self._stop = threading.Event()
        self._camera = threading.Thread(target=self._render_loop, name="camera", daemon=True)
        self._camera.start()
        self.get_logger().info(
            f"world {settings.seed}: {world.instruction!r}, {len(world.things)} things in a room "
            f"of {2 * world.half_x:.1f} m x {2 * world.half_y:.1f} m"
        )

    def close(self) -> None:
        self._stop.set()
        self._camera.join(timeout=0.5)

    # -- base ----------------------------------------------------------------------------------

    def _on_command(self, message: Twist) -> None:
        try:
            self._driver.move(message.linear.x, message.linear.y, message.angular.z)
        except DriverError:
            return  # no number: it counts as no command at all

    def _on_reset(self, _: Trigger.Request, answer: Trigger.Response) -> Trigger.Response:
        """Carry the robot back to its start, standing, with no collision to its name."""
        self._driver.stop()
        self._simulator.pose = self._simulator.world.start
        self._simulator.collisions = 0
        answer.success, answer.message = True, "The robot stands at its start."
        return answer

    def _advance(self) -> None:
        self._driver.advance()
        if self._settings.rate == 1.0:
            # The wall clock may be set while this runs (NTP, a virtual machine that was paused); nodes
            # that compare stamps with it must not find every picture too old from then on.
            self._wall_start = time.time() - self._simulator.time

    def _tick(self) -> None:
        self._advance()
        stamp = to_stamp(self._stamp())
        self._clock_out.publish(ClockMessage(clock=stamp))
        self._base.publish(self._driver.state(), stamp)
        self._truth.publish()
        self._health.report(
            health.OK,
            "running" if self._camera_on else "running, camera off",
            {"pictures": self._frames, "collisions": self._simulator.collisions},
        )

    def _stamp(self) -> float:
        return self._wall_start + self._simulator.time

    # -- camera --------------------------------------------------------------------------------

    def _render_loop(self) -> None:
        """Renders and publishes at the camera's rate; the GL context never leaves this thread."""
        period = 1.0 / self._settings.camera_rate
        due = time.monotonic()
        try:
            while not self._stop.is_set():
                if self._camera_on:
                    self._publish_picture()
                # A slow renderer skips pictures, it does not pile them up.
                due = max(due + period, time.monotonic())
                self._stop.wait(due - time.monotonic())
        except SimulatorError as error:
            self.failure = str(error)
        except Exception as error:
            if not self._stop.is_set():
                self.failure = f"The camera's thread ended: {type(error).__name__}: {error}"
        finally:
            self._simulator.close()

    def _publish_picture(self) -> None:
        # Taken before rendering, so that a picture is never older than its stamp.
        stamp = to_stamp(self._stamp())
        image = from_rgb(self._simulator.render())
        image.header.stamp, image.header.frame_id = stamp, CAMERA_FRAME
        focal = self._simulator.focal_length
        info = camera_info(image.header, image.width, image.height, focal)
        self._image.publish(image)
        self._info.publish(info)
        self._frames += 1

    def _on_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        for change in changes:
            if change.name == "camera_on":
                self._camera_on = bool(change.value)
        return SetParametersResult(successful=True)


def main() -> None:
    run_main(SimulatorNode)
