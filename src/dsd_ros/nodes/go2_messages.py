"""The Go2's messages over ROS: unitree_api and unitree_go, wherever they come from, and the topics they are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import QoSProfile

from dsd_ros.robot.go2.protocol import OBSTACLES_AVOID, SPORT, VIDEO, Request, Response
from dsd_ros.ros import qos
from dsd_ros.ros.running import StartError

SERVICES = (SPORT, OBSTACLES_AVOID, VIDEO)

try:
    from unitree_api.msg import Request as RequestMessage
    from unitree_api.msg import Response as ResponseMessage
    from unitree_go.msg import LowState, SportModeState
except ImportError as error:
    raise StartError(
        f"The Go2's messages are not built ({error}): source a workspace with unitree_ros2, or run `make setup`, "
        "or `colcon build --base-paths src/unitree_api src/unitree_go` and source it."
    ) from error


def topic(prefix: str, name: str) -> str:
    """A topic of the robot. The robot knows no namespaces, so they are absolute; a prefix tells stand-ins apart."""
    return f"{prefix.rstrip('/')}/{name}"


class RosLink:
    """Carries a driver's requests, and hands it answers, state and battery; one for each robot."""

    def __init__(self, node: Node, prefix: str, group: CallbackGroup | None = None) -> None:
        self._driver: Any = None
        self.on_arrival: Callable[[], None] = lambda: None  # called behind every state
        self._requests = {
            service: node.create_publisher(RequestMessage, topic(prefix, f"api/{service}/request"), qos.ROBOT_SERVICE)
            for service in SERVICES
        }
        self._subscriptions: list[Any] = []
        self._node, self._prefix, self._group = node, prefix, group

    def attach(self, driver: Any) -> None:
        """Begin to listen for a driver."""
        self._driver = driver
        for service in SERVICES:
            self._listen(
                ResponseMessage,
                f"api/{service}/response",
                lambda message, service=service: self._on_response(service, message),
                qos.ROBOT_SERVICE,
            )
        # As bytes: of the two layouts that share this type's name, only one could be read as a message. Where this
        # project's own definition is used, it is the longer one, since Fast DDS drops what exceeds its reader's type.
        self._listen(SportModeState, "sportmodestate", self._on_state, qos.ROBOT_STATE, raw=True)
        self._listen(
            LowState, "lf/lowstate", lambda message: driver.on_battery(message.bms_state.soc / 100.0), qos.ROBOT_STATE
        )

    def close(self) -> None:
        """Give the topics back; call it behind the driver's own close."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        for publisher in self._requests.values():
            self._node.destroy_publisher(publisher)
        self._subscriptions.clear()
        self._requests.clear()

    def _listen(
        self, kind: type, name: str, take: Callable[[Any], None], profile: QoSProfile, raw: bool = False
    ) -> None:
        self._subscriptions.append(
            self._node.create_subscription(
                kind, topic(self._prefix, name), take, profile, callback_group=self._group, raw=raw
            )
        )

    def send(self, service: str, request: Request) -> bool:
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
        self._driver.on_response(
            service,
            Response(identity.id, identity.api_id, message.header.status.code, message.data, message.binary.tobytes()),
        )


def to_message(request: Request) -> RequestMessage:
    message = RequestMessage(parameter=request.parameter)
    message.header.identity.id, message.header.identity.api_id = request.identity, request.api_id
    message.header.policy.noreply = request.noreply
    return message


def from_message(message: RequestMessage) -> Request:
    header = message.header
    return Request(header.identity.id, header.identity.api_id, message.parameter, header.policy.noreply)


def answer_message(response: Response) -> ResponseMessage:
    message = ResponseMessage(data=response.data)
    message.header.identity.id, message.header.identity.api_id = response.identity, response.api_id
    message.header.status.code = response.code
    message.binary.frombytes(response.binary)
    return message
