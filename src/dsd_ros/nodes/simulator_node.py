"""The simulated Go2 as a node: publishes and obeys what a real Go2 stack does.

Simulated time starts at the wall clock's time and runs ``rate`` times as fast; at rate 1 it follows
the wall clock, so that nodes work with or without ``use_sim_time``. Ground truth (distance to the
target, collisions) is on topics of its own, which no part of the robot listens to.

The topic ``simulator/fault`` (std_msgs/String) makes things go wrong while it runs:

* ``camera freeze``: no pictures come; ``camera repeat``: the last one comes again and again, with its
  old stamp; ``camera garbage``: what comes is no picture;
* ``depth freeze``: no depth images come; ``depth blind``: they know nothing;
* ``robot freeze``: no odometry and imu come, and no command is taken any more; ``robot die``: commands
  are not taken, the state goes on;
* ``camera ok``, ``depth ok``, ``robot ok``, ``all ok``: that is over.
"""

from __future__ import annotations

import math
import time

from geometry_msgs.msg import Twist
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock
from rclpy.clock_type import ClockType
from rclpy.node import Node
from rclpy.parameter import Parameter
from rosgraph_msgs.msg import Clock as ClockMessage
from sensor_msgs.msg import Range
from std_msgs.msg import String
from std_srvs.srv import Trigger

from dsd_ros.nodes.simulated_camera import CAMERA_FAULTS, DEPTH_FAULTS, SimulatedCamera
from dsd_ros.robot.driver import DriverError
from dsd_ros.robot.sim.driver import SimulatedDriver
from dsd_ros.robot.sim.faults import OK, FaultBoard
from dsd_ros.robot.sim.rangefinder import FIELD_OF_VIEW, MAX_RANGE, MIN_RANGE
from dsd_ros.robot.sim.simulator import Simulator
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import health, qos
from dsd_ros.ros.base_messages import CAMERA_FRAME, BasePublisher, GroundTruthPublisher
from dsd_ros.ros.parameters import declare, refuse_unknown
from dsd_ros.ros.running import main as run_main
from dsd_ros.ros.settings import SimulatorNodeSettings
from dsd_ros.ros.stamps import to_stamp

_RANGE_PERIOD_S = 0.05


class SimulatorNode(Node):
    """See the module. The base moves in the executor's thread, the camera renders in its own."""

    def __init__(self) -> None:
        super().__init__("simulator_node")
        self.failure: str | None = None
        settings = declare(self, SimulatorNodeSettings)
        refuse_unknown(self)
        self.add_on_set_parameters_callback(self._on_parameters)
        self._settings = settings
        world = World.from_seed(settings.seed, settings.instruction or None)
        self._simulator = Simulator(world)
        self._driver = SimulatedDriver(self._simulator, settings.command_timeout_s, settings.rate)
        self._wall_start = time.time()
        self._faults = FaultBoard({"camera": CAMERA_FAULTS, "depth": DEPTH_FAULTS, "robot": ("freeze", "die")})

        self._clock_out = self.create_publisher(ClockMessage, "/clock", qos.CLOCK)
        self._base = BasePublisher(self, flat=True)
        self._truth = GroundTruthPublisher(self, self._simulator)
        self._range = self.create_publisher(Range, "range", qos.STATE)
        self.create_subscription(Twist, "cmd_vel", self._on_command, qos.COMMAND)
        self.create_subscription(String, "simulator/fault", self._on_fault, qos.STATE)
        self.create_service(Trigger, "reset_world", self._on_reset)
        self._health = health.Health(self, "simulated Go2")
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(1.0 / settings.odometry_rate, self._tick, clock=steady)
        self.create_timer(_RANGE_PERIOD_S, self._measure_range, clock=steady)
        self._camera = SimulatedCamera(
            self, self._simulator, settings.camera_rate, lambda: to_stamp(self._stamp()), self._faults,
            self._fail, settings.camera_on,
        )  # fmt: skip
        self.get_logger().info(
            f"world {settings.seed}: {world.instruction!r}, {len(world.things)} things in a room "
            f"of {2 * world.half_x:.1f} m x {2 * world.half_y:.1f} m"
        )

    def close(self) -> None:
        self._camera.close()

    def _fail(self, sentence: str) -> None:
        self.failure = sentence

    def _on_fault(self, message: String) -> None:
        complaint = self._faults.say(message.data)
        self.get_logger().warning(complaint or f"faults: {str(self._faults) or 'none'}")

    # -- base ----------------------------------------------------------------------------------

    def _on_command(self, message: Twist) -> None:
        if self._faults.of("robot") != OK:
            return
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
        if self._faults.of("robot") != "freeze":
            self._base.publish(self._driver.state(), stamp)
        self._truth.publish()
        what = ["running", "" if self._camera.on else "camera off", str(self._faults)]
        self._health.report(
            health.OK,
            ", ".join(filter(None, what)),
            {"pictures": self._camera.frames, "collisions": self._simulator.collisions},
        )

    def _measure_range(self) -> None:
        if self._range.get_subscription_count() == 0:
            return
        message = Range(radiation_type=Range.ULTRASOUND, field_of_view=FIELD_OF_VIEW)
        message.header.stamp, message.header.frame_id = to_stamp(self._stamp()), CAMERA_FRAME
        message.min_range, message.max_range = MIN_RANGE, MAX_RANGE
        # Nearer than the least the sensor would say "too near", which REP 117 writes as minus infinity.
        distance = self._simulator.range_ahead()
        message.range = -math.inf if distance < MIN_RANGE else distance
        self._range.publish(message)

    def _stamp(self) -> float:
        return self._wall_start + self._simulator.time

    def _on_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        for change in changes:
            if change.name == "camera_on":
                self._camera.on = bool(change.value)
        return SetParametersResult(successful=True)


def main() -> None:
    run_main(SimulatorNode)
