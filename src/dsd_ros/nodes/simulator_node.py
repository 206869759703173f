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

import numpy as np
from geometry_msgs.msg import TransformStamped, Twist
from nav_msgs.msg import Odometry
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import CameraInfo, Image, Imu
from std_msgs.msg import Bool, Float64, UInt32

from dsd_ros.navigation.controller import Velocity
from dsd_ros.navigation.watchdog import Watchdog
from dsd_ros.nodes import health, qos
from dsd_ros.nodes.images import from_rgb
from dsd_ros.nodes.parameters import declare, refuse_unknown
from dsd_ros.nodes.running import main as run_main
from dsd_ros.nodes.stamps import quaternion, to_stamp
from dsd_ros.robot.simulator import Simulator, SimulatorError
from dsd_ros.robot.world import World

ODOM_FRAME, BASE_FRAME, CAMERA_FRAME = "odom", "base_link", "front_camera"
_GRAVITY = 9.81


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
        self._lock = threading.Lock()
        self._watchdog = Watchdog(settings.command_timeout_s)
        self._lateral = 0.0
        self._wall_start = time.time()
        self._steady_start = self._last_step = time.monotonic()
        self._last_velocity = (0.0, 0.0, 0.0)
        self._collisions = -1
        self._frames = 0

        self._image = self.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self._info = self.create_publisher(CameraInfo, "camera/camera_info", qos.CAMERA)
        self._odometry = self.create_publisher(Odometry, "odom", qos.STATE)
        self._imu = self.create_publisher(Imu, "imu", qos.STATE)
        self._clock_out = self.create_publisher(ClockMessage, "/clock", qos.CLOCK)
        self._collision = self.create_publisher(UInt32, "collision", qos.LATCHED)
        self._distance = self.create_publisher(Float64, "ground_truth/target_distance", qos.STATE)
        self._reached = self.create_publisher(Bool, "ground_truth/reached", qos.STATE)
        self._transforms = self._transform_publisher()
        self.create_subscription(Twist, "cmd_vel", self._on_command, qos.COMMAND)
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
        now = time.monotonic()
        self._advance(now)  # the old command holds until this very moment
        self._watchdog.command(Velocity(message.linear.x, message.angular.z), now)
        self._watchdog.odometry(now)
        self._lateral = message.linear.y if np.isfinite(message.linear.y) else 0.0

    def _advance(self, now: float) -> None:
        """Move the base up to ``now``; a command that runs out before counts only until then."""
        runs_out = now - self._watchdog.command_age(now) + self._watchdog.timeout
        for until in sorted({min(max(runs_out, self._last_step), now), now}):
            span = until - self._last_step
            if span <= 0.0:
                continue
            fresh = self._watchdog.fresh(self._last_step)
            command = self._watchdog.output(self._last_step)
            with self._lock:
                self._simulator.step(
                    span * self._settings.rate,
                    command.vx,
                    self._lateral if fresh else 0.0,
                    command.wz,
                )
            self._last_step = until
        if self._settings.rate == 1.0:
            # The wall clock may be set while this runs (NTP, a virtual machine that was paused); nodes
            # that compare stamps with it must not find every picture too old from then on.
            self._wall_start = time.time() - self._simulator.time

    def _tick(self) -> None:
        before = self._simulator.time
        self._advance(time.monotonic())
        elapsed = self._simulator.time - before
        stamp = to_stamp(self._stamp())
        self._clock_out.publish(ClockMessage(clock=stamp))
        x, y, yaw = self._simulator.pose
        velocity = self._simulator.velocity
        odometry = Odometry()
        odometry.header.stamp, odometry.header.frame_id = stamp, ODOM_FRAME
        odometry.child_frame_id = BASE_FRAME
        odometry.pose.pose.position.x, odometry.pose.pose.position.y = x, y
        odometry.pose.pose.orientation = quaternion(yaw)
        odometry.twist.twist.linear.x, odometry.twist.twist.linear.y = velocity[:2]
        odometry.twist.twist.angular.z = velocity[2]
        self._odometry.publish(odometry)
        self._imu.publish(self._imu_message(stamp, yaw, velocity, elapsed))
        if self._transforms is not None:
            self._publish_transform(odometry)
        self._distance.publish(Float64(data=self._simulator.distance_to_target()))
        self._reached.publish(Bool(data=self._simulator.reached()))
        if self._simulator.collisions != self._collisions:
            self._collisions = self._simulator.collisions
            self._collision.publish(UInt32(data=self._collisions))
            if self._collisions:
                self.get_logger().warning(f"collision number {self._collisions}")
        self._health.report(
            health.OK,
            "running" if self._camera_on else "running, camera off",
            {"pictures": self._frames, "collisions": self._collisions},
        )

    def _imu_message(
        self, stamp: Any, yaw: float, velocity: tuple[float, float, float], elapsed: float
    ) -> Imu:
        message = Imu()
        message.header.stamp, message.header.frame_id = stamp, BASE_FRAME
        message.orientation = quaternion(yaw)
        message.angular_velocity.z = velocity[2]
        if elapsed > 0.0:
            message.linear_acceleration.x = (velocity[0] - self._last_velocity[0]) / elapsed
            message.linear_acceleration.y = (velocity[1] - self._last_velocity[1]) / elapsed
        message.linear_acceleration.z = _GRAVITY
        self._last_velocity = velocity
        return message

    def _stamp(self) -> float:
        return self._wall_start + self._simulator.time

    def _transform_publisher(self) -> Any:
        try:
            from tf2_msgs.msg import TFMessage
        except ImportError:  # the wheels have no tf2; nothing in this project needs it
            return None
        self._transform_type = TFMessage
        return self.create_publisher(TFMessage, "/tf", qos.TRANSFORMS)

    def _publish_transform(self, odometry: Odometry) -> None:
        transform = TransformStamped(header=odometry.header, child_frame_id=BASE_FRAME)
        position = odometry.pose.pose.position
        transform.transform.translation.x = position.x
        transform.transform.translation.y = position.y
        transform.transform.rotation = odometry.pose.pose.orientation
        self._transforms.publish(self._transform_type(transforms=[transform]))

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
        with self._lock:
            # Taken before rendering, so that a picture is never older than its stamp.
            stamp = to_stamp(self._stamp())
        image = from_rgb(self._simulator.render())
        image.header.stamp, image.header.frame_id = stamp, CAMERA_FRAME
        height, width = image.height, image.width
        focal = self._simulator.focal_length
        info = CameraInfo(header=image.header, height=height, width=width)
        info.distortion_model, info.d = "plumb_bob", [0.0] * 5
        cx, cy = width / 2, height / 2
        info.k = [focal, 0.0, cx, 0.0, focal, cy, 0.0, 0.0, 1.0]
        info.r = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
        info.p = [focal, 0.0, cx, 0.0, 0.0, focal, cy, 0.0, 0.0, 0.0, 1.0, 0.0]
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
