"""What a bag says of the system it was recorded from: versions, and every node's parameters."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable
from typing import Any

from rcl_interfaces.srv import GetParameters, ListParameters
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.parameter import parameter_value_to_python

from dsd_ros import __version__

_PACKAGES = (
    "torch", "transformers", "tokenizers", "numpy", "mujoco", "opencv-python-headless", "rosbags",
)  # fmt: skip
_ASK_AGAIN = 5  # rounds of a question without an answer


def versions() -> dict[str, str]:
    """Of this package, Python, ROS, and what decodes depend on."""
    found = {
        "dsd_ros": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "ros_distro": os.environ.get("ROS_DISTRO", "jazzy (wheels)"),
        "rmw": os.environ.get("RMW_IMPLEMENTATION", "default"),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class ParameterCollector:
    """Asks every node of the namespace for its parameters, once; ``on_news(json text)`` after each answer."""

    def __init__(self, node: Node, group: CallbackGroup, on_news: Callable[[str], None]) -> None:
        self._node, self._group, self._on_news = node, group, on_news
        self._found: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, int] = {}  # rounds ago
        self._clients: dict[str, list[Any]] = {}

    def look(self) -> None:
        """Ask the nodes that are new. Call it from time to time, in ``group``."""
        for name, namespace in self._node.get_node_names_and_namespaces():
            full = f"{namespace.rstrip('/')}/{name}"
            if namespace != self._node.get_namespace() or full in self._found:
                continue
            self._asked[full] = self._asked.get(full, _ASK_AGAIN) + 1
            if self._asked[full] > _ASK_AGAIN:
                self._asked[full] = 0
                self._ask(full)

    def _ask(self, name: str) -> None:
        self._forget(name)
        listing = self._client(name, ListParameters, "list_parameters")
        getting = self._client(name, GetParameters, "get_parameters")
        if not (listing.service_is_ready() and getting.service_is_ready()):
            self._forget(name)  # a node without parameter services, or one that is not ready yet
            return

        def got(names: list[str], future: Any) -> None:
            answer = future.result()
            if answer is not None:
                values = [parameter_value_to_python(value) for value in answer.values]
                self._found[name] = dict(sorted(zip(names, map(_plain, values), strict=True)))
                self._on_news(json.dumps(self._found, sort_keys=True))
            self._forget(name)

        def listed(future: Any) -> None:
            answer = future.result()
            if answer is not None:
                names = list(answer.result.names)
                call = getting.call_async(GetParameters.Request(names=names))
                call.add_done_callback(lambda done: got(names, done))

        listing.call_async(ListParameters.Request()).add_done_callback(listed)

    def _client(self, name: str, kind: type, service: str) -> Any:
        client = self._node.create_client(kind, f"{name}/{service}", callback_group=self._group)
        self._clients.setdefault(name, []).append(client)
        return client

    def _forget(self, name: str) -> None:
        for client in self._clients.pop(name, []):
            self._node.destroy_client(client)


def _plain(value: Any) -> Any:
    return list(value) if hasattr(value, "tolist") or isinstance(value, (list, tuple)) else value
