# SPDX-License-Identifier: Apache-2.0
"""The Go2's messages and topics in ROS (unitree_api, unitree_go), and the link that a driver's calls use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import QoSProfile

from dsd_ros.robot.go2.protocol import OBSTACLES_AVOID, SPORT, VIDEO, ServiceRequest, ServiceResponse
from dsd_ros.ros import qos
from dsd_ros.ros.running import StartError

SERVICES = (SPORT, OBSTACLES_AVOID, VIDEO)

try:
    from unitree_api.msg import Request as RequestMessage, Response as ResponseMessage
    from unitree_go.msg import LowState, SportModeState, WirelessController
except ImportError as error:
    raise StartError(
        f"The Go2's messages are not built ({error}): build unitree_api and unitree_go of "
        "github.com/unitreerobotics/unitree_ros2 and source that workspace, or run `make setup`."
    ) from error


def robot_topic(name: str) -> str:
    """A topic of the robot, absolute because the robot has no namespaces."""
    return f"/{name}"


class RosLink:
    """Sends a driver's requests, and delivers responses, state and battery to it; one per robot."""

    def __init__(self, node: Node, group: CallbackGroup | None = None) -> None:
        self._driver: Any = None
        self.on_arrival: Callable[[], None] = lambda: None  # called after every state message
        self.on_remote: Callable[[Any], None] | None = None  # takes the remote control's WirelessController
        self._requests = {
            service: node.create_publisher(RequestMessage, robot_topic(f"api/{service}/request"), qos.ROBOT_SERVICE)
            for service in SERVICES
        }
        self._subscriptions: list[Any] = []
        self._node, self._group = node, group

    def attach(self, driver: Any) -> None:
        """Subscribe to the robot's topics for a driver."""
        self._driver = driver
        for service in SERVICES:
            take = partial(self._on_response, service)
            self._subscribe(ResponseMessage, f"api/{service}/response", take, qos.ROBOT_SERVICE)
        # As bytes, because two layouts share this type's name. This project defines the longer one, since Fast DDS
        # drops samples that are longer than the reader's type.
        self._subscribe(SportModeState, "sportmodestate", self._on_state, qos.ROBOT_STATE, raw=True)
        self._subscribe(
            LowState, "lf/lowstate", lambda message: driver.on_battery(message.bms_state.soc / 100.0), qos.ROBOT_STATE
        )

        if self.on_remote is not None:
            self._subscribe(WirelessController, "wirelesscontroller", self.on_remote, qos.ROBOT_STATE)

    def close(self) -> None:
        """Destroy publishers and subscriptions; call it after the driver's close."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        for publisher in self._requests.values():
            self._node.destroy_publisher(publisher)
        self._subscriptions.clear()
        self._requests.clear()

    def _subscribe(
        self, kind: type, name: str, take: Callable[[Any], None], profile: QoSProfile, raw: bool = False
    ) -> None:
        made = self._node.create_subscription(
            kind, robot_topic(name), take, profile, callback_group=self._group, raw=raw
        )
        self._subscriptions.append(made)

    def send(self, service: str, request: ServiceRequest) -> bool:
        publisher = self._requests.get(service)
        if publisher is None:  # closed
            return False
        publisher.publish(to_message(request))
        return publisher.get_subscription_count() > 0

    def _on_state(self, data: bytes) -> None:
        self._driver.on_state(data)
        self.on_arrival()

    def _on_response(self, service: str, message: Any) -> None:
        identity = message.header.identity
        code, binary = message.header.status.code, message.binary.tobytes()
        self._driver.on_response(service, ServiceResponse(identity.id, identity.api_id, code, message.data, binary))


def to_message(request: ServiceRequest) -> RequestMessage:
    message = RequestMessage(parameter=request.parameter)
    message.header.identity.id, message.header.identity.api_id = request.identity, request.api_id
    message.header.policy.noreply = request.noreply
    return message


def from_message(message: RequestMessage) -> ServiceRequest:
    header = message.header
    return ServiceRequest(header.identity.id, header.identity.api_id, message.parameter, header.policy.noreply)


def answer_message(response: ServiceResponse) -> ResponseMessage:
    message = ResponseMessage(data=response.data)
    message.header.identity.id, message.header.identity.api_id = response.identity, response.api_id
    message.header.status.code = response.code
    message.binary.frombytes(response.binary)
    return message
