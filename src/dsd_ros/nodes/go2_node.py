# SPDX-License-Identifier: Apache-2.0
"""The Go2 as a node: obeys ``cmd_vel`` and publishes the same topics as the simulated robot's node.

A thin shell around :class:`dsd_ros.robot.go2.driver.Go2Driver`. configure connects to the robot, activate makes it
stand up and obeys commands, deactivate ends in an acknowledged stop (the robot stays standing), cleanup disconnects.
By default the node sends plain ROS 2 messages to the robot's own services, so it needs no vendor library. The robot's
clock is not trusted: stamps are this machine's, taken when a state arrives and when a picture is requested.
"""

from __future__ import annotations

import math
import threading
import time
from functools import partial
from typing import Any

import numpy as np
from geometry_msgs.msg import Twist, TwistStamped
from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.time import Time
from sensor_msgs.msg import BatteryState, CameraInfo, Image
from std_srvs.srv import Trigger

from dsd_ros.navigation.run.controller import Velocity
from dsd_ros.navigation.safety.watchdog import Watchdog
from dsd_ros.pictures import PictureError, read_picture
from dsd_ros.robot.driver import DriverError, until_connected
from dsd_ros.robot.go2.driver import COMMAND_S, Go2Driver
from dsd_ros.robot.go2.protocol import JPEG_LIMIT_BYTES, VIDEO, Code, VideoApi, code_text
from dsd_ros.robot.go2.sdk_link import SdkLink
from dsd_ros.ros import health, qos
from dsd_ros.ros.base_messages import BasePublisher, camera_info
from dsd_ros.ros.images import ImageMessageError, from_rgb
from dsd_ros.ros.managed import ManagedNode
from dsd_ros.ros.publishers import CommandWatch, type_name
from dsd_ros.ros.running import StartError, run_main, steady_timer
from dsd_ros.ros.settings import Go2NodeSettings
from dsd_ros.ros.stamps import command_message, command_type, twist_of

_RETRY_S = 2.0
_STOP_S, _STOP_AT_THE_END_S = 1.0, 0.3  # for the acknowledgement of a stop
_THREADS_S = 0.1
_CAMERA_SILENT_S = 2.0
_ODOMETRY_S = 0.016  # states come every 0.02 s; those that come sooner are skipped
_STICK_SPEED, _STICK_TURN_RATE = 0.5, 0.8  # m/s and rad/s at full deflection of the remote control's sticks
_STICK_AT_REST = 0.1  # deflection of the remote control's sticks, of 1
_STICK_RELEASED_S = 0.5  # a released stick says zero for this long


