"""A second node beside one's own, for topics that the owner's executor must not wait for."""

from __future__ import annotations

from typing import Any

from rclpy.node import Node
from rclpy.parameter import Parameter


def companion(owner: Node, suffix: str) -> Node:
    """The node ``<owner>_<suffix>`` in the owner's context and namespace, with no service or log of its own."""
    name = f"{owner.get_name()}_{suffix}"
    return Node(
        name,
        **named(name, owner),
        enable_rosout=False,
        start_parameter_services=False,
        parameter_overrides=[Parameter("start_type_description_service", value=False)],
    )


def named(name: str, beside: Node) -> dict[str, Any]:
    """Arguments of a Node that is to have this name in the process and namespace of another."""
    return {
        "context": beside.context,
        "namespace": beside.get_namespace(),
        # A rename of the other is meant for that alone; other remappings hold here, too.
        "cli_args": ["--ros-args", "-r", f"__node:={name}"],
    }
