# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Go2: the robot's own topics, in the simulated world; ground truth is on topics of its own.

The topic ``simulator/fault`` (std_msgs/String) injects failures: ``robot freeze``, ``robot slow``, ``robot die``,
``robot reject``; ``camera freeze`` stops the pictures; ``robot ok``, ``camera ok``, ``all ok`` end them.
"""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image as Pictures
from std_msgs.msg import String
from unitree_api.msg import Request as RequestMessage, Response as ResponseMessage
from unitree_go.msg import LowState, SportModeState

from dsd_lab.robot.faults import OK, FaultBoard
from dsd_lab.robot.go2_standin import Go2Standin, StandinFault
from dsd_ros.options import option
from dsd_ros.robot.frames import FrameSettings
from dsd_ros.robot.go2.protocol import VIDEO, Code, ServiceRequest, ServiceResponse, VideoApi
from dsd_ros.robot.sim.offscreen import import_mujoco
from dsd_ros.robot.sim.simulator import Simulator, SimulatorError
from dsd_ros.robot.sim.world import World
from dsd_ros.ros import health, qos
from dsd_ros.ros.base_messages import GroundTruthPublisher
from dsd_ros.ros.go2_messages import SERVICES, answer_message, from_message, robot_topic
from dsd_ros.ros.parameters import declare
from dsd_ros.ros.running import EXIT_BAD_START, RunnableNode, run_main, steady_timer
from dsd_ros.ros.settings import WorldSettings

_JPEG_QUALITY = 95
_CHARGE = 80  # per cent, of the battery


@dataclass(frozen=True)
class StandinSettings(WorldSettings):
    """A stand-in Go2: the real robot's topics, in the simulated world."""

    lying: bool = option(True, "start lying down; it must stand up before it can move")
    path_points: bool = option(False, "send the vendor SDK's layout of SportModeState")
    world_frame: str = option(FrameSettings.odom_frame, "frame of the ground truth's markers")


class Go2StandinNode(RunnableNode):
    """See the module. The base moves in the executor's thread, pictures are rendered in a thread of their own."""

    def __init__(self) -> None:
        super().__init__("go2_standin_node")
        settings = declare(self, StandinSettings)
        world = World.from_seed(settings.seed, settings.instruction or None)
        import_mujoco()  # raises now what the first picture would raise
        self._simulator = Simulator(world)
        self._robot = Go2Standin(self._simulator, settings.lying, settings.path_points)
        kinds = [fault.value for fault in StandinFault if fault is not StandinFault.NONE]
        self._faults = FaultBoard({"camera": ("freeze",), "robot": kinds})
        self._wanted: deque[ServiceRequest] = deque(maxlen=4)  # pictures
        self._wake = threading.Condition()
        self._closing = False
        self._low_time = 0.0

        self._state = self.create_publisher(SportModeState, robot_topic("sportmodestate"), qos.ROBOT_SERVICE)
        self._low = self.create_publisher(LowState, robot_topic("lf/lowstate"), qos.ROBOT_SERVICE)
        self._answers = {
            service: self.create_publisher(ResponseMessage, robot_topic(f"api/{service}/response"), qos.ROBOT_SERVICE)
            for service in SERVICES
        }
        for service in SERVICES:
            take = partial(self._on_request, service)
            self.create_subscription(RequestMessage, robot_topic(f"api/{service}/request"), take, qos.ROBOT_SERVICE)
        self.create_subscription(String, "simulator/fault", self._on_fault, qos.STATE)
        self._truth = GroundTruthPublisher(self, self._simulator, settings.world_frame)
        self._health = health.Health(self, "stand-in Go2")
        steady_timer(self, 0.02, self._tick)
        self._camera = threading.Thread(target=self._draw, name="camera", daemon=True)
        self._camera.start()
        self.get_logger().info(
            f"stand-in Go2 in world {settings.seed}: {world.instruction!r}, {'lying' if settings.lying else 'standing'}"
        )

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._camera.join(timeout=0.5)

    def _on_fault(self, message: String) -> None:
        complaint = self._faults.set(message.data)
        self.get_logger().warning(complaint or f"faults: {str(self._faults) or 'none'}")
        if not complaint and message.data.split()[0] in ("robot", "all"):
            fault = self._faults.of("robot")
            self._robot.fault = StandinFault.NONE if fault == OK else StandinFault(fault)

    # -- services and state --------------------------------------------------------------------

    def _on_request(self, service: str, message: RequestMessage) -> None:
        request = from_message(message)
        if service == VIDEO:
            frozen = self._robot.fault is StandinFault.FREEZE or self._faults.of("camera") != OK
            if not frozen:
                with self._wake:
                    self._wanted.append(request)
                    self._wake.notify_all()
            return
        self._robot.receive(service, request)
        self._answer()

    def _answer(self) -> None:
        for service, response in self._robot.answers():
            self._answers[service].publish(answer_message(response))

    def _tick(self) -> None:
        self._answer()
        self._robot.advance()
        data = self._robot.state()
        if data is not None:
            self._state.publish(data)
            if time.monotonic() - self._low_time > 0.5:
                self._low_time = time.monotonic()
                low = LowState()
                low.bms_state.soc = _CHARGE
                self._low.publish(low)
        self._truth.publish()
        fault = self._robot.fault
        level = health.OK if fault is StandinFault.NONE else health.WARN
        self._health.report(level, f"fault: {fault.value}", {"mode": self._robot.mode()})

    # -- video ---------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Answer requests for pictures; the OpenGL context stays in this thread."""
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._wanted or self._closing)
                    if self._closing:
                        return
                    request = self._wanted.popleft()
                response = self._picture(request)
                if not self._closing:
                    self._answers[VIDEO].publish(answer_message(response))
        except SimulatorError as error:
            self.exit_code, self.failure = EXIT_BAD_START, str(error)
        except Exception as error:
            if not self._closing:
                self.failure = f"The camera's thread ended: {type(error).__name__}: {error}"
        finally:
            self._simulator.close()

    def _picture(self, request: ServiceRequest) -> ServiceResponse:
        if self._robot.fault is StandinFault.REJECT:
            return ServiceResponse(request.identity, request.api_id, Code.INTERNAL)
        if request.api_id != VideoApi.GET_IMAGE_SAMPLE:
            return ServiceResponse(request.identity, request.api_id, Code.NOT_IMPLEMENTED)
        jpeg = encode_picture(self._simulator.render())
        return ServiceResponse(request.identity, request.api_id, Code.OK, "", jpeg)


def encode_picture(image: np.ndarray) -> bytes:
    """An RGB picture, uint8 (height, width, 3), as JPEG."""
    target = io.BytesIO()
    Pictures.fromarray(image).save(target, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return target.getvalue()


def main() -> None:
    run_main(Go2StandinNode)