class Go2Node(ManagedNode[Go2NodeSettings]):
    """See the module. Only the callbacks of the posture services wait for the robot."""

    def __init__(self) -> None:
        super().__init__("go2_node", Go2NodeSettings, "Unitree Go2", heartbeat=True)
        settings = self._settings
        self._lock = threading.Lock()
        self._watchdog = Watchdog(COMMAND_S)
        self._lateral = 0.0
        self._ready = False
        self._trouble = "waiting for the robot"
        self._camera_trouble = ""
        self._odometry_time = self._picture_time = self._battery_time = -math.inf
        self._pictures = 0

        self._base = BasePublisher(self)
        kind = command_type(settings.enable_stamped_cmd_vel)
        self._image = self.create_publisher(Image, "camera/image_raw", qos.CAMERA)
        self._info = self.create_publisher(CameraInfo, "camera/camera_info", qos.CAMERA)
        self._battery = self.create_publisher(BatteryState, "battery_state", qos.STATE)
        self._joystick = self.create_publisher(kind, "cmd_vel_joy", qos.COMMAND)  # of the Go2's remote control
        self._remote_time = -math.inf
        self._robot = MutuallyExclusiveCallbackGroup()
        self._link: Any = None
        self._driver: Go2Driver | None = None
        self._commands = CommandWatch(self, type_name(kind))
        self.create_subscription(kind, "cmd_vel", self._on_command, qos.SENSOR)
        steady_timer(self, 0.04, self._tick)
        services = MutuallyExclusiveCallbackGroup()
        acts = {"stand_up": self._stand_up, "stand_down": self._stand_down, "stop": Go2Driver.stop, "damp": self._damp}
        for name, act in acts.items():
            serve = partial(self._serve, act)
            self.create_service(Trigger, f"~/{name}", serve, callback_group=services)
        self._stop = threading.Event()  # of this activation's threads
        self._stop.set()
        self._threads: list[threading.Thread] = []
        self.autostart()

    # -- lifecycle -----------------------------------------------------------------------------

    def load(self) -> None:
        settings = self._settings
        self._base.describe(settings)
        self._link = link = self._make_link()
        self._driver = driver = Go2Driver(link, settings.drive, settings.limits)
        link.on_arrival = self._on_state
        link.attach(driver)

    def change(self, settings: Go2NodeSettings) -> None:
        if self._driver is not None:
            self._driver.settings, self._driver.limits = settings.drive, settings.limits

    def _make_link(self) -> Any:
        settings = self._settings
        if settings.link == "sdk":
            link = SdkLink(settings.sdk_python, settings.sdk_interface)
            link.on_end = self.give_up
            versions = ", ".join(f"{name} {version}" for name, version in link.versions.items())
            self.get_logger().info(f"connected through the vendor's SDK: {versions}")
            return link
        from dsd_ros.ros.go2_messages import RosLink  # raises StartError where the messages are not built

        ros_link = RosLink(self, self._robot)
        if settings.remote:
            ros_link.on_remote = self._on_remote
        return ros_link

    def _on_remote(self, message: Any) -> None:
        """The Go2's own remote control: the operator's command while its sticks are moved, and a moment longer."""
        sticks = (message.ly, -message.lx, -message.rx)
        now = time.monotonic()
        if max(map(abs, sticks)) > _STICK_AT_REST:
            self._remote_time = now
        elif not now - self._remote_time < _STICK_RELEASED_S:  # NaN and silence are no commands
            return
        ahead, left, turn = (stick if abs(stick) > _STICK_AT_REST else 0.0 for stick in sticks)
        command = Twist()
        command.linear.x, command.linear.y = ahead * _STICK_SPEED, left * _STICK_SPEED
        command.angular.z = turn * _STICK_TURN_RATE
        self._joystick.publish(command_message(command, self, self._settings.enable_stamped_cmd_vel))

    def begin(self) -> None:
        driver = self._driver
        assert driver is not None, "load comes first"
        self._stop = stop = threading.Event()
        self._trouble = "waiting for the robot"
        self._threads = [
            threading.Thread(target=work, args=(driver, stop), name=name, daemon=True)
            for name, work in (("robot", self._connect), ("camera", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """:raises DriverError: when a robot that had been connected does not acknowledge the stop."""
        self._stop.set()
        self._set_ready(False, "inactive")
        driver = self._driver
        assert driver is not None, "load comes first"
        try:
            if driver.state() is not None:
                driver.stop(_STOP_AT_THE_END_S if self.closing else _STOP_S)
        finally:
            driver.hand_back()
            for thread in self._threads:
                thread.join(timeout=_THREADS_S)

    def unload(self) -> None:
        driver, self._driver = self._driver, None
        link, self._link = self._link, None
        if driver is not None:
            driver.close(_STOP_AT_THE_END_S)  # with an acknowledged stop if the robot still answers
        if link is not None:
            link.close()

    def give_back(self) -> None:
        self.unload()

    # -- getting ready -------------------------------------------------------------------------

    def _connect(self, driver: Go2Driver, stop: threading.Event) -> None:
        """Wait for the robot, then get it ready as the settings say; retry until that works."""
        while not stop.is_set():
            if not until_connected(driver, 1.0, stop.is_set):
                continue
            try:
                avoiding = driver.start_avoidance()
                if self._settings.stand_up:
                    driver.stand_up()
                    driver.balance()
            except DriverError as error:
                self._trouble = str(error)
                stop.wait(_RETRY_S)
                continue
            self._set_ready(True)
            if stop.is_set():
                driver.hand_back()  # deactivated in the meantime
                return
            how = "with its obstacle avoidance" if avoiding else "without obstacle avoidance"
            self.get_logger().info(f"the robot is ready, {how}")
            return

    def _set_ready(self, ready: bool, trouble: str = "") -> None:
        with self._lock:
            self._ready, self._trouble = ready and not self._stop.is_set(), trouble

    def _stand_up(self, driver: Go2Driver) -> None:
        if self._stop.is_set():
            raise StartError(f"{self.reason} Activate it first.")
        driver.stand_up()
        driver.balance()
        self._set_ready(True)

    def _stand_down(self, driver: Go2Driver) -> None:
        self._set_ready(False, "lying down on request")
        driver.stand_down()

    def _damp(self, driver: Go2Driver) -> None:
        self._set_ready(False, "limp on request")
        driver.damp()

    def _serve(self, act: Any, _: Trigger.Request, answer: Trigger.Response) -> Trigger.Response:
        try:
            if self._driver is None:
                raise StartError(f"{self.reason} Configure it first.")
            act(self._driver)
            answer.success, answer.message = True, "confirmed by the robot"
        except (DriverError, StartError) as error:
            answer.success, answer.message = False, str(error)
        return answer

    # -- motion --------------------------------------------------------------------------------

    def _on_command(self, message: Twist | TwistStamped) -> None:
        twist = twist_of(message)
        now = time.monotonic()
        with self._lock:
            self._watchdog.command(Velocity(twist.linear.x, twist.angular.z), now)
            self._lateral = twist.linear.y if math.isfinite(twist.linear.y) else 0.0
        self._drive(now)

    def _drive(self, now: float) -> None:
        driver = self._driver
        if driver is None:
            return
        with self._lock:
            contested = self._commands.contested()  # looks around, whether a command is fresh or not
            fresh = self._ready and self._watchdog.fresh(now) and not contested
            command, lateral = self._watchdog.output(now), self._lateral
        try:
            if fresh:
                driver.move(command.vx, lateral, command.wz)
            elif driver.moving:
                driver.move(0.0, 0.0, 0.0)  # the driver makes an acknowledged stop of it
        except DriverError as error:
            self._trouble = str(error)

    def _tick(self) -> None:
        self._drive(time.monotonic())
        self._report()

    def _on_state(self) -> None:
        driver = self._driver
        state = driver.state() if driver is not None else None
        if state is None or state.age() > 0.1 or self._stop.is_set():
            return  # the newest state is unreadable, or the node is inactive
        with self._lock:
            self._watchdog.odometry(state.received)
        if state.received - self._odometry_time < _ODOMETRY_S:
            return
        self._odometry_time = state.received
        stamp = self.get_clock().now().to_msg()
        self._base.publish(state, stamp)
        if state.battery is not None and state.received - self._battery_time > 1.0:
            self._battery_time = state.received
            battery = BatteryState(percentage=float(state.battery), present=True)
            battery.header.stamp = stamp
            battery.voltage = battery.temperature = battery.current = math.nan
            battery.charge = battery.capacity = battery.design_capacity = math.nan
            self._battery.publish(battery)

    def _report(self) -> None:
        driver = self._driver
        if self._stop.is_set() or driver is None:
            return
        now = time.monotonic()
        fault, state = driver.fault(), driver.state()
        values: dict[str, Any] = {"ready": self._ready, "pictures": self._pictures, "avoidance": driver.avoiding}
        if state is not None:
            values |= {
                "posture": state.posture.value, "mode": state.mode, "error_code": state.error_code,
                "state_age_s": round(state.age(now), 3), "battery": state.battery,
            }  # fmt: skip
        if fault is not None:
            values["cause"] = fault.cause.name
            self._health.report(health.ERROR, str(fault), values)
        elif self._commands.trouble:
            self._health.report(health.ERROR, self._commands.trouble, values)
        elif not self._ready:
            self._health.report(health.WARN, self._trouble or "not ready", values)
        elif now - self._picture_time > _CAMERA_SILENT_S:
            text = f"no picture comes: {self._camera_trouble or 'waiting for the first'}"
            self._health.report(health.WARN, text, values)
        else:
            self._health.report(health.OK, "ready", values)

    # -- camera --------------------------------------------------------------------------------

    def _watch(self, driver: Go2Driver, stop: threading.Event) -> None:
        """Request pictures at the camera's rate, one at a time."""
        due = time.monotonic()
        until_connected(driver, math.inf, stop.is_set)
        while not stop.is_set():
            stamp = self.get_clock().now()
            try:
                picture = self._picture(driver)
                if not stop.is_set():
                    self._show(picture, stamp)
            except (DriverError, ImageMessageError) as error:
                self._camera_trouble = str(error)
            except Exception as error:
                if not stop.is_set():
                    self.give_up(f"The camera's thread ended: {type(error).__name__}: {error}")
                return
            due = max(due + 1.0 / self._settings.camera_rate, time.monotonic())
            stop.wait(due - time.monotonic())

    def _picture(self, driver: Go2Driver) -> np.ndarray:
        """A picture from the robot: uint8 (height, width, 3), RGB."""
        answer = driver.request(VIDEO, VideoApi.GET_IMAGE_SAMPLE, "", 1.0, 1)
        if answer.code != Code.OK:
            raise ImageMessageError(f"The robot sends no picture: {code_text(answer.code)}.")
        return decode_picture(answer.binary)

    def _show(self, picture: np.ndarray, asked: Time) -> None:
        image = from_rgb(picture)
        nanoseconds = asked.nanoseconds - round(self._settings.camera_delay_s * 1e9)
        image.header.stamp = Time(nanoseconds=max(0, nanoseconds)).to_msg()
        image.header.frame_id = self._base.frame(self._settings.camera_frame)
        fov = self._settings.camera_fov
        focal = image.height / 2 / math.tan(fov / 2) if fov > 0.0 else 0.0
        self._image.publish(image)
        self._info.publish(camera_info(image.header, image.width, image.height, focal))
        self._pictures += 1
        self._picture_time = time.monotonic()


def decode_picture(data: bytes) -> np.ndarray:
    """A JPEG as uint8 (height, width, 3), RGB. :raises ImageMessageError: for anything else."""
    if len(data) > JPEG_LIMIT_BYTES:
        raise ImageMessageError(f"The robot sent a picture of {len(data)} bytes.")
    try:
        return read_picture(data, f"the robot's picture of {len(data)} bytes", containers=("JPEG",))
    except PictureError as error:
        raise ImageMessageError(str(error)) from error


def main() -> None:
    run_main(Go2Node, threads=4)
