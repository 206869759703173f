# SPDX-License-Identifier: Apache-2.0
"""Build the paths and markers that RViz shows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from geometry_msgs.msg import Point, PoseStamped
from nav_msgs.msg import Path
from std_msgs.msg import ColorRGBA, Header
from visualization_msgs.msg import Marker

from dsd_ros.observe.view.state import Overlay, Pose, ShownStep, motion_of
from dsd_ros.ros.base_messages import marker_at
from dsd_ros.ros.stamps import quaternion

STEPS_SHOWN = 200
_GREEN = ColorRGBA(r=0.38, g=0.83, b=0.50, a=0.95)
_AMBER = ColorRGBA(r=0.96, g=0.75, b=0.32, a=0.95)
_RED = ColorRGBA(r=0.95, g=0.25, b=0.22, a=1.0)
_WHITE = ColorRGBA(r=0.95, g=0.95, b=0.95, a=1.0)


def path_message(poses: Iterable[Pose], header: Header) -> Path:
    """Poses on the floor as nav_msgs/Path."""
    path = Path(header=header)
    for x, y, yaw in poses:
        stamped = PoseStamped(header=header)
        stamped.pose.position.x, stamped.pose.position.y = x, y
        stamped.pose.orientation = quaternion(yaw)
        path.poses.append(stamped)
    return path


def intended_path(step: ShownStep | None, header: Header) -> Path:
    """Where the action under way leads; empty without one."""
    poses = motion_of(step.pose, step.ahead, step.turn) if step is not None else []
    return path_message(poses, header)


def fresh_start(header: Header) -> Marker:
    """A marker that deletes those of earlier runs."""
    return Marker(header=header, action=Marker.DELETEALL)


def step_markers(steps: Iterable[ShownStep], header: Header) -> list[Marker]:
    """The executed actions: namespace "steps", id: the action's number. They stay until the next run."""
    markers = []
    for step in list(steps)[-STEPS_SHOWN:]:
        marker = marker_at(header, "steps", step.number, Marker.ARROW, step.pose)
        marker.scale.x, marker.scale.y, marker.scale.z = 0.22, 0.05, 0.05
        marker.pose.orientation = quaternion(step.pose[2] + step.turn)
        marker.color = _GREEN if step.verified else _AMBER
        markers.append(marker)
    return markers


def present_markers(overlay: Overlay, step: ShownStep | None, pose: Pose, header: Header) -> list[Marker]:
    """The current state: "intended", "reply", "safety" and "memory", each with id 0; they fade unless sent again."""
    markers = []
    if step is not None:
        marker = marker_at(header, "intended", 0, Marker.LINE_STRIP, (0.0, 0.0, 0.0), fades=True)
        marker.scale.x = 0.04
        marker.color = _GREEN if step.verified else _AMBER
        reach = 0.35 if step.turn and not step.ahead else 0.0  # a turn is drawn as the arc of the nose
        marker.points = [
            Point(x=x + reach * math.cos(yaw), y=y + reach * math.sin(yaw), z=0.03)
            for x, y, yaw in motion_of(step.pose, step.ahead, step.turn)
        ]
        if len(marker.points) < 2:
            marker.points = marker.points * 2  # a line strip needs two points
        markers.append(marker)
    text = overlay.action or overlay.reply.text[-80:]
    if text:
        markers.append(_text("reply", text, pose, 0.75, _WHITE, header))
    if overlay.causes:
        markers.append(_text("safety", overlay.causes[0], pose, 0.95, _RED, header))
    memory = overlay.memory
    lines = [memory.question] if memory.question else [f"{said} [{by}]" if by else said for said, by in memory.told]
    if lines:
        text = "\n".join(lines)
        markers.append(_text("memory", text, pose, 1.2, _AMBER if memory.question else _WHITE, header, 600))
    return markers


def _text(
    name: str, text: str, pose: Pose, height: float, colour: ColorRGBA, header: Header, most: int = 160
) -> Marker:
    marker = marker_at(header, name, 0, Marker.TEXT_VIEW_FACING, pose, fades=True)
    marker.pose.position.z = height
    marker.scale.z = 0.13
    marker.color, marker.text = colour, text[:most]
    return marker
