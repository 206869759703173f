"""A second node beside a node, for topics that must not wait for the first one's executor."""

from __future__ import annotations

from typing import Any

from rclpy.node import Node
from rclpy.parameter import Parameter


def companion(owner: Node, suffix: str) -> Node:
    """The node ``<owner>_<suffix>`` in the owner's context and namespace, without services or a log of its own."""
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
        # A remapped name is meant for the other node alone; its other remappings hold here too.
        "cli_args": ["--ros-args", "-r", f"__node:={name}"],
    }
