# SPDX-License-Identifier: Apache-2.0
"""Records the topics and services that nodes create on the ROS graph; spins nothing and loads no model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import rclpy
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

_OWN = ("/parameter_events", "/rosout", "~/", "/get_", "/set_", "/list_", "/describe_")
MAKERS = {
    "create_publisher": "publishes", "create_subscription": "listens", "create_service": "serves",
    "create_client": "calls",
}  # fmt: skip
MANAGED = ("draft", "serve", "memory", "verifier", "bridge", "navigation", "go2")


@dataclass(frozen=True)
class End:
    """One end of a topic or service. ``way``: publishes, listens, serves or calls."""

    node: str
    way: str
    name: str
    kind: str
    qos: str = ""
    reliable: bool = True
    latched: bool = False


def qos_text(profile: QoSProfile | int) -> tuple[str, bool, bool]:
    """As the page says it; an int is rclpy's short form of a depth."""
    if isinstance(profile, int):
        return f"reliable, depth {profile}", True, False
    reliable = profile.reliability == ReliabilityPolicy.RELIABLE
    latched = profile.durability == DurabilityPolicy.TRANSIENT_LOCAL
    words = ["reliable" if reliable else "best effort", *(["latched"] if latched else [])]
    return ", ".join([*words, f"depth {profile.depth}"]), reliable, latched


def _kind(kind: type) -> str:
    package, form = kind.__module__.split(".")[:2]
    return f"{package}/{form}/{kind.__name__}"


@cache
def all_ends() -> frozenset[End]:
    """The ends of every node of the bring-up table, inactive, and of what some make only when active or asked for.

    Made once in a process, in the ROS domain of the first test that asks.
    """
    ends: set[End] = set()
    before = {maker: getattr(Node, maker) for maker in MAKERS}

    def wrap(maker: str) -> Any:
        def make(node: Node, kind: type, name: str, *args: Any, **rest: Any) -> Any:
            if _kind(kind).split("/")[0] not in ("rcl_interfaces", "lifecycle_msgs", "type_description_interfaces"):
                ends.add(_end(node, MAKERS[maker], kind, name, args, rest))
            return before[maker](node, kind, name, *args, **rest)

        return make

    try:
        for maker in MAKERS:
            setattr(Node, maker, wrap(maker))
        _make_all()
    finally:
        for maker, original in before.items():
            setattr(Node, maker, original)
    return frozenset(ends)


def _end(node: Node, way: str, kind: type, name: str, args: Any, rest: Any) -> End:
    owner = node.get_name().removeprefix("_").removesuffix("_link").removesuffix("_inputs")
    name = name.removeprefix("/") if name.startswith("/camera/") else name  # made by its resolved name
    end = End(owner, way, name.replace("~", owner), _kind(kind))
    if way not in ("publishes", "listens"):
        return end
    text, reliable, latched = qos_text(rest.get("qos_profile", args[-1 if way == "publishes" else 1] if args else 10))
    return replace(end, qos=text, reliable=reliable, latched=latched)


def _make_all() -> None:
    """Make every node, and what some make later."""
    from dsd_ros.nodes.bridge_node import BridgeNode
    from dsd_ros.nodes.draft_node import DraftNode
    from dsd_ros.nodes.go2_node import Go2Node
    from dsd_ros.nodes.memory_node import MemoryNode
    from dsd_ros.nodes.navigation_node import NavigationNode
    from dsd_ros.nodes.serve_node import ServeNode
    from dsd_ros.nodes.simulator_node import SimulatorNode
    from dsd_ros.nodes.supervisor_node import SupervisorNode
    from dsd_ros.nodes.verifier_node import VerifierNode
    from dsd_ros.nodes.visual_node import VisualNode
    from dsd_ros.observe.ros import live
    from dsd_ros.ros import dds_channel, sensor_ahead

    args = ["--ros-args"]
    for name in MANAGED:
        args += ["-p", f"{name}_node:autostart:=false"]
    rclpy.init(args=args)
    made: list[Any] = []
    try:
        for node in (
            DraftNode, ServeNode, MemoryNode, VerifierNode, BridgeNode, NavigationNode, SupervisorNode, Go2Node,
            SimulatorNode, VisualNode,
        ):  # fmt: skip
            made.append(node())  # noqa: PERF401  # what was made is closed
        nodes = {node.get_name(): node for node in made}
        view = Node("view_node", start_parameter_services=False)
        made.append(view)
        nodes["go2_node"].load()
        for name in ("draft_node", "supervisor_node", "visual_node", "view_node"):
            _hear_compressed_pictures(nodes.get(name, view))
        for name in ("verifier_node", "bridge_node"):
            dds_channel.VerifierTopics(nodes[name], print).node.destroy_node()
        supervisor = nodes["supervisor_node"]
        settings = supervisor._settings
        for sensor in ("range", "scan", "depth"):
            wants = replace(settings.require, obstacle=sensor)
            sensor_ahead.subscribe_obstacle_sensor(supervisor, wants, lambda: supervisor._settings, print)
        seen = live.Live(nodes["visual_node"])
        seen.picture()
        seen.close()
        seen = live.Live(view)
        seen.picture()
        seen.close()
    finally:
        for node in made:
            for end in ("give_back", "close"):
                if hasattr(node, end):
                    with contextlib.suppress(Exception):
                        getattr(node, end)()
                    break
            node.destroy_node()
        rclpy.shutdown()


def _hear_compressed_pictures(node: Node) -> None:
    """Make what ``image_transport`` auto makes once a camera publishes compressed pictures alone."""
    from dsd_ros.ros import camera, qos

    topic = camera.CameraTopic(node, "compressed")
    node.create_subscription(topic.kind, topic.name, print, qos.CAMERA)
